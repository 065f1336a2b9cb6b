"""Tests of hardware: the chip determines torus and hosts, and impossible topologies are refused."""

from __future__ import annotations

import dataclasses
import importlib.util
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers import assert_golden_message, compose_run
from machines import compile_devices, needs_libtpu
from valkyrie.hardware.chips import describe_price, fill_missing_chip_fields, known_chips
from valkyrie.hardware.names import parse_target
from valkyrie.hardware.platforms import get_platform
from valkyrie.hardware.platforms import tpu as tpu_platform
from valkyrie.hardware.slices import format_shape, parse_shape
from valkyrie.hardware.target import (
    ChipConfig,
    TargetConfig,
    build_topology,
    usable_hbm,
)
from valkyrie.paths import conf_dir
from valkyrie.search.compile import cache, replayed

TPUS = [chip for chip in known_chips().values() if chip.platform == "tpu"]
GPUS = [chip for chip in known_chips().values() if chip.platform == "gpu"]


def target(name: str, **changes: object) -> TargetConfig:
    return dataclasses.replace(parse_target(name), **changes)


@pytest.mark.parametrize("chip", TPUS, ids=lambda chip: chip.name)
def test_every_chip_has_all_figures_with_their_sources(chip: ChipConfig):
    unknown = {field.name for field in dataclasses.fields(chip) if getattr(chip, field.name) is None}
    absent = {"spot_usd_per_hour", "switch_gbs", "calibrated", "gpu"} | (
        {"dcn_gbs_per_host"} if chip.name == "v3" else set()
    )
    assert unknown == absent | (set() if chip.name in ("v5e", "v6e") else {"single_host_chips"})
    assert chip.hbm_gib is not None and chip.usable_hbm_gib is not None and chip.hbm_gib > 0
    assert 0.95 < chip.usable_hbm_gib / chip.hbm_gib < 1.01
    assert not lines_without_source(chip)


@pytest.mark.parametrize("chip", GPUS, ids=lambda chip: chip.name)
def test_every_gpu_has_all_figures_with_their_sources(chip: ChipConfig):
    assert chip.gpu is not None and not get_platform("gpu").missing_figures(chip, "bfloat16", 2)
    assert chip.hbm_gib and chip.usable_hbm_gib and 0.95 < chip.usable_hbm_gib / chip.hbm_gib <= 1
    assert chip.estimate and 0.7 < chip.gpu.best_tflops / chip.peak_tflops["bfloat16"] < 0.9
    assert not lines_without_source(chip)


def lines_without_source(chip: ChipConfig) -> list[str]:
    """Return the lines of a chip's YAML with a figure and no comment, before `gpu`."""
    text = (conf_dir() / "target" / "chip" / f"{chip.name}.yaml").read_text()
    lines = text.partition("\ngpu:")[0].splitlines()
    figures = (line for line in lines if re.search(r"(: +[0-9]|bounds)", line.partition("#")[0]))
    return [line for line in figures if not re.search(r"  # \S", line)]


def test_a_price_is_shown_with_its_source():
    for chip in known_chips().values():
        assert bool(chip.usd_per_hour_source) is (chip.usd_per_hour is not None)
        assert chip.usd_per_hour_source in describe_price(chip)
    changed = describe_price(dataclasses.replace(known_chips()["v5e"], usd_per_hour=0.5))
    assert "$0.50 " in changed and "target.chip.usd_per_hour" in changed, "not the source of the shipped price"
    assert describe_price(ChipConfig("nod")) == ""


def test_the_figures_of_a_users_chip_that_a_step_time_needs_are_named(monkeypatch: pytest.MonkeyPatch):
    message = get_platform("any").missing_figures_message(ChipConfig("nod", hbm_gib=16.0))
    assert message is not None and message.startswith("target.chip=nod ") and "hbm_gbs, peak_tflops.bfloat16" in message
    assert "begin nod.yaml with `defaults: [v5e, _self_]`" in message
    assert "defaults: [h100, _self_]" in (get_platform("gpu").missing_figures_message(ChipConfig("nod")) or "")
    v5e = target("v5e-8", chip=dataclasses.replace(known_chips()["v5e"], clock_ghz=None))
    monkeypatch.setattr(tpu_platform.Tpu, "compiler_install_hint", lambda self, target: None)
    assert "sets no clock_ghz, so" in (get_platform("tpu").compile_refusal(v5e, "float32") or "")
    assert not any(get_platform(chip.platform).missing_figures_message(chip) for chip in known_chips().values())


def test_usable_memory_is_at_most_the_memory_of_the_chip():
    v4, h100 = known_chips()["v4"], known_chips()["h100"]
    assert usable_hbm(v4) == 30.75 * 2**30 and usable_hbm(dataclasses.replace(v4, hbm_gib=8.0)) == 8 * 2**30
    assert usable_hbm(h100) == int(0.92 * int(79.1094 * 2**30))  # the share that JAX reserves
    assert usable_hbm(known_chips()["v5p"]) == int(95.73 * 2**30)
    assert usable_hbm(ChipConfig()) is None is usable_hbm(None)


@pytest.mark.parametrize(
    ("name", "topology", "wrap", "bounds"),
    [
        ("v4-64", None, (False, False, False), (2, 2, 1)),
        ("v4-64", "4x4x2", (False, False, False), (2, 2, 1)),
        ("v4-128", None, (True, True, True), (2, 2, 1)),
        ("v4-1536", "8x8x12", (True, True, True), (2, 2, 1)),
        ("tpu7x-256", None, (True, True, True), (2, 2, 1)),
        ("v5e-128", None, (False, True), (2, 2)),
        ("v5e-256", None, (True, True), (2, 2)),
        ("v6e-64", None, (False, False), (2, 2)),
        ("v6e-8", None, (False, False), (2, 4)),
        ("v6e-1", None, (False, False), (1, 1)),
        ("v3-512", None, (False, False), (2, 2)),
        ("v3-1024", None, (False, True), (2, 2)),
    ],
)
def test_axes_wrap_around_by_the_rule_of_the_chip(
    name: str, topology: str | None, wrap: tuple[bool, ...], bounds: tuple[int, ...]
):
    torus = build_topology(target(name, topology=topology) if topology else target(name))
    assert (torus.wrap, torus.host_bounds) == (wrap, bounds)


def test_a_topology_determines_chips_and_hosts():
    custom = target("v4-1536", topology="8x8x12")
    assert (custom.chips, custom.hosts, custom.devices) == (768, 192, 768)
    assert "(768 v4 chips 8x8x12, 192 hosts)" in custom.describe()
    assert target("v3-8", topology="4x8").devices == 64
    users_target = TargetConfig(name="mine", chip=known_chips()["v5p"], topology="4x4x8")
    assert (users_target.chips, users_target.hosts) == (128, 32) and "chips 4x4x8" in users_target.describe()
    assert target("v5e-16", topology="2x4") == dataclasses.replace(parse_target("v5e-8"), name="v5e-16")


def test_several_slices_multiply_chips_and_hosts():
    two_slices = target("v4-64", slices=2)
    assert (two_slices.devices, build_topology(two_slices).devices, build_topology(two_slices).chips) == (64, 64, 32)
    assert two_slices.hosts == 8 and "of 2 slices" in two_slices.describe()
    assert [problem.key for problem in target("v4-64", slices=0).problems()] == ["target.slices"]


def test_a_target_without_a_torus_is_a_line_of_chips():
    torus = build_topology(parse_target("cpu32"))
    assert (torus.shape, torus.wrap, torus.devices) == ((32,), (False,), 32)
    assert build_topology(parse_target("h100-16")).host_bounds == (8,)
    with pytest.raises(ValueError, match=r"^target=auto "):
        build_topology(TargetConfig())


@pytest.mark.parametrize(
    ("name", "topology"),
    [
        ("v5p-64", "2x4x5"),
        ("v5e-16", "2x8"),
        ("v6e-16", "32x16"),
        ("v4-8", "2x1x2"),
        ("v4-8", "4x4"),
        ("v5e-8", "2xx4"),
        ("h100-8", "2x4"),
        ("cpu8", "2x4"),
        ("v4-4x4x2", "2x4x4"),
    ],
)
def test_an_impossible_topology_is_refused_with_the_nearest_ones(name: str, topology: str):
    requested = target(name, topology=topology)
    (problem,) = requested.problems()
    with pytest.raises(ValueError) as error:
        build_topology(requested)
    assert str(error.value) == str(problem)
    assert_golden_message("hardware", [f"target={name}", f"target.topology={topology}"], str(problem))


@pytest.mark.parametrize(
    "figures", [{"devices": 0}, {"units_in_name": -1}, {"wrap": "axes_of_16"}, {"host_bounds": [2, 2]}]
)
def test_a_chip_whose_figures_contradict_each_other_is_refused(figures: dict[str, object]):
    slice_ = parse_target("v4-64")
    assert slice_.chip is not None
    wrong = dataclasses.replace(slice_, chip=dataclasses.replace(slice_.chip, **figures))
    (problem,) = wrong.problems()
    with pytest.raises(ValueError, match=f"^{re.escape(str(problem))}$"):
        build_topology(wrong)
    settings = [f"target.chip.{key}={value}".replace(" ", "") for key, value in figures.items()]
    assert_golden_message("hardware", ["target=v4-64", *settings], str(problem))


@given(st.sampled_from(TPUS), st.data())
def test_the_nearest_slices_exist_and_enclose_the_requested_size(chip: ChipConfig, data: st.DataObject):
    assert chip.ici_axes is not None
    shape = tuple(data.draw(st.lists(st.integers(1, 40), min_size=chip.ici_axes, max_size=chip.ici_axes)))
    nearest_shapes = chip.slices.similar_shapes(shape)
    assert nearest_shapes and shape not in nearest_shapes
    for other in nearest_shapes:
        assert TargetConfig(chip=chip, topology=format_shape(other)).problems() == []
    requested = TargetConfig(name="mine", chip=chip, topology=format_shape(shape))
    if requested.problems() == []:
        assert chip.wrap != "cubes_of_4" or requested.chips in (1, 4, 8, 16, 32) or not any(n % 4 for n in shape)
        assert parse_shape(requested.topology) == build_topology(requested).shape


def test_cached_compiles_depend_on_the_slice_rules(monkeypatch: pytest.MonkeyPatch):
    sources: list[tuple[str, ...]] = []
    for module in (cache, replayed):
        monkeypatch.setattr(module, "source_digest", lambda *names: sources.append(names) or "")
    run = compose_run("target=v4-8", "partition=dp", "model=s5_tiny")
    cache.package_digest(run)
    replayed._replay_key(run.config.target)
    package, of_replay = sources
    assert "." in package and "hardware" in of_replay


@needs_libtpu
@pytest.mark.parametrize("name", ["v3-32", "v4-64", "v4-128", "v5e-8", "v5e-128", "v5p-16", "v6e-1", "tpu7x-16"])
def test_libtpu_supports_the_slice_with_these_hosts(name: str, capfd: pytest.CaptureFixture[str]):
    slice_ = parse_target(name)
    devices = compile_devices(slice_)
    torus = build_topology(slice_)
    assert slice_.chip is not None
    assert len(devices) == torus.devices
    assert {device.device_kind for device in devices} <= set(slice_.chip.device_kinds)
    assert len({device.process_index for device in devices}) == slice_.hosts
    positions = {(*device.coords[: len(torus.shape)], device.core_on_chip) for device in devices}
    assert len(positions) == torus.devices
    assert all(
        a < b for position in positions for a, b in zip(position, (*torus.shape, torus.devices_per_chip), strict=True)
    )
    assert capfd.readouterr() == ("", "")


@needs_libtpu
def test_devices_have_the_index_of_their_slice():
    devices = compile_devices(target("v5e-4", slices=2))
    assert sorted(device.slice_index for device in devices) == [0] * 4 + [1] * 4


@needs_libtpu
def test_a_refusal_by_libtpu_is_one_line_with_the_nearest_slices(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tpu_platform, "_topology_options", lambda _: {"chips_per_host_bounds": (3, 2, 1)})
    with pytest.raises(ValueError) as error:
        compile_devices(parse_target("v4-64"))
    for part in ("refused by libtpu", '"v4:2x4x4"', '"3x2x1"', "topology=2x2x4 (16", "topology=4x4x4 (64"):
        assert part in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_libtpu_is_reported_in_one_line_with_what_to_install(monkeypatch: pytest.MonkeyPatch):
    from jax.experimental import topologies

    def missing(*_: object, **__: object) -> None:
        raise RuntimeError("no plugin")

    monkeypatch.setattr(topologies, "get_topology_desc", missing)
    monkeypatch.setattr(tpu_platform, "_described_devices", {})  # other tests may have described this slice
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError) as error:
        compile_devices(parse_target("v4-64"))
    assert str(error.value).startswith("target=v4-64 ") and "--extra tpu" in str(error.value)


def test_chips_with_other_slice_rules_need_no_code():
    chip = ChipConfig(name="small", platform="tpu", ici_axes=2, wrap="axes_of_8", host_bounds=[2, 2])
    assert chip.slices.default_shape(64) == (8, 8) and chip.slices.closed_axes((4, 8)) == (False, True)
    assert chip.slices.default_shape(128) is None
    (problem,) = dataclasses.replace(chip, wrap="axes").problems()
    assert (problem.key, problem.value) == ("target.chip.wrap", "axes")


def test_a_saved_chip_without_a_new_figure_gets_the_shipped_one():
    v4 = known_chips()["v4"]
    saved = {"name": "v4", "hbm_gbs": 1000.0, "host_gbs": 8.0}
    filled = fill_missing_chip_fields(saved)
    assert (filled["cores"], filled["host_gbs"], filled["hbm_gbs"]) == (2, 8.0, 1000.0)
    assert filled["splash_bundles"]["dq"]["step"] == v4.splash_bundles["dq"].step
    assert fill_missing_chip_fields({"name": "h100"})["gpu"]["sms"] == 132
    assert fill_missing_chip_fields({"name": "mine"}) == {"name": "mine"}
