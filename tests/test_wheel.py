"""Tests of the wheel, built from the tree and from the sdist: it is complete, and works without a checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from uv import find_uv_bin

ROOT = Path(__file__).resolve().parent.parent
UV = find_uv_bin()

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def run(*command: str, cwd: Path) -> str:
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    result = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, f"{' '.join(command)}\n{result.stdout}{result.stderr}"
    return result.stdout


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Paths of the wheels built from the checkout (key `tree`) and from the source distribution (key `sdist`)."""
    paths = {}
    for name, flags in (("tree", ["--wheel"]), ("sdist", [])):
        out = tmp_path_factory.mktemp(name)
        run(UV, "build", "--quiet", *flags, "--out-dir", str(out), str(ROOT), cwd=out)
        (paths[name],) = out.glob("*.whl")
    return paths


def contents(wheel: Path) -> dict[str, int]:
    with zipfile.ZipFile(wheel) as archive:
        return {entry.filename: entry.CRC for entry in archive.infolist() if not entry.filename.endswith("RECORD")}


def test_both_wheels_have_the_same_files(wheels: dict[str, Path]):
    assert contents(wheels["tree"]) == contents(wheels["sdist"])


def test_the_wheel_has_configuration_vocabulary_and_licences(wheels: dict[str, Path]):
    names = set(contents(wheels["sdist"]))
    conf = [path.relative_to(ROOT / "conf") for path in (ROOT / "conf").rglob("*.yaml")]
    conf += [Path("experiment") / path.name for path in (ROOT / "experiments").glob("*.yaml")]
    conf += [Path("sweep") / path.name for path in (ROOT / "sweeps").glob("*.yaml")]
    assert {f"valkyrie/_conf/{path}" for path in conf} <= names
    assert {"valkyrie/data/gpt2.tiktoken.xz", "valkyrie/data/gpt2.tiktoken.LICENSE"} <= names
    assert {"valkyrie/search/tune/compiler_options.yaml", "valkyrie/search/compile/published.json"} <= names
    assert {f"valkyrie/report/templates/page.{kind}" for kind in ("html", "css", "js")} <= names
    assert {f"valkyrie/code_eval/problems/{name}.jsonl" for name in ("cpp", "python")} <= names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "valkyrie").rglob("*.py")}
    modules = {path.removeprefix("valkyrie/plugins/") for path in modules}
    assert modules <= names
    assert not [name for name in names if name.startswith(("tests/", "conf/")) or ".cache" in name]


@pytest.fixture(scope="module")
def bin_folder(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` folder of a new virtual environment with the wheel installed.

    Dependencies come from the environment that runs the tests.
    """
    folder = tmp_path_factory.mktemp("environment")
    run(UV, "venv", "--quiet", "--python", sys.executable, str(folder / "venv"), cwd=folder)
    python = folder / "venv" / "bin" / "python"
    run(UV, "pip", "install", "--quiet", "--no-deps", "--python", str(python), str(wheels["sdist"]), cwd=folder)
    purelib = run(str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip()
    Path(purelib, "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    module_path = run(str(python), "-c", "import valkyrie; print(valkyrie.__file__)", cwd=folder).strip()
    assert module_path.startswith(purelib), "the wheel itself is tested, not the checkout"
    return python.parent


def test_the_installed_command_works_in_an_empty_folder(bin_folder: Path, tmp_path: Path):
    printed = run(str(bin_folder / "valkyrie-train"), "--cfg", "job", "+experiment=valkyrie_1b_v4_64", cwd=tmp_path)
    assert "name: valkyrie_1b" in printed
    large = ("mode=show", "model=valkyrie_1b", "mesh=4x4x2", "partition=2d_tp")
    shown = run(str(bin_folder / "valkyrie-train"), *large, cwd=tmp_path)
    assert "x=4 MP1(" in shown
    assert list(tmp_path.iterdir()) == []


def test_the_installed_vocabulary_is_read_without_a_network(bin_folder: Path, tmp_path: Path):
    script = (
        "from valkyrie.data.tokenizer import load_tokenizer\n"
        "tokenizer = load_tokenizer('gpt2')\n"
        "print(tokenizer.decode(tokenizer.encode_ordinary('def f(): pass')))\n"
    )
    assert run(str(bin_folder / "python"), "-c", script, cwd=tmp_path).strip() == "def f(): pass"
