"""Hardware: every target is a slice that exists, its torus and hosts follow, and what does not exist is refused."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from machines import needs_libtpu
from valkyrie.hardware import (
    ChipConfig,
    Platform,
    TargetConfig,
    Wrap,
    known_chips,
    known_targets,
    legal_neighbours,
    topology_of,
    torus_shape,
)
from valkyrie.parallel import topology as compiling
from valkyrie.parallel.topology import compile_devices
from valkyrie.paths import conf_dir

TARGETS = {target.name: target for target in known_targets()}
SLICES = [target for target in TARGETS.values() if target.platform is Platform.tpu]
TPUS = [chip for chip in known_chips().values() if chip.platform is Platform.tpu]


def target(name: str, **changes: object) -> TargetConfig:
    return dataclasses.replace(TARGETS[name], **changes)


def test_every_generation_has_its_slices():
    assert {chip.name for chip in TPUS} == {"v3", "v4", "v5e", "v5p", "v6e", "tpu7x"}
    expected = {"v3": 8, "v4": 12, "v5e": 8, "v5p": 12, "v6e": 8, "tpu7x": 13}
    assert {c.name: sum(t.chip == c for t in SLICES) for c in TPUS} == expected


@pytest.mark.parametrize("slice_", SLICES, ids=lambda t: t.name)
def test_a_slice_agrees_with_its_name_topology_and_hosts(slice_: TargetConfig):
    assert slice_.chip is not None and slice_.chips is not None
    assert slice_.problems() == []
    assert slice_.name == f"{slice_.chip.name}-{slice_.chips * slice_.chip.units_in_name}"
    torus = topology_of(slice_)
    assert torus.chips == slice_.chips == math.prod(torus.shape)
    assert torus.devices == slice_.devices == slice_.chips * slice_.chip.devices
    assert slice_.hosts * math.prod(torus.host_bounds) == slice_.chips
    assert "with topology" not in slice_.describe()


@pytest.mark.parametrize("chip", TPUS, ids=lambda chip: chip.name)
def test_every_figure_of_a_chip_is_there_with_its_source(chip: ChipConfig):
    unknown = {field.name for field in dataclasses.fields(chip) if getattr(chip, field.name) is None}
    assert unknown == {"spot_usd_per_hour"} | ({"dcn_gbs_per_host"} if chip.name == "v3" else set())
    assert chip.hbm_gib is not None and chip.usable_hbm_gib is not None and chip.hbm_gib > 0
    assert 0.95 < chip.usable_hbm_gib / chip.hbm_gib < 1.01
    for line in (conf_dir() / "target" / "chip" / f"{chip.name}.yaml").read_text().splitlines():
        if re.search(r"(: +[0-9]|bounds)", line.partition("#")[0]):
            assert re.search(r"  # \S", line), line


@pytest.mark.parametrize(
    ("name", "topology", "wrap", "bounds"),
    [
        ("v4-64", None, (False, False, False), (2, 2, 1)),
        ("v4-64", "4x4x2", (False, False, False), (2, 2, 1)),
        ("v4-128", None, (True, True, True), (2, 2, 1)),
        ("v4-128", "8x8x12", (True, True, True), (2, 2, 1)),
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
def test_axes_close_by_the_rule_of_the_chip(
    name: str, topology: str | None, wrap: tuple[bool, ...], bounds: tuple[int, ...]
):
    torus = topology_of(target(name, topology=topology) if topology else target(name))
    assert (torus.wrap, torus.host_bounds) == (wrap, bounds)


def test_a_topology_decides_chips_and_hosts():
    custom = target("v4-128", topology="8x8x12")
    assert (custom.chips, custom.hosts, custom.devices) == (768, 192, 768)
    assert custom.describe() == "v4-128 with topology 8x8x12 (768 v4 chips, 192 hosts)"
    assert target("v3-8", topology="4x8").devices == 64
    assert TargetConfig(name="mine", chip=known_chips()["v5p"], topology="4x4x8").describe() == (
        "mine (128 v5p chips 4x4x8, 32 hosts)"
    )
    assert target("v4-64", topology="4x4x2").describe() == "v4-64 (32 v4 chips 4x4x2, 8 hosts)"


def test_slices_multiply():
    two = target("v4-64", slices=2)
    assert (two.devices, topology_of(two).devices, topology_of(two).chips) == (64, 64, 32)
    assert two.describe() == "v4-64 (32 v4 chips 2x4x4, 8 hosts in each of 2 slices)"
    assert target("v4-64", slices=0).problems() == ["target.slices=0: at least 1 is needed."]


def test_a_target_without_a_torus_is_a_row_of_chips():
    torus = topology_of(TARGETS["cpu32"])
    assert (torus.shape, torus.wrap, torus.devices) == ((32,), (False,), 32)
    assert topology_of(TARGETS["h100-8"]).host_bounds == (8,)
    with pytest.raises(
        ValueError, match=r"^target=auto is whatever the machine has, so nothing is known of its links\."
    ):
        topology_of(TARGETS["auto"])


@pytest.mark.parametrize(
    ("name", "topology", "problem"),
    [
        (
            "v5p-64",
            "2x4x5",
            "target.topology=2x4x5 is no slice of v5p: below a cube of 4x4x4 there are 1x1x1, 2x2x1, 2x2x2, 2x2x4, "
            "2x4x4; from there on every axis is a multiple of 4. Nearest: target.topology=2x4x4 (32 chips), "
            "target.topology=4x4x4 (64 chips).",
        ),
        (
            "v5e-16",
            "2x8",
            "target.topology=2x8 is no slice of v5e: slices are n x n or n x 2n chips, n a power of 2, with sides up "
            "to 16. Nearest: target.topology=4x4 (16 chips), target.topology=2x4 (8 chips), target.topology=4x8 "
            "(32 chips).",
        ),
        (
            "v6e-16",
            "32x16",
            "target.topology=32x16 is no slice of v6e: the largest has 256 chips, this one would have 512. Nearest: "
            "target.topology=16x16 (256 chips).",
        ),
        (
            "v4-8",
            "2x1x2",
            "target.topology=2x1x2 is no slice of v4: hosts of 2x2x1 chips do not fit into it. Write "
            "target.topology=2x2x1.",
        ),
        (
            "v4-8",
            "4x4",
            "target.topology=4x4: a v4 slice is a torus of 3 axes. Write the chips along each, such as "
            "target.topology=4x4x4.",
        ),
        (
            "v5e-8",
            "2xx4",
            "target.topology=2xx4: a v5e slice is a torus of 2 axes. Write the chips along each, such as "
            "target.topology=4x4.",
        ),
        ("h100-8", "2x4", "target=h100-8 has no torus, so target.topology=2x4 means nothing. Leave it out."),
    ],
)
def test_a_topology_that_does_not_exist_is_refused_with_its_neighbours(name: str, topology: str, problem: str):
    asked = target(name, topology=topology)
    assert asked.problems() == [problem]
    with pytest.raises(ValueError) as refused:
        topology_of(asked)
    assert str(refused.value) == problem


@given(st.sampled_from(TPUS), st.data())
def test_neighbours_exist_and_enclose(chip: ChipConfig, data: st.DataObject):
    assert chip.ici_axes is not None
    shape = tuple(data.draw(st.lists(st.integers(1, 40), min_size=chip.ici_axes, max_size=chip.ici_axes)))
    asked = TargetConfig(name="mine", chip=chip, topology="x".join(str(n) for n in shape))
    near = [torus_shape(n) or () for n in legal_neighbours(chip, shape)]
    assert near and shape not in near
    for found in near:
        assert TargetConfig(chip=chip, topology="x".join(str(n) for n in found)).problems() == []
    if asked.problems() == []:
        assert chip.wrap is not Wrap.cubes_of_4 or asked.chips in (1, 4, 8, 16, 32) or not any(n % 4 for n in shape)
        assert torus_shape(asked.topology) == topology_of(asked).shape


@needs_libtpu
@pytest.mark.parametrize("name", ["v3-32", "v4-64", "v4-128", "v5e-8", "v5e-128", "v5p-16", "v6e-1", "tpu7x-16"])
def test_libtpu_has_the_slice_with_these_hosts(name: str, capfd: pytest.CaptureFixture[str]):
    slice_ = TARGETS[name]
    devices = compile_devices(slice_)
    torus = topology_of(slice_)
    assert slice_.chip is not None
    assert len(devices) == torus.devices
    assert {device.device_kind for device in devices} <= set(slice_.chip.device_kinds)
    assert len({device.process_index for device in devices}) == slice_.hosts
    places = {(*device.coords[: len(torus.shape)], device.core_on_chip) for device in devices}
    assert len(places) == torus.devices
    assert all(a < b for place in places for a, b in zip(place, (*torus.shape, torus.devices_per_chip), strict=True))
    assert capfd.readouterr() == ("", "")


@needs_libtpu
def test_slices_carry_their_index():
    devices = compile_devices(target("v5e-4", slices=2))
    assert sorted(device.slice_index for device in devices) == [0] * 4 + [1] * 4


@needs_libtpu
def test_what_only_libtpu_refuses_is_one_line_with_neighbours(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compiling, "_options", lambda _: {"chips_per_host_bounds": (3, 2, 1)})
    with pytest.raises(ValueError) as refused:
        compile_devices(TARGETS["v4-64"])
    assert str(refused.value) == (
        "target=v4-64 (32 v4 chips 2x4x4, 8 hosts) is refused by libtpu: Topology layout "
        '"v4:2x4x4" is not divisible by the given (or default) chips_per_host_bounds "3x2x1". '
        "Nearest: target.topology=2x2x4 (16 chips), target.topology=4x4x4 (64 chips)."
    )


def test_without_libtpu_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    from jax.experimental import topologies

    def missing(*_: object, **__: object) -> None:
        raise RuntimeError("no plugin")

    monkeypatch.setattr(topologies, "get_topology_desc", missing)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError) as refused:
        compile_devices(TARGETS["v4-64"])
    assert str(refused.value) == (
        "target=v4-64 (32 v4 chips 2x4x4, 8 hosts) is compiled by libtpu, which is not installed here. Install it with "
        "pip install 'valkyrie-jax[tpu]' (or uv sync --extra tpu); no TPU is needed."
    )


def test_only_tpu_slices_have_devices_to_compile_for():
    with pytest.raises(ValueError, match="is no TPU slice: only those are compiled for without a device"):
        compile_devices(TARGETS["cpu8"])
