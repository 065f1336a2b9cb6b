"""Tests of `valkyrie-launch` on other hosts: the printed plan, how a shell reads it, and how --run executes it."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import assert_golden_message
from test_launch_local import is_gone, wait_until
from valkyrie.cli import launch
from valkyrie.hardware.names import parse_target
from valkyrie.launch.choose import ENGINES, TPU_ENGINE, parse_engine_config
from valkyrie.launch.dockerfile import dockerfile
from valkyrie.launch.engine import add_name, disk_notes
from valkyrie.launch.engines import gke, skypilot, slurm, ssh, tpu_vm
from valkyrie.launch.engines.local import PROCESSES_PER_CORE
from valkyrie.launch.gcloud import accelerator_type, resource_name
from valkyrie.launch.plan import CommandStep, FileStep, Plan, command_text
from valkyrie.launch.remote import code_problems, config_folder_notes

GOLDENS = Path(__file__).parent / "goldens" / "launch"
NAME_AND_RUNS = "name=mine runs=/mnt/shared/runs"
CASES = {
    "v4-64": f"target=v4-64 zone=us-central2-b hours=24 -- +experiment=valkyrie_1b_v4_64 {NAME_AND_RUNS}",
    "v5e-8_spot": f"target=v5e-8 zone=us-west4-a spot=true -- model=gpt_125m mesh=2x4x1 batch=32 {NAME_AND_RUNS}",
    "v6e-4_spot": f"target=v6e-4 zone=us-east5-a spot=true queued=false -- "
    f"model=gpt_125m mesh=2x2x1 batch=32 {NAME_AND_RUNS}",
    "v5p_two_slices": f"target=v5p-128 slices=2 zone=us-east5-a -- model=llama_8b mesh=2s4x4x4 "
    f"batch=256 {NAME_AND_RUNS}",
    "v4_shape": f"target=v4-4x4x16 zone=us-central2-b project=p network=n spot_usd_per_hour=1 hours=2 -- "
    f"model=gpt_1b batch=256 {NAME_AND_RUNS}",
    "host": "target=host -- model=gpt_tiny 'prompt=two words' name=mine",
    "ssh": "target=ssh hosts=[ann@a,b] extra=cuda -- model=gpt_125m mesh=2x4x1 name=mine",
    "slurm": "--restarts 5 target=slurm slice=h100-16 partition=gpu hours=36.5 -- model=gpt_1b mesh=16x1x1 name=mine",
    "slurm_cpu": "target=slurm nodes=2 -- model=gpt_tiny mesh=2x1x1 name=mine",
    "gke": f"target=gke slice=v5p-128 slices=2 spot=true cluster=c image=r/i zone=us-east5-a -- "
    f"model=llama_8b mesh=2s4x4x4 batch=256 {NAME_AND_RUNS}",
    "skypilot": f"target=skypilot slice=v5e-8 spot=true zone=us-west4-a -- model=gpt_125m mesh=2x4x1 {NAME_AND_RUNS}",
    "skypilot_gpu": f"target=skypilot slice=h100-16 -- model=gpt_1b mesh=16x1x1 {NAME_AND_RUNS}",
}


def run_launch(capsys: Any, *arguments: str) -> tuple[int, str, str]:
    """Return the exit status, stdout and stderr of `valkyrie-launch`."""
    with pytest.raises(SystemExit) as error:
        launch.main(arguments)
    output = capsys.readouterr()
    return int(error.value.code or 0), output.out, output.err


def parse_config(line: str, restart_count: int = 3) -> Any:
    return parse_engine_config(line.split(), restart_count)


@pytest.mark.parametrize("case", CASES)
def test_printed_plans_equal_the_golden_files(capsys: pytest.CaptureFixture[str], case: str):
    """`UPDATE_GOLDENS=1 pytest tests/test_launch.py` rewrites the goldens."""
    status, out, err = run_launch(capsys, *shlex.split(CASES[case]))
    assert (status, err) == (0, "")
    golden = GOLDENS / f"{case}.sh"
    if os.environ.get("UPDATE_GOLDENS"):
        golden.write_text(out)
    assert out == golden.read_text()
    subprocess.run(["bash", "-n"], input=out, text=True, check=True)


PAGE = (Path(__file__).parent.parent / "valkyrie" / "launch" / "README.md").read_text()
SECTION = PAGE.split("\n## Launch\n")[1].split("\n## ")[0]


def test_the_page_shows_the_printed_plans(capsys: pytest.CaptureFixture[str]):
    typed, plan, requests = re.findall(r"^```\n(.*?)^```", SECTION, re.DOTALL | re.MULTILINE)
    commands = [shlex.split(line)[1:] for line in typed.splitlines()]
    targets = ["target=local", "target=v4-64", "target=v5e-8", "target=v6e-4", "target=v5p-128"]
    assert [command[0] for command in commands] == targets
    printed = [run_launch(capsys, *command)[1] for command in commands[1:]]
    assert plan == printed[0]
    steps = [text.split("# 1. request the slice\n")[1].split("# 2. ")[0] for text in printed[1:]]
    assert requests == "".join(steps)


@pytest.mark.parametrize("line", re.findall(r"`valkyrie-launch (.*?)`", SECTION.replace("\n", " ")))
def test_commands_listed_on_the_page_print_valid_scripts(capsys: pytest.CaptureFixture[str], line: str):
    status, out, _ = run_launch(capsys, *shlex.split(line))
    assert status == 0 and out
    subprocess.run(["bash", "-n"], input="" if line == "dockerfile" else out, text=True, check=True)


def test_every_target_has_a_golden():
    assert {CASES[case].split("target=")[1].split()[0] for case in CASES} >= {*ENGINES.names()} - {"local", TPU_ENGINE}


ARGUMENT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=12)
ARGUMENTS = st.lists(st.one_of(ARGUMENT, st.sampled_from(["it's", "$(x)", "`x`", "a\nb", "\\", '"', "END", "--a=b c"])))


def words_of(step: CommandStep) -> list[str]:
    """Return the words that a shell splits a printed command into."""
    (command,) = step.commands
    return shlex.split(re.sub(r" \\\n  (?=(?:--|'--))", " ", step.text().removesuffix(" &"))) or list(command)


@settings(max_examples=40, deadline=None)
@given(ARGUMENTS)
def test_quoted_arguments_survive_a_shell(arguments: list[str]):
    overrides = ("name=mine", *arguments)
    (command,) = parse_config("target=v4-64 zone=z").train_step(overrides).commands
    assert shlex.split(" ".join(map(shlex.quote, command))) == [*command]
    (text,) = [word for word in command if word.startswith("--command=")]
    inner = text.removeprefix("--command=").split("; ", 1)[1].rpartition(" 2>&1 | tee")[0]
    assert shlex.split(inner) == ["cd", "valkyrie", "&&", ".venv/bin/valkyrie-train", *overrides]
    for step in parse_config("target=ssh hosts=[a,b]").train_steps(overrides):
        assert shlex.split(step.commands[0][-1])[-len(overrides) :] == [*overrides]
    lines = slurm.script(parse_config("target=slurm nodes=2"), overrides)
    srun = lines.split("valkyrie-train ")[1].split("\nstatus=$?")[0]
    assert shlex.split(srun) == [*overrides]


@settings(max_examples=40, deadline=None)
@given(ARGUMENTS)
def test_arguments_survive_in_yaml(arguments: list[str]):
    overrides = ("name=mine", *arguments)
    config = parse_config("target=gke slice=v5e-8 cluster=c image=i")
    job = yaml.safe_load(gke.manifest(config, overrides))["spec"]["replicatedJobs"][0]["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    assert [word.replace("$$", "$") for word in container["command"]] == ["valkyrie-train", *overrides]
    text = gke.xpk_command(config, overrides)[-1].removeprefix("--command=")
    assert shlex.split(text) == ["valkyrie-train", *overrides]
    described = yaml.safe_load(skypilot.task(parse_config("target=skypilot slice=v5e-8"), overrides))
    assert shlex.split(described["run"]) == [".venv/bin/valkyrie-train", *overrides]


SHOWS = """
shown() { printf '%s\\0' "$@" >> "$SHOWN"; printf '\\1\\0' >> "$SHOWN"; }
gcloud() { shown gcloud "$@"; echo ACTIVE; }
git() { shown git "$@"; }
"""


def run_and_record_commands(text: str, folder: Path) -> list[list[str]]:
    """Run a script with bash in `folder` and return its calls of `gcloud` and `git`, each as a list of words.

    Shell functions replace both programs and record the words.
    """
    calls_file = folder / "shown"
    calls_file.unlink(missing_ok=True)
    calls_file.touch()
    subprocess.run(["bash", "-c", SHOWS + text], cwd=folder, env=os.environ | {"SHOWN": str(calls_file)}, check=True)
    calls: list[list[str]] = [[]]
    for word in calls_file.read_bytes().decode(errors="surrogateescape").split("\0")[:-1]:
        if word == "\1":
            calls.append([])
        else:
            calls[-1].append(word)
    return calls[:-1]


@settings(max_examples=10, deadline=None)
@given(ARGUMENTS)
def test_bash_runs_the_planned_commands(tmp_path_factory: pytest.TempPathFactory, arguments: list[str]):
    folder = tmp_path_factory.mktemp("script")
    plan = parse_config("target=v4-64 zone=us-central2-b name=mine").plan(("name=mine", *arguments))
    planned = [list(step.commands[0]) for step in plan.steps if isinstance(step, CommandStep)]
    assert run_and_record_commands(plan.text(), folder) == planned
    (folder / "valkyrie/.venv/bin").mkdir(parents=True)
    training = folder / "valkyrie/.venv/bin/valkyrie-train"
    training.write_text("#!/bin/sh\nprintf '%s\\0' \"$@\"\n")
    training.chmod(0o755)
    result = subprocess.run(["bash", "-c", planned[-1][-1].removeprefix("--command=")], cwd=folder, capture_output=True)
    expected = "".join(f"{word}\0" for word in ("name=mine", *arguments)).encode()
    assert (result.returncode, result.stdout) == (0, expected)
    assert (folder / "valkyrie/launch.log").read_bytes() == expected
    content = "\n".join(arguments)
    file_plan = Plan((), (FileStep("write", "it's here", content),))
    run_and_record_commands(file_plan.text(), folder)
    whole_lines = content if content[-1:] in ("", "\n") else f"{content}\n"
    assert (folder / "it's here").read_bytes() == whole_lines.encode()


@pytest.mark.timeout(20)
def test_a_pipe_ends_with_its_reader_and_fails_if_either_side_fails():
    assert CommandStep("nobody reads", (("yes",), ("sh", "-c", "exit 255"))).run() == 255
    assert CommandStep("nothing comes", (("sh", "-c", "exit 128"), ("cat",))).run() == 128
    assert CommandStep("well", (("echo", "x"), ("cat",), ("grep", "-q", "x"))).run() == 0


def test_a_long_command_is_wrapped_before_its_flags():
    command = ("gcloud", "ssh", "mine", *(f"--flag-{'x' * 30}={n}" for n in range(9)), "--command=a\n--b c")
    text = command_text(command)
    assert max(map(len, text.splitlines())) <= 120
    result = subprocess.run(
        ["bash", "-c", f"gcloud() {{ printf '%s\\0' \"$@\"; }}\n{text}"], capture_output=True, check=True
    )
    assert result.stdout.decode().split("\0")[:-1] == [*command[1:]]


@pytest.mark.parametrize(
    "line",
    [
        "",
        "target=loacl -- a",
        "target=v4-63 -- a",
        "target=h100-8 -- a",
        "target=tpu7x-16 -- a",
        "target=local processes=0 -- a",
        "target=local processes=two -- a",
        "target=local processes=2",
        "target=local model=gpt_tiny -- a",
        "target=local zone=z -- a",
        "target=local target=host -- a",
        "target=local gpt_tiny -- a",
        "target=ssh -- a",
        "target=ssh hosts=[a,a] -- a",
        "target=ssh hosts=[-oProxyCommand=x] -- a",
        "target=ssh hosts=[a] port=70000 -- a",
        "target=ssh hosts=a folder=~/x -- a",
        "target=v5e-8 --run -- modle=gpt_tiny",
        "target=v5e-8 --run -- model=gpt_tiny mesh=2x2x1",
        "target=v5p-8 slices=2 --run -- mesh=2x2x1",
        "target=slurm slice=h100-8 --run -- mesh=2x2x1",
        "target=v5e-4 zone=us-west4-a -- model=gpt_tiny mesh=2x2x2 batch=8",
        "target=v5e-8 -- target=v5e-4 mesh=2x2x1",
        "target=v5p-8 slices=2 -- mesh=2s2x2x1 target=v5p-8",
        "target=v5e-8 -- mesh=2x4x1 stpes=4",
        "target=v5e-4 name=aa -- mesh=2x2x1 name=bb",
        "target=local name=aa -- name=bb",
        "target=gke slice=v5e-8 image=i -- a",
        "target=gke slice=v5e-8 cluster=c -- a",
        "target=gke slice=h100-8 cluster=c image=i -- a",
        "target=gke slice=v5e-8 slices=2 cluster=c image=i -- a",
        "target=gke slice=v3-8 cluster=c image=i -- a",
        "target=skypilot slice=tpu7x-16 -- a",
        "target=skypilot -- a",
        "target=skypilot slice=cpu8 -- a",
        "target=slurm -- a",
        "target=v4-64 spot=yes -- a",
        "target=v4-64 hours=0 -- a",
        "target=v4-64 zone= -- a",
        "target= -- a",
        "target=h100-12 -- a",
        "target=v4-64 slices=2 queued=false -- a",
        "target=v4-64 zone=--x -- a",
        "--config-dir nowhere target=local -- a",
        "target=local --restarts -1 -- a",
        "target=local --restarts=-1 -- a",
        "target=v5e-8 -- model=gpt_tiny mesh=2x4x1 --run",
        "target=v5e-8 -- model=gpt_tiny mesh=2x4x1 mode=compile",
        "target=slurm slice=h100-16 -- mode=search target=h100-16",
        "target=v4-64 -- model=llama_7b mesh=32x1x1 partition=dp batch=32",
        "target=v4-64 -- model=gpt_tiny mesh=4x4x2 distributed=off",
        "target=ssh hosts=[a,b] -- distributed=off",
        "target=local -- distributed=off",
        "target=v5e-8 -- resume=latest name=aa",
        "target=slurm --nodes=2 -- a",
        "target=slurm nodes=2 --dry-run -- a",
        "target=slurm nodes=2 --rum -- a",
        "stop target=v4-64 name=a",
        "log target=v4-64 name=a",
        "logs target=v4-64",
        "delete target=local name=a",
        "list target=ssh hosts=[a]",
        "logs target=v4-64 name=x -- a",
        "dockerfile extra=x",
    ],
)
def test_mistakes_are_reported_in_one_line_with_a_remedy(capsys: pytest.CaptureFixture[str], line: str):
    """`goldens/messages/launch.txt` has the messages."""
    status, out, err = run_launch(capsys, *line.split())
    assert (status, out) == (2, "") and err.startswith("valkyrie-launch: ") and err.count("\n") == 1
    assert_golden_message("launch", line.split(), err)


def test_a_plan_for_a_valid_target_or_a_stored_run_is_printed(capsys: pytest.CaptureFixture[str]):
    for line in (
        "target=v5e-8 slices=2 name=aa -- mesh=2s2x4x1 target=v5litepod-8 target.slices=2 name=aa",
        "target=v5e-8 -- resume=mine",
        "target=v5e-8 -- --config-path /mnt/runs/mine --config-name run",
        "target=v5e-8 -- --config-dir /mnt/configs partition=mine",
        "target=ssh hosts=[a,b] -- --config-dir=/mnt/configs partition=mine",
    ):
        status, out, _ = run_launch(capsys, *line.split())
        assert status == 0 and out, line


def test_a_run_that_may_not_fit_in_the_memory_of_the_slice_is_noted(capsys: pytest.CaptureFixture[str]):
    settings = "target=v4-64 -- model=llama_7b mesh=32x1x1 name=mine runs=/mnt/runs"
    for more, words in (
        ("partition=dp batch=32 force=true", "does not fit: "),
        ("partition=fsdp batch=2048 microbatches=1 remat=none", "does not fit: "),
        ("partition=fsdp batch=32", None),
    ):
        status, out, err = run_launch(capsys, *f"{settings} {more}".split())
        note = next((line for line in out.splitlines() if "GiB" in line), "# None")
        assert (status, err) == (0, "") and note.startswith(f"# {words}"), note


def test_more_processes_than_the_cores_support_are_refused(capsys: pytest.CaptureFixture[str]):
    status, out, err = run_launch(capsys, "target=local", "processes=100000", "--", "a")
    assert (status, out) == (2, "") and err.startswith("valkyrie-launch: processes=100000 ")
    assert f"processes={PROCESSES_PER_CORE * (os.cpu_count() or 1)}," in err and "force=true" in err


def test_a_users_launch_engine_prints_its_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "path", [*sys.path])
    name, engine = re.findall(r"^```python\n# FOLDER/(\S+)\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)[0]
    (command,) = re.findall(r"--config-dir FOLDER (.*)$", PAGE, re.MULTILINE)
    (tmp_path / name).write_text(engine)
    folder = ("--config-dir", str(tmp_path))
    status, out, err = run_launch(capsys, *folder, *shlex.split(command))
    assert (status, out, err) == (0, (GOLDENS / "pbs.sh").read_text(), "")
    assert run_launch(capsys, *folder, "list", "target=pbs", "queue=large")[1] == "qstat\n"
    for words, start in {"": "target=pbs needs", "zone=z": "zone= is not"}.items():
        status, _, err = run_launch(capsys, *folder, "target=pbs", *words.split(), "--", "name=mine")
        assert status == 2 and err.startswith(f"valkyrie-launch: {start}")


ENGINE = """
from dataclasses import dataclass
from valkyrie.launch.engine import EngineConfig
from valkyrie.launch.plan import CommandStep, FileStep, Plan


@dataclass(frozen=True, kw_only=True)
class Config(EngineConfig):
"""


@pytest.mark.parametrize(
    ("name", "body", "message"),
    [
        ("nothing_engine", "def plan(self, overrides): return None", "plan() of FILE returned None"),
        (
            "text_engine",
            "def plan(self, overrides): return Plan('note', ())",
            "plan() of FILE: notes must be a tuple of",
        ),
        (
            "alone_engine",
            "def plan(self, overrides): return Plan((), FileStep('w', 'a', 'b'))",
            "plan() of FILE: steps must",
        ),
        (
            "letters_engine",
            "def plan(self, overrides): return Plan((), (CommandStep('x', 'echo hi'),))",
            'plan() of FILE: step "x": commands must',
        ),
        (
            "words_engine",
            "def plan(self, overrides): return Plan((), (), (CommandStep('x', ('echo', 'hi')),))",
            'plan() of FILE: step "x": commands must',
        ),
        (
            "number_engine",
            "def plan(self, overrides): return Plan((), (CommandStep('x', (('sleep', 3),)),))",
            'plan() of FILE: step "x": commands must',
        ),
        (
            "content_engine",
            "def plan(self, overrides): return Plan((), (FileStep('w', 'a', b'b'),))",
            'plan() of FILE: step "w": path and content must',
        ),
        (
            "action_engine",
            "def plan(self, overrides): return Plan((), (), (CommandStep('x', (('ls',),), action='lst'),))",
            "plan() of FILE: step \"x\": action='lst' is not",
        ),
        (
            "problem_engine",
            "def plan(self, overrides): ...\n    def problems(self): return 'oops'",
            "problems() of FILE returned 'oops'",
        ),
        (
            "abstract_engine",
            "queue: str = ''",
            "the class Config of the module abstract_engine does not define plan, which ",
        ),
        ("local", "queue: str = ''", "FILE would be ignored, because target=local "),
        ("json", "queue: str = ''", "FILE would be ignored, because Python has another module named json (/"),
        ("my-eng", "queue: str = ''", "FILE would be ignored, because my-eng is not the name of a Python module"),
    ],
)
def test_mistakes_in_a_users_launch_engine_are_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    body: str,
    message: str,
):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delenv("VALKYRIE_MODULES", raising=False)
    file = tmp_path / f"{name}.py"
    file.write_text(f"{ENGINE}    {body}\n")
    status, out, err = run_launch(capsys, "--config-dir", str(tmp_path), f"target={name}", "--", "steps=3", "name=a")
    assert (status, out) == (2, "")
    assert err.startswith(f"valkyrie-launch: target={name}: {message.replace('FILE', str(file))}"), err


@pytest.mark.parametrize(("result", "expected_status"), [("None", 0), ("3", 3), ("'done'", 2)])
def test_the_result_of_a_users_launch_engine_is_its_exit_status(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    result: str,
    expected_status: int,
):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delenv("VALKYRIE_MODULES", raising=False)
    name = f"result_engine_{expected_status}"
    plan, run = "def plan(self, overrides): return Plan((), ())", f"def run(self, overrides, command): return {result}"
    (tmp_path / f"{name}.py").write_text(f"{ENGINE}    {plan}\n    {run}\n")
    arguments = ("--config-dir", str(tmp_path), f"target={name}", "--run", "--", "steps=3", "name=a")
    status, _, err = run_launch(capsys, *arguments)
    assert status == expected_status and ("an exit status from 0 to 255" in err) == (status == 2), err


def test_an_error_in_a_users_launch_engine_is_located(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delenv("VALKYRIE_MODULES", raising=False)
    file = tmp_path / "typo_engine.py"
    file.write_text(f"{ENGINE}    def plan(self, overrides): return self.queue\n")
    arguments = ("--config-dir", str(tmp_path), "target=typo_engine", "--", "steps=3", "name=a")
    status, _, err = run_launch(capsys, *arguments)
    assert status == 1 and err.startswith(f"valkyrie-launch: {file}, line 9, in plan: AttributeError: "), err
    assert err.count("\n") == 1
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(AttributeError):
        run_launch(capsys, *arguments)


@pytest.mark.parametrize("target", ["target=v5e-8", "target=ssh hosts=[a,b]"])
def test_a_config_folder_outside_the_clone_is_noted(target: str):
    outside = (["--config-dir", "/a/mine"], ["--config-dir=../mine"], ["-cd=/a/mine"])
    for words, note_count in (*((words, 1) for words in outside), (["-cd", "mine"], 0)):
        plan = parse_config(target).plan(("name=a", *words))
        assert sum("inside the clone" in note for note in plan.notes) == note_count


def commit_files(folder: Path, contents: Mapping[str, str]) -> None:
    """Write files in a folder and commit them there."""
    for name, content in contents.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content)
    user = ("-c", "user.name=a", "-c", "user.email=a@b")
    for words in (("init", "-q"), ("add", "."), (*user, "commit", "-qm", "a")):
        subprocess.run(["git", *words], check=True, cwd=folder)


def test_a_config_folder_that_is_not_committed_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    commit_files(tmp_path, {f"{name}/a.py": "" for name in ("committed", "changed")})
    (tmp_path / "changed" / "b.py").touch()
    (tmp_path / "ignored").mkdir()
    (tmp_path / "ignored" / "a.py").touch()
    (tmp_path / "committed" / "__pycache__").mkdir()
    (tmp_path / "committed" / "__pycache__" / "a.pyc").touch()
    (tmp_path / ".git" / "info" / "exclude").write_text("ignored\n__pycache__\n")
    notes = config_folder_notes(("--config-dir", "nosuch", "-cd=committed", "modules=[changed,committed,ignored]"))
    faults = (
        "--config-dir nosuch does not exist",
        "modules=changed has files that are not committed",
        "modules=ignored has files that are not committed",
    )
    assert all(note.startswith(fault) for note, fault in zip(notes, faults, strict=True)), notes


@pytest.mark.parametrize(
    ("override", "expected_note"),
    [
        ("data.paths=[docs/*.txt,gs://b/c]", "data.paths=docs/*.txt is read from the disk of each machine"),
        ("data.paths=['docs/a b.txt', \"more\"]", "data.paths=docs/a b.txt,more is read from the disk of each machine"),
        ("data.paths=[gs://b/c,/mnt/nfs/docs]", None),
        ("data.paths=[/home/me/books/*.txt]", "data.paths=/home/me/books/*.txt is read from the disk of each machine"),
        ("data.val_paths=[docs]", "data.val_paths=docs is read from the disk of each machine"),
        ("data.paths=[/tmp/docs]", "data.paths=/tmp/docs is read from the disk of each machine"),
        ("data.tokenizer=mine.json", "data.tokenizer=mine.json is read from the disk of each machine"),
        ("data.tokenizer=/mnt/nfs/mine.json", None),
        ("data.tokenizer=gpt2", None),
        ("data.tokenizer=trained", "data.tokenizer=trained was trained on this machine"),
        (f"data.paths=[{Path.home()}/docs]", f"data.paths={Path.home()}/docs is read from the disk of each machine"),
        ("checkpoint.folder=saves", "checkpoint.folder=saves is on the local disk of each machine"),
        ("checkpoint.folder=/mnt/nfs/saves", None),
        (f"runs={Path.home()}/runs", f"runs={Path.home()}/runs is on the local disk of each machine"),
    ],
)
def test_local_folders_that_a_slice_does_not_have_are_noted(
    override: str, expected_note: str | None, tmp_path, monkeypatch
):
    monkeypatch.setenv("VALKYRIE_CACHE", str(tmp_path))
    (tmp_path / "tokenizers").mkdir()
    (tmp_path / "tokenizers" / "trained.json").touch()
    notes = disk_notes(["model=gpt_tiny", "runs=/mnt/shared/runs", override])
    assert [note[: len(expected_note or "")] for note in notes] == ([expected_note] if expected_note else [])
    probable_notes = disk_notes(["model=gpt_tiny", "runs=/mnt/shared/runs", override], certainty="probably ")
    assert all("trained on this" in note or " is probably " in note for note in probable_notes)
    key = override.partition("=")[0]
    assert all(f"Set {key}=DIR to a folder" in note for note in notes if not key.startswith("data."))


def test_notes_name_the_files_that_the_hosts_get(capsys: pytest.CaptureFixture[str]):
    settings = ("--", "model=gpt_tiny", "name=mine", "mesh=1x1x1", "data=text", "data.paths=[docs]")
    for arguments, files in (
        ("target=ssh hosts=a", "last commit"),
        ("target=skypilot slice=h100-1", "current folder"),
        ("target=gke slice=v5e-1 cluster=c image=i", "image"),
    ):
        _, out, err = run_launch(capsys, *arguments.split(), *settings)
        notes = " ".join(line.removeprefix("# ") for line in out.splitlines() if line.startswith("# "))
        assert re.search(rf"data\.paths=docs .* files of the {files}", notes), (out, err)
        assert ("checkpoints" in notes) == ("hosts=a" not in arguments), "a single host can read its own"


def test_a_run_name_is_added_if_a_restart_would_start_over(capsys: pytest.CaptureFixture[str]):
    assert add_name(["steps=5"], "x") == (("steps=5", "name=x"), True)
    for arguments in (["name=y"], ["resume=latest"], ["mode=compile"], ["-m", "steps=5,6"]):
        assert add_name(arguments, "x") == (tuple(arguments), False)
    _, out, err = run_launch(capsys, "target=host", "--", "steps=5")
    (name,) = re.findall(r"name=(run-\d{8}-\d{6})", err)
    assert f"valkyrie-train steps=5 name={name}\n" in out


def test_names_and_types_equal_those_of_the_cloud():
    assert accelerator_type(parse_target("v5e-8")) == "v5litepod-8"
    assert [accelerator_type(parse_target(name)) for name in ("v4-64", "v5p-128", "v6e-4")] == [
        "v4-64",
        "v5p-128",
        "v6e-4",
    ]
    assert resource_name("Mine_1.b") == "mine-1-b" and resource_name("1b") == "run-1b"
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", resource_name("x" * 39 + "_" + "y" * 40))


def test_the_price_is_listed_or_called_unknown():
    listed = parse_config("target=v4-64 hours=24").price_notes()[1]
    assert re.findall(r"\$[\d.,]+\d", listed) == ["$2,472.96", "$103.04", "$3.22"] and "usd_per_hour=" in listed
    spot = parse_config("target=v5e-8 spot=true spot_usd_per_hour=0.5 usd_per_hour=1").price_notes()[1]
    assert re.findall(r"\$[\d.,]+\d", spot) == ["$4.00", "$0.50", "$8.00", "$1.00"]
    assert parse_config("target=slurm nodes=2").price_notes() == ()


def test_the_dockerfile_copies_only_code_and_all_files_of_the_wheel():
    copied = re.findall(r"^COPY (.*) \S+$", dockerfile(), re.MULTILINE)
    copied_paths = {name for line in copied for name in line.split()}
    root = Path(__file__).parent.parent
    assert all((root / name).exists() for name in copied_paths)
    assert copied_paths >= {"conf", "valkyrie", "pyproject.toml", "README.md", "LICENSE"} and not copied_paths & {
        "runs",
        ".",
        "data",
    }
    assert dockerfile().count("--extra tpu --extra data") == 1 and "tpu" not in dockerfile("")


def test_actions_print_one_command(capsys: pytest.CaptureFixture[str]):
    status, out, err = run_launch(capsys, "delete", "target=v6e-4", "zone=z", "name=mine")
    assert (status, err) == (0, "")
    assert out.split()[3:] == ["queued-resources", "delete", "mine", "--force", "--quiet", "--zone=z"]
    assert run_launch(capsys, "list", "target=v6e-4", "queued=false")[1].split()[3:] == ["tpu-vm", "list"]
    assert run_launch(capsys, "dockerfile", "extra=none") == (0, dockerfile(""), "")
    status, out, err = run_launch(capsys, "logs", "delete", "target=v6e-4")
    assert (status, out) == (2, "") and err.startswith("valkyrie-launch: logs delete: ") and "one action" in err


def write_program(folder: Path, name: str, code: str, flags: str = " -S") -> None:
    """Write a fake program to a folder. It appends its arguments to the file `calls` there, and then runs `code`."""
    file = folder / name
    head = f"#!{sys.executable}{flags}\nimport os, pathlib, subprocess, sys, time\n"
    note = f"with open({str(folder / 'calls')!r}, 'a') as file: print({name!r}, *sys.argv[1:], file=file)\n"
    file.write_text(head + note + code)
    file.chmod(0o755)


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of fake programs at the front of the PATH, in the working directory. Its `git` prints our package."""
    folder = tmp_path / "programs"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    write_program(folder, "git", "print('valkyrie-jax')")
    return folder


def gcloud_actions(folder: Path, skip: Sequence[str] = ("describe",)) -> list[str]:
    """Return the gcloud actions in the file `calls`, in order and without those in `skip`.

    An ssh action includes its remote command: `ssh tar`, `ssh pkill -TERM`, `ssh pkill -KILL` or `ssh train`.
    """
    actions = []
    for line in (folder / "calls").read_text().splitlines():
        words = line.split()
        if words[0] == "gcloud" and words[4] not in skip:
            command = line.partition("--command=")[2]
            remote_program = next((word for word in ("tar", "pkill -KILL", "pkill -TERM") if word in command), "")
            is_training = ".venv/bin/valkyrie-train" in command
            actions.append(f"ssh {'train' if is_training else remote_program}" if words[4] == "ssh" else words[4])
    return actions


GCLOUD = """
state = pathlib.Path(os.environ["STATE"])
verb, command = sys.argv[4], sys.argv[-1]
if verb == "create": state.write_text("PROVISIONING")
elif verb == "delete": state.unlink()
elif verb == "describe":
    if not state.exists(): sys.exit("ERROR: NOT_FOUND: Resource was not found.")
    print(state.read_text())
    if state.read_text() == "PROVISIONING": state.write_text("ACTIVE")
elif verb == "ssh" and ".venv/bin/valkyrie-train" in command:
    left = pathlib.Path(os.environ["STATE"] + ".train")
    now, *rest = left.read_text().split()
    left.write_text(" ".join(rest))
    status, _, becomes = now.partition(":")
    if becomes: state.write_text(becomes)
    sys.exit(int(status))
"""


def train_on_fake_slice(folder: Path, monkeypatch: pytest.MonkeyPatch, attempts: str, restarts: int = 2) -> int:
    """Train on a fake slice and return the exit status.

    `attempts` lists the exit statuses of successive starts, separated by spaces. A status may be followed by the state
    of the slice after that start, such as `255:SUSPENDED`.
    """
    write_program(folder, "gcloud", GCLOUD)
    monkeypatch.setenv("STATE", str(folder / "state"))
    (folder / "state.train").write_text(attempts)
    monkeypatch.setattr(tpu_vm, "_POLL_S", 0.0)
    return parse_config("target=v5e-8 spot=true name=mine", restarts).supervisor(("name=mine",)).run()


def test_a_slice_is_requested_again_after_preemption(programs: Path, monkeypatch: Any, capfd: Any):
    assert train_on_fake_slice(programs, monkeypatch, "255:SUSPENDED 1 0", restarts=1) == 0
    new, end = ["create", "scp", "ssh tar", "ssh train"], "ssh pkill -KILL"
    assert gcloud_actions(programs) == [*new, end, "delete", *new, end, "ssh train"]
    err = capfd.readouterr().err
    assert "mine is SUSPENDED:" in err
    assert err.count("(1 of 1)") == 1, "the preemption does not count as a crash"
    calls = (programs / "calls").read_text()
    assert "VALKYRIE_LAUNCH_RESTARTS=2 .venv/bin/valkyrie-train name=mine" in calls


def test_a_slice_whose_state_cannot_be_read_for_a_moment_is_not_requested_again(
    programs: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    outage = """
outage = pathlib.Path(os.environ["STATE"] + ".outage")
if verb == "describe" and state.exists() and state.read_text() == "ACTIVE" and not outage.exists():
    outage.touch()
    sys.exit("ERROR: UNAVAILABLE: connection reset")
"""
    first_case = 'if verb == "create"'
    monkeypatch.setattr("test_launch.GCLOUD", GCLOUD.replace(first_case, outage + first_case))
    assert train_on_fake_slice(programs, monkeypatch, "0") == 0
    assert gcloud_actions(programs) == ["create", "scp", "ssh tar", "ssh train"]
    assert "trying again: ERROR: UNAVAILABLE: connection reset" in capfd.readouterr().err


def test_a_permanent_failure_of_gcloud_ends_the_start_with_its_text(
    programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = "You do not currently have an active account selected"
    first_case, outage = 'if verb == "create"', f'if verb == "describe": sys.exit("ERROR: {reason}")\n'
    monkeypatch.setattr("test_launch.GCLOUD", GCLOUD.replace(first_case, outage + first_case))
    with pytest.raises(ValueError, match=reason):
        train_on_fake_slice(programs, monkeypatch, "0")
    assert gcloud_actions(programs, skip=()).count("describe") == 1


def test_a_slice_preempted_during_the_copy_is_requested_again(programs: Path, monkeypatch: Any):
    outage = """
if verb == "scp" and not pathlib.Path(os.environ["STATE"] + ".scp").exists():
    pathlib.Path(os.environ["STATE"] + ".scp").touch()
    state.write_text("SUSPENDED")
    sys.exit(1)
"""
    monkeypatch.setattr("test_launch.GCLOUD", GCLOUD + outage)
    assert train_on_fake_slice(programs, monkeypatch, "0") == 0
    assert gcloud_actions(programs) == ["create", "scp", "delete", "create", "scp", "ssh tar", "ssh train"]


def test_an_unreachable_slice_is_tried_three_times(programs: Path, monkeypatch: Any):
    monkeypatch.setattr("test_launch.GCLOUD", GCLOUD + '\nif verb == "scp": sys.exit(255)\n')
    with pytest.raises(ValueError) as error:
        train_on_fake_slice(programs, monkeypatch, "0")
    assert "status 255" in str(error.value) and "queued-resources scp /tmp/mine" in str(error.value)
    assert gcloud_actions(programs).count("scp") == 4, "the first beside the slice being new"


def test_the_command_creates_a_slice_and_prints_how_to_delete_it(programs: Path, monkeypatch: Any, capfd: Any):
    write_program(programs, "gcloud", GCLOUD)
    monkeypatch.setenv("STATE", str(programs / "state"))
    monkeypatch.setattr(tpu_vm, "_POLL_S", 0.01)
    command = ["target=v5e-8", "--run", "--", "model=gpt_tiny", "mesh=2x4x1", "name=mine"]
    (programs / "state.train").write_text("0 0")
    for actions in (["create"], ["create", "ssh pkill -TERM", "ssh pkill -KILL"]):
        status, _, err = run_launch(capfd, *command)
        assert status == 0
        assert err.split()[-4:] == ["delete", "mine", "--force", "--quiet"] and "gcloud" in err.splitlines()[-1]
        assert [verb for verb in gcloud_actions(programs) if verb == "create" or "pkill" in verb] == actions
    assert gcloud_actions(programs)[-3:] == ["scp", "ssh tar", "ssh train"]


def test_a_mistake_on_a_slice_is_not_repeated(programs: Path, monkeypatch: Any):
    assert train_on_fake_slice(programs, monkeypatch, "2") == 2
    assert gcloud_actions(programs).count("ssh train") == 1


def test_an_unavailable_slice_is_reported_with_how_to_find_the_reason(programs: Path, monkeypatch: Any):
    failing = GCLOUD.replace('write_text("PROVISIONING")', 'write_text("FAILED")')
    monkeypatch.setattr("test_launch.GCLOUD", failing)
    with pytest.raises(ValueError) as error:
        train_on_fake_slice(programs, monkeypatch, "0")
    assert str(error.value).endswith(" describe mine")


SSH = """
host, command = sys.argv[-2:]
sys.exit(subprocess.run(["sh", "-c", command], cwd=os.environ["HOMES"] + "/" + host, start_new_session=True).returncode)
"""
"""Fake ssh, which runs the command outside of the launcher's process group, as if on another machine."""
TRAINING = """
index, folder = os.environ["JAX_PROCESS_INDEX"], pathlib.Path(os.environ["HOMES"])
starts = int(os.environ.get("VALKYRIE_LAUNCH_RESTARTS") or 0)
assert os.environ["JAX_COORDINATOR_ADDRESS"] == "a:8476" and os.environ["JAX_PROCESS_COUNT"] == "2"
(folder / f"pid-{starts}-{index}").write_text(str(os.getpid()))
while len(list(folder.glob(f"pid-{starts}-*"))) < 2: time.sleep(0.01)
if starts == 0 and index == "0": os.abort()
if starts == 0: time.sleep(60)
"""


def test_ssh_hosts_start_together_and_all_end_if_one_fails(programs: Path, monkeypatch: Any, capfd: Any):
    write_program(programs, "ssh", SSH)
    homes = programs / "homes"
    monkeypatch.setenv("HOMES", str(homes))
    for host in ("a", "b"):
        (homes / host / "valkyrie" / ".venv" / "bin").mkdir(parents=True)
        write_program(homes / host / "valkyrie" / ".venv" / "bin", "valkyrie-train", TRAINING, flags="")
    monkeypatch.setattr(ssh.Config, "copy_steps", lambda self: [])
    supervisor = parse_config("target=ssh hosts=[a,b]").supervisor(("name=only-this-test", "prompt=it's"))
    assert replace(supervisor, grace_s=0.2).run() == 0
    assert "status 134," in capfd.readouterr().err
    pids = [int(file.read_text()) for file in homes.glob("pid-*")]
    assert len(pids) == 4
    wait_until(lambda: all(is_gone(pid) for pid in pids))
    (arguments,) = set((homes / "b/valkyrie/.venv/bin/calls").read_text().splitlines())
    assert arguments == "valkyrie-train name=only-this-test prompt=it's"


def test_run_writes_the_file_and_submits_it(programs: Path, capsys: pytest.CaptureFixture[str]):
    write_program(programs, "sbatch", "")
    status, out, _ = run_launch(capsys, "target=slurm", "nodes=2", "--run", "--", "name=mine", "mesh=2x1x1")
    assert (status, out) == (0, "")
    assert (programs / "calls").read_text() == "sbatch mine.sbatch\n"
    assert Path("mine.sbatch").read_text() == slurm.script(
        parse_config("target=slurm nodes=2 name=mine"), ("name=mine", "mesh=2x1x1")
    )


def test_run_reports_the_step_that_fails_and_success(programs: Path, capsys: pytest.CaptureFixture[str]):
    arguments = ("target=slurm", "nodes=2", "--run", "--", "name=mine", "mesh=2x1x1")
    write_program(programs, "sbatch", "")
    assert "2 steps done" in run_launch(capsys, *arguments)[2]
    write_program(programs, "sbatch", "raise SystemExit(127)")
    status, _, err = run_launch(capsys, *arguments)
    assert status == 127 and "step 2 (submit the job)" in err and "status 127" in err and "all" not in err


@pytest.mark.parametrize("target", ["target=v4-64", "target=ssh hosts=a", "target=skypilot slice=v4-64"])
@pytest.mark.parametrize("flags", [(), ("--run",)])
def test_code_is_copied_only_from_a_clone(
    target: str, flags: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    """A folder without git, and a repository of another project, are refused before anything is rented."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    arguments = (*target.split(), *flags, "--", "name=mine", "mesh=4x4x2", "runs=/mnt/runs")
    status, out, err = run_launch(capsys, *arguments)
    assert (
        (status, out) == (2, "") and err.startswith(f"valkyrie-launch: {target.split()[0]} ") and str(tmp_path) in err
    )
    commit_files(tmp_path, {"pyproject.toml": "[project]\nname = 'other'\n"})
    assert run_launch(capsys, *arguments)[:2] == (2, "")
    for name in ("valkyrie-jax", "Valkyrie_JAX"):
        commit_files(tmp_path, {"pyproject.toml": f"[project]\nname = '{name}'\n"})
        assert flags or run_launch(capsys, *arguments)[0] == 0


def test_errors_of_git_are_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    commit_files(tmp_path, {"pyproject.toml": "name = 'valkyrie-jax'", "mine/a.py": ""})
    (tmp_path / ".git" / "HEAD").write_text("damaged")
    for fault in ("not a git repository", "git is not installed"):
        assert fault in code_problems("ssh")[0] and "has no pyproject" not in code_problems("ssh")[0]
        (note,) = config_folder_notes(("-cd=mine",))
        assert fault in note and "not committed" not in note
        monkeypatch.setenv("PATH", str(tmp_path))
