"""Tests of targets: parsing names, one name per slice, and refusals with the nearest slices."""

from __future__ import annotations

import itertools
import math
import os
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import compose_run, config_names, mark_slow_except
from valkyrie.config.choices import get_target
from valkyrie.config.compose import default_mesh, default_precision
from valkyrie.hardware import chips
from valkyrie.hardware.chips import known_chips
from valkyrie.hardware.names import parse_target
from valkyrie.hardware.slices import Slices, WrapRule, format_shape
from valkyrie.hardware.target import build_topology
from valkyrie.paths import read_config
from valkyrie.problems import ProblemCode

SLICES = {
    "v3": "8 2x2 1, 32 4x4 4, 64 4x8 8, 128 8x8 16, 512 16x16 64, 1024 16x32 128, 2048 32x32 256",
    "v4": "8 2x2x1 1, 16 2x2x2 2, 32 2x2x4 4, 64 2x4x4 8, 128 4x4x4 16, 256 4x4x8 32, 384 4x4x12 48, 512 4x8x8 64, "
    "1024 8x8x8 128, 1536 8x8x12 192, 2048 8x8x16 256, 4096 8x16x16 512, 6144 12x16x16 768, 8192 16x16x16 1024",
    "v5e": "1 1x1 1, 4 2x2 1, 8 2x4 1, 16 4x4 4, 32 4x8 8, 64 8x8 16, 128 8x16 32, 256 16x16 64",
    "v5p": "8 2x2x1 1, 16 2x2x2 2, 64 2x4x4 8, 256 4x4x8 32, 640 4x4x20 80, 1152 4x12x12 144, 3072 8x12x16 384, "
    "5760 12x12x20 720, 6272 4x28x28 784, 7808 4x4x244 976, 9216 12x16x24 1152, 10368 12x12x36 1296, "
    "12288 16x16x24 1536, 13824 12x24x24 1728, 17920 16x20x28 2240",
    "v6e": "1 1x1 1, 4 2x2 1, 8 2x4 1, 16 4x4 4, 32 4x8 8, 128 8x16 32, 256 16x16 64",
    "tpu7x": "2 1x1x1 1, 8 2x2x1 1, 16 2x2x2 2, 128 4x4x4 16, 384 4x4x12 48, 768 4x8x12 96, 4096 8x16x16 512, "
    "8192 16x16x16 1024, 16384 16x16x32 2048, 18432 16x24x24 2304",
}
"""Slices of each chip: the number in the slice's name, its topology, and its number of hosts.

Sources: Cloud TPU's documentation, and AXLearn's aot_compilation.py.
"""
SLICE_CASES = [
    (f"{chip}-{size}", *rest) for chip, text in SLICES.items() for size, *rest in map(str.split, text.split(","))
]


@pytest.mark.parametrize(("name", "topology", "hosts"), SLICE_CASES, ids=[name for name, *_ in SLICE_CASES])
def test_a_name_means_the_same_slice_as_at_its_cloud(name: str, topology: str, hosts: str):
    target = parse_target(name)
    assert target.chip is not None and target.chips is not None
    assert (target.name, target.topology, target.hosts) == (name, topology, int(hosts))
    assert target.platform == "tpu"
    assert target.problems() == []
    torus = build_topology(target)
    assert (torus.chips, torus.devices) == (target.chips, target.devices)
    assert name == f"{target.chip.name}-{target.chips * target.chip.units_in_name}"
    some = "chip" if target.chips == 1 else "chips"
    assert target.describe().startswith(f"{name} ({target.chips} {target.chip.name} {some} {topology}, {hosts} host")


@pytest.mark.parametrize(
    ("name", "described", "devices"),
    [
        ("v5litepod-8", "v5e-8 (8 v5e chips 2x4, 1 host)", 8),
        ("v6e-4x4", "v6e-16 (16 v6e chips 4x4, 4 hosts)", 16),
        ("v4:4x8x8", "v4-512 (256 v4 chips 4x8x8, 64 hosts)", 256),
        ("v4:4x4x2", "v4-4x4x2 (32 v4 chips, 8 hosts)", 32),
        ("v4-4x4x16", "v4-4x4x16 (256 v4 chips, 64 hosts)", 256),
        ("tpu7x-2x2x1", "tpu7x-8 (4 tpu7x chips 2x2x1, 1 host)", 8),
        ("h200-1", "h200-1 (1 h200 chip, 1 host)", 1),
        ("h100-8", "h100-8 (8 h100 chips, 1 host)", 8),
        ("a100-16", "a100-16 (16 a100 chips, 2 hosts)", 16),
        ("a100_40gb-16", "a100_40gb-16 (16 a100_40gb chips, 2 hosts)", 16),
        ("h100:8", "h100-8 (8 h100 chips, 1 host)", 8),
        ("h100-8x8", "h100-64 (64 h100 chips, 8 hosts)", 64),
        ("gb200-18x4", "gb200-72 (72 gb200 chips, 18 hosts in 1 NVLink domain)", 72),
        ("cpu8", "cpu8", 8),
        ("cpu6", "cpu6", 6),
    ],
)
def test_other_spellings_and_other_hardware_are_parsed(name: str, described: str, devices: int):
    target = parse_target(name)
    assert (target.describe(), target.devices, target.problems()) == (described, devices, [])
    assert parse_target(target.name) == target


@settings(deadline=None)
@given(st.sampled_from(list(known_chips())), st.integers(1, 10000))
def test_no_slice_is_between_the_suggested_sizes(chip_name: str, chips: int):
    slices = known_chips()[chip_name].slices
    below, above = [], []
    for shape in slices.nearest_shapes(chips):
        (below if math.prod(shape) < chips else above).append(math.prod(shape))
    assert (len(below), len(above)) == (chips > 1, slices.max_chips is None or chips < slices.max_chips)
    between = range((below or [0])[0] + 1, (above or [chips + 1])[0])
    assert {n for n in between if slices.default_shape(n) is not None} <= {chips}


@pytest.mark.parametrize("chip_name", ["v3", "v4", "v5e", "tpu7x"])
def test_every_topology_has_one_target_name(chip_name: str):
    chip = known_chips()[chip_name]
    shapes = [s for s in itertools.product([1, 2, 4, 8, 12, 16], repeat=chip.ici_axes or 0) if chip.slices.exists(s)]
    targets = [parse_target(f"{chip_name}-{format_shape(shape)}") for shape in shapes]
    assert [build_topology(target).shape for target in targets] == shapes
    assert [parse_target(f"{chip_name}:{format_shape(shape)}") for shape in shapes] == targets
    assert [parse_target(target.name) for target in targets] == targets
    assert len({target.name for target in targets}) == len(shapes) > 8


GOLDEN = Path(__file__).parent / "goldens" / "targets.txt"
REFUSED = [
    *("v4-63", "v4-72", "v4-12288", "v5p-8576", "v5e-7", "v5litepod-512", "v4:4x4x5", "v4-2x1x2", "v4-4x4", "v5e:8"),
    *("h100-12", "h100-2x4", "h100-3x4", "v4", "v4-", "v9-8", "v5-8", "V4-64", "cpu-8", "cpu0", "atuo"),
]


def refusal(name: str) -> str:
    """Return the error message of a target name."""
    with pytest.raises(ValueError, match=re.escape(f"target={name}")) as error:
        parse_target(name, target_names=["auto", "cpu"])
    return str(error.value)


def test_refused_names_have_the_golden_messages():
    """To rewrite the golden file: `UPDATE_GOLDENS=1 pytest tests/test_targets.py`."""
    text = "".join(f"$ target={name}\n{refusal(name)}\n\n" for name in REFUSED)
    if os.environ.get("UPDATE_GOLDENS"):
        GOLDEN.write_text(text)
    assert GOLDEN.read_text() == text


@pytest.mark.parametrize(("name", "arguments"), [("v4-72", []), ("v9-8", ["mesh=4x4x4", "precision=bf16"])])
def test_the_command_refuses_a_target_in_one_line(command: Any, name: str, arguments: list[str]):
    result = command(f"target={name}", *arguments)
    assert (result.status, result.err) == (2, f"valkyrie-train: {refusal(name)}\n")


def test_parsing_a_name_reads_only_its_chip_file_and_only_once(monkeypatch: pytest.MonkeyPatch):
    read_names: list[str] = []
    monkeypatch.setattr(
        chips, "read_config", lambda group, name, schema: [read_names.append(name), read_config(group, name, schema)][1]
    )
    chips._load_chip.cache_clear()
    for name in ("v4-64", "v4-128", "v5p-8"):
        assert parse_target(name).name == name
    assert read_names == ["v4", "v5p"]
    assert parse_target("v5litepod-8").name == parse_target("v5litepod-8").name == "v5e-8"
    with pytest.raises(ValueError, match=r"^target=v9-8 "):
        parse_target("v9-8")
    assert sorted(read_names) == config_names("target/chip") == list(known_chips())


@pytest.mark.parametrize("name", ["v5litepod-8", "h100-16", "cpu6"])
def test_hydra_composes_the_target_that_the_name_parses_to(name: str):
    run = compose_run(f"target={name}", "partition=dp", "model=s5_tiny", "batch=96")
    assert asdict(run.config.target) == asdict(parse_target(name)) == asdict(get_target(name))
    assert run.problems() == []


@pytest.mark.parametrize(
    ("name", "mesh", "precision"),
    [
        ("v4-64", "2x4x4", "bf16_mixed"),
        ("v4:4x4x2", "4x4x2", "bf16_mixed"),
        ("v5litepod-8", "1x2x4", "bf16_mixed"),
        ("tpu7x-16", "2x2x4", "bf16_mixed"),
        ("v3-8", "1x2x4", "bf16_mixed"),
        ("h100-16", "1x1x16", "bf16_mixed"),
        ("cpu8", "2x2x2", "float32"),
        ("cpu32", "2x4x4", "float32"),
        ("cpu6", "1x2x3", "float32"),
        ("cpu", "2x2x2", "float32"),
        ("auto", "1x1x4", "bf16_mixed"),
    ],
)
def test_default_mesh_and_precision_depend_on_the_target(
    monkeypatch: pytest.MonkeyPatch, name: str, mesh: str, precision: str
):
    monkeypatch.setattr("valkyrie.config.compose.count_accelerators", lambda: 4)
    assert (default_mesh(name), default_precision(name)) == (mesh, precision)


USER_FILES = {
    "chip/mychip.yaml": "defaults: [v5e, _self_]\nname: mychip\nmax_chips: 64\nusd_per_hour: 0.5\n",
    "chip/plain.yaml": "defaults: [chip_schema, _self_]\nname: plain\nplatform: tpu\nici_axes: 2\n"
    "host_bounds: [2, 2]\n",
    "chip/v2e.yaml": "defaults: [v5e, _self_]\nname: v2\n",
    "v4-64.yaml": "defaults: [target_schema, chip/v4@chip, _self_]\nname: v4-64\nplatform: tpu\nchips: 16\n"
    "topology: 2x2x4\nhosts: 4\n",
    "desk.yaml": "defaults: [target_schema, _self_]\nname: desk\nplatform: cpu\nchips: 4\n",
}


@pytest.fixture
def user_folder(tmp_path: Path) -> str:
    for name, text in USER_FILES.items():
        file = tmp_path / "own" / "target" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return str(tmp_path / "own")


USER_TARGETS = {
    "mychip-8": ("mychip-8 (8 mychip chips 2x4, 1 host)", "1x2x4"),
    "desk": ("desk", "1x2x2"),
    "plain-12": ("plain-12 (12 plain chips 2x6, 3 hosts)", "1x2x6"),
    "plain-6x2": ("plain-6x2 (12 plain chips, 3 hosts)", "1x6x2"),
    "mychip:4x4": ("mychip-16 (16 mychip chips 4x4, 4 hosts)", "1x4x4"),
    "v4-128": ("v4-128 (64 v4 chips 4x4x4, 16 hosts)", "4x4x4"),
}


@pytest.mark.parametrize("name", mark_slow_except(USER_TARGETS, ["mychip-8", "desk"]))
def test_chips_and_targets_of_a_users_folder_are_selected_by_name(command: Any, user_folder: str, name: str):
    config = command("--config-dir", user_folder, f"target={name}", "partition=dp", "batch=192").run.config
    assert (config.target.describe(), config.mesh.name) == USER_TARGETS[name]
    assert config.precision.name == ("float32" if name == "desk" else "bf16_mixed")
    chip = config.target.chip
    if name == "mychip-8":
        assert (chip.name, chip.usd_per_hour, chip.hbm_gib, chip.max_chips) == ("mychip", 0.5, 16, 64)


WRONG = {
    "mychip-128": "64 chips",
    "mchip-8": "target=mychip-8?",
    "v2e-8": "target/chip/v2e.yaml",
    "dask": "target=desk?",
    "v4-64": "target=v4-32",
    "plain-9": "2x2 chips",
}


@pytest.mark.parametrize("name", mark_slow_except(WRONG, ["mychip-128", "mchip-8", "v4-64"]))
def test_an_invalid_user_chip_or_target_is_refused(command: Any, user_folder: str, name: str):
    result = command("--config-dir", user_folder, f"target={name}")
    assert result.status == 2
    (line,) = result.err.splitlines()
    assert line.startswith(("valkyrie-train: target", f"valkyrie-train: {user_folder}")) and WRONG[name] in line


def test_tab_completion_offers_a_target_of_each_chip(command: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COMP_LINE", "valkyrie-train target=")
    monkeypatch.setenv("COMP_POINT", "22")
    offered = command("-sc", "query=bash").out.split()
    assert offered == sorted(f"target={name}" for name in ["auto", "cpu", "cpu8", *(f"{c}-8" for c in known_chips())])
    for word in offered:
        get_target(word.partition("=")[2])


def test_a_chip_without_slice_rules_accepts_any_topology_of_whole_hosts():
    free = Slices(3, WrapRule(), 1000, (2, 2, 1))
    assert [free.default_shape(n) for n in (1, 2, 4, 8, 12, 16, 1004)] == [
        (1, 1, 1),
        (1, 1, 2),
        (2, 2, 1),
        (2, 2, 2),
        (2, 2, 3),
        (2, 4, 2),
        None,
    ]
    assert free.exists((2, 6, 5)) and not free.exists((3, 3, 3))
    assert Slices(2, WrapRule(), None, ()).default_shape(10**12) == (10**6, 10**6)


def test_a_huge_number_is_refused_like_any_other():
    with pytest.raises(ValueError, match=r"Nearest: target=v4-8192 \(4096"):
        parse_target("v4-1" + "0" * 400)


@pytest.mark.parametrize(
    ("target", "change", "phrase"),
    [
        ("v4-64", {"chips": 5}, "target.chips=5"),
        ("h100-8", {"chips": 16}, "target=h100-16"),
        ("cpu8", {"chips": 16}, "target=cpu16"),
        ("v4-8", {"hosts": 3}, "target.hosts=3"),
        ("h100-16", {"hosts": 3}, "target.hosts=2"),
        ("v5e-8", {"topology": "4x4"}, "target=v5e-16"),
    ],
)
def test_a_number_that_contradicts_the_name_is_refused(target: str, change: dict[str, int], phrase: str):
    (problem,) = replace(parse_target(target), **change).problems()
    assert problem.code in (ProblemCode.conflict, ProblemCode.topology) and phrase in str(problem)


def test_gpus_that_make_many_small_nvlink_domains_are_refused_with_the_nearest_that_do_not():
    (problem,) = parse_target("gb200-76").problems()
    assert "target=gb200-72 " in problem.text and "target=gb200-80 " in problem.text
    assert not any(parse_target(f"gb200-{chips}").problems() for chips in (4, 64, 72, 80, 108, 128, 144, 256, 512))
    target = parse_target("gb200-76")
    assert target.chip is not None and target.chip.gpu is not None
    small = replace(target.chip.gpu, domain_hosts=1)
    assert replace(target, chip=replace(target.chip, gpu=small)).problems() == []


def test_an_explicit_topology_determines_chips_and_hosts():
    longer = replace(parse_target("v4-512"), topology="4x4x16")
    assert (longer.chips, longer.hosts, longer.problems()) == (256, 64, [])
    assert replace(longer, slices=2).problems() == [], "as a run.yaml has it"
    assert replace(longer, hosts=1).hosts == 64, "as a target of a user without the key has it"
    assert replace(parse_target("h100-16"), hosts=4).problems() == [], "whose hosts no torus decides"


@pytest.mark.parametrize("count", ["4097", "9" * 400])
def test_more_devices_than_can_be_simulated_are_refused(count: str):
    with pytest.raises(ValueError, match=r"at most 4096") as error:
        parse_target(f"cpu{count}")
    assert len(str(error.value)) < 100
