"""Tests of the cost of collectives on a torus: it equals the closed form (bytes over bandwidth, plus hops)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from machines import CHIPS, make_machine, make_topology
from valkyrie.compiled.collectives import CollectiveReader, min_bytes_sent
from valkyrie.compiled.hlo import parse_module
from valkyrie.hardware.names import parse_target
from valkyrie.hardware.position import Position
from valkyrie.hardware.target import Topology, build_topology
from valkyrie.machine import assumptions
from valkyrie.machine.network import CollectiveCost, LinkModel, Machine, parse_algorithm
from valkyrie.parallel.axis_links import DCN

BYTES = 64e6
LINK_RATE = CHIPS["v4"].ici_link_gbs * 1e9


def make_network(shape, **more) -> tuple[LinkModel, np.ndarray]:
    """Return a torus of v4 chips, and an array of its device IDs, indexed by slice and torus coordinates."""
    topology = make_topology(shape, **more)
    return LinkModel(make_machine("v4", topology)), np.arange(topology.devices).reshape(topology.slices, *shape)


def link_seconds(cost: CollectiveCost, kind: str) -> float:
    """Return the seconds of a transfer without latency, at the full bandwidth of the links."""
    share = assumptions.ICI_EFFICIENCY.get(kind, assumptions.DEFAULT_ICI_EFFICIENCY)
    return (cost.total_s - cost.latency_s) * share


def axis_groups(ids: np.ndarray, axis: int) -> np.ndarray:
    """Return the groups of devices along one axis of the torus."""
    return np.moveaxis(ids[0], axis, -1).reshape(-1, ids.shape[axis + 1])


@pytest.mark.parametrize(("kind", "passes"), [("all-gather", 1), ("reduce-scatter", 1), ("all-reduce", 2)])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_a_ring_uses_both_links_of_an_axis(kind, passes, axis):
    net, ids = make_network((4, 4, 8))
    groups = axis_groups(ids, axis)
    n = groups.shape[1]
    cost = net.collective_cost(kind, groups, BYTES)
    assert link_seconds(cost, kind) == pytest.approx(passes * (n - 1) / n * BYTES / (2 * LINK_RATE))
    assert cost.bytes_sent == passes * (n - 1) / n * BYTES
    assert cost.bytes_by_axis == {"abc"[axis]: cost.bytes_sent}
    assert cost.latency_s == pytest.approx(assumptions.COLLECTIVE_START_S + passes * n / 2 * 1e-6)


def test_a_line_is_half_as_fast_as_a_ring():
    ring, ids = make_network((4, 4, 4))
    line, _ = make_network((4, 4, 4), wrap=(False, False, False))
    groups = axis_groups(ids, 1)
    ring_cost, line_cost = (net.collective_cost("all-gather", groups, BYTES) for net in (ring, line))
    assert link_seconds(line_cost, "all-gather") == pytest.approx(2 * link_seconds(ring_cost, "all-gather"))
    assert line_cost.latency_s == pytest.approx(assumptions.COLLECTIVE_START_S + 3e-6)


def test_an_all_gather_on_v5e_takes_the_time_in_the_scaling_book():
    """34 MB over 4 chips of an axis without wraparound: 560 us in theory, 680 us measured (scaling book)."""
    net = LinkModel(make_machine("v5e", make_topology((4, 8))))
    groups = np.arange(32).reshape(4, 8).T
    cost = net.collective_cost("all-gather", groups, 34e6)
    assert link_seconds(cost, "all-gather") == pytest.approx(566e-6, rel=0.01)
    assert cost.total_s == pytest.approx(680e-6, rel=0.08)
    small = net.collective_cost("all-gather", groups, 4 * 32e3)
    assert small.total_s == pytest.approx(8e-6, rel=0.4)


@pytest.mark.parametrize("kind", ["all-gather", "all-reduce"])
def test_all_axes_of_a_cube_are_used_at_once(kind):
    net, ids = make_network((4, 4, 4))
    cost = net.collective_cost(kind, ids.reshape(1, -1), BYTES)
    passes = 2 if kind == "all-reduce" else 1
    assert link_seconds(cost, kind) == pytest.approx(passes * 63 / 64 * BYTES / (6 * LINK_RATE))
    assert sum(cost.bytes_by_axis.values()) == pytest.approx(cost.bytes_sent)
    assert set(cost.bytes_by_axis) == {"a", "b", "c"}


def test_a_plane_uses_the_links_of_two_axes():
    net, ids = make_network((4, 4, 4))
    cost = net.collective_cost("all-gather", ids[0].transpose(1, 0, 2).reshape(4, 16), BYTES)
    assert link_seconds(cost, "all-gather") == pytest.approx(15 / 16 * BYTES / (4 * LINK_RATE))
    assert set(cost.bytes_by_axis) == {"a", "c"}


def test_a_group_on_half_of_an_axis_is_a_line():
    net, ids = make_network((8, 4, 4))
    halves = axis_groups(ids, 0).reshape(-1, 4)
    cost = net.collective_cost("all-gather", halves, BYTES)
    assert link_seconds(cost, "all-gather") == pytest.approx(3 / 4 * BYTES / LINK_RATE)


def test_groups_that_skip_chips_share_their_links():
    net, ids = make_network((8, 4, 4))
    skipping = np.concatenate([axis_groups(ids, 0)[:, 0::2], axis_groups(ids, 0)[:, 1::2]])
    cost = net.collective_cost("all-gather", skipping, BYTES)
    assert link_seconds(cost, "all-gather") == pytest.approx(2 * 3 / 4 * BYTES / (2 * LINK_RATE))


@pytest.mark.parametrize(("shape", "wrap", "crossings"), [((4, 4, 4), True, 2.0), ((2, 2, 4), False, 4.0)])
def test_an_all_to_all_loads_the_busiest_link(shape, wrap, crossings):
    """On a ring of 4, each link is crossed twice per direction. On a line of 4, the middle link is crossed 4 times."""
    net, ids = make_network(shape, wrap=(wrap,) * 3)
    cost = net.collective_cost("all-to-all", axis_groups(ids, 2), BYTES)
    assert link_seconds(cost, "all-to-all") == pytest.approx(crossings * BYTES / 4 / LINK_RATE)
    assert cost.bytes_sent == min_bytes_sent("all-to-all", BYTES, 4)


def test_a_permute_uses_one_direction_and_the_reverse_permute_the_other():
    net, ids = make_network((4, 4, 4))
    ring = axis_groups(ids, 0)
    up = np.stack([ring.ravel(), np.roll(ring, -1, axis=1).ravel()], axis=1)
    forward, backward = net.permute_cost(up, BYTES), net.permute_cost(up[:, ::-1], BYTES)
    assert link_seconds(forward, "collective-permute") == pytest.approx(BYTES / LINK_RATE)
    assert set(forward.busy_s) == {"a+"} and set(backward.busy_s) == {"a-"}
    assert forward.bytes_sent == BYTES and forward.bytes_by_axis == {"a": BYTES}


def test_a_permute_to_a_distant_chip_crosses_every_link_between():
    net, ids = make_network((8, 4, 4))
    ring = axis_groups(ids, 0)
    pairs = np.stack([ring.ravel(), np.roll(ring, -3, axis=1).ravel()], axis=1)
    cost = net.permute_cost(pairs, BYTES)
    assert link_seconds(cost, "collective-permute") == pytest.approx(3 * BYTES / LINK_RATE)
    assert cost.latency_s == pytest.approx(assumptions.COLLECTIVE_START_S + 3e-6)


def test_a_permute_between_slices_takes_the_rate_of_their_network() -> None:
    net, ids = make_network((4, 4, 4), slices=2)
    cost = net.permute_cost(np.stack([ids[0].ravel(), ids[1].ravel()], axis=1), BYTES)
    assert cost.total_s - cost.latency_s == pytest.approx(BYTES * 4 / 25e9)  # 4 devices share their host's 25 GB/s
    assert set(cost.busy_s) == {DCN} and cost.bytes_by_axis == {DCN: BYTES}


def test_a_ragged_all_to_all_sends_its_first_operand_times_the_imbalance() -> None:
    text = """HloModule m, is_scheduled=true, num_partitions=8
ENTRY e {
  p = bf16[4096,256] parameter(0)
  buffer = bf16[16384,256] parameter(1)
  o = s32[8] parameter(2)
  r = bf16[16384,256] ragged-all-to-all(p, buffer, o, o, o, o), channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}}
  ROOT b = bf16[4096,256] ragged-all-to-all(r, p, o, o, o, o), channel_id=2, replica_groups={{0,1,2,3,4,5,6,7}},
    frontend_attributes={valkyrie_routed_share="0.25"}
}
"""
    machine = make_machine("v5e", make_topology((2, 4)))
    module = parse_module(text)
    reader = CollectiveReader(module, machine.mesh_axes, [0] * 8)
    collective = reader.read(module.instructions["r"])
    assert collective.full_bytes == reader.read(module.instructions["b"]).full_bytes == 4096 * 256 * 2
    costs = [LinkModel(replace(machine, routing_imbalance=n)).cost(collective) for n in (1.0, 1.5)]
    work_s = [cost.total_s - cost.latency_s for cost in costs]
    assert work_s[1] == pytest.approx(1.5 * work_s[0])


def test_a_ragged_all_to_all_sends_as_much_between_slices_as_an_all_to_all() -> None:
    net, ids = make_network((4, 4, 4), slices=2)
    groups = ids.reshape(1, -1)
    ragged, even = (net.collective_cost(kind, groups, BYTES) for kind in ("ragged-all-to-all", "all-to-all"))
    assert ragged == even and even.bytes_by_axis[DCN] == BYTES / 2


def test_two_devices_of_a_chip_share_its_links_and_have_a_link_between_them():
    topology = Topology((4, 4), (False, False), (2, 2), devices_per_chip=2)
    positions = [Position(0, (x, y), core) for x in range(4) for y in range(4) for core in range(2)]
    net = LinkModel(Machine(CHIPS["v4"], topology, tuple(positions), {"x": 4, "y": 4, "z": 2}))
    ids = np.arange(32).reshape(4, 4, 2)
    between_chips_cost = net.collective_cost("all-gather", ids.transpose(1, 2, 0).reshape(8, 4), BYTES)
    assert link_seconds(between_chips_cost, "all-gather") == pytest.approx(2 * 3 / 4 * BYTES / LINK_RATE)
    between_cores_cost = net.collective_cost("all-gather", ids.reshape(16, 2), BYTES)
    assert link_seconds(between_cores_cost, "all-gather") == pytest.approx(
        BYTES / 2 / LINK_RATE / assumptions.CORE_BANDWIDTH_RATIO
    )
    assert (
        between_cores_cost.bytes_by_axis == {"core": BYTES / 2}
        and between_cores_cost.latency_s < between_chips_cost.latency_s
    )


def test_devices_of_a_host_share_its_network_between_slices():
    net, ids = make_network((4, 4, 4), slices=2)
    cost = net.between_slices_cost("all-reduce", BYTES, 2)
    assert cost.total_s - cost.latency_s == pytest.approx(BYTES * 4 / 25e9)
    assert cost.bytes_by_axis == {DCN: BYTES}
    whole = net.collective_cost("all-reduce", ids.reshape(1, -1), BYTES)
    assert whole.bytes_by_axis[DCN] == pytest.approx(BYTES / 64)
    assert whole.total_s > net.collective_cost("all-reduce", ids.reshape(2, -1), BYTES).total_s


@pytest.mark.parametrize("name", ["v5e-8", "v5e-16", "v6e-8", "v6e-16"])
def test_a_chips_network_bandwidth_does_not_depend_on_its_host_size(name):
    """A v5e-8 is one host of 8 chips, and a v5e-16 has 4 hosts of 4.

    Cloud TPU gives each chip 3.125 GB/s on v5e and 12.5 GB/s on v6e.
    """
    target = replace(parse_target(name), slices=2)
    assert target.chip is not None
    topology = build_topology(target)
    places = [Position(s, c, 0) for s in (0, 1) for c in np.ndindex(topology.shape)]
    cost = LinkModel(Machine(target.chip, topology, tuple(places), {})).between_slices_cost(
        "collective-permute", BYTES, 2
    )
    assert BYTES / (cost.total_s - cost.latency_s) == pytest.approx({"v5e": 3.125e9, "v6e": 12.5e9}[target.chip.name])


def test_a_group_of_one_sends_nothing():
    net, ids = make_network((4, 4, 4))
    assert net.collective_cost("all-reduce", ids.reshape(-1, 1), BYTES) == CollectiveCost()
    assert net.permute_cost(np.zeros((0, 2), int), BYTES) == CollectiveCost()


def config(emitter: str, debug: str) -> dict:
    return {"collective_algorithm_config": {"emitter": emitter, "debug": debug}}


ONE_RING = config("1DAllGatherNonMajorDimImbalanced", "\ngroup_size = 16 \nhas_reordering_map: true \n")
TWO_DIMS = config(
    "RotatedPincerEmitter",
    "\nStrategyND{colors:2 phases:2 cores:{4 4},{4 4} num_dims:2 active_dims:110 dim_sizes:4,4 "
    "dim_used:{1 2},{2 1},{0 0}}",
)


OVERLAPPED_GATHER = config("BarnaCoreAllGatherEmitter", "\ngroup_size = 16 \nhas_reordering_map: false \n")


def test_overlapped_gathers_on_v4_use_one_ring_in_mesh_order():
    """At the end of a row, the ring returns over the links of the whole row, which its other hops also use."""
    net, ids = make_network((4, 4, 4), wrap=(False, False, False))
    planes = ids[0].reshape(4, 16)
    cost = net.collective_cost("all-gather", planes, BYTES, parse_algorithm(OVERLAPPED_GATHER))
    one_link_of_a_row = 15 / 16 * BYTES / LINK_RATE
    assert link_seconds(cost, "all-gather") == pytest.approx(one_link_of_a_row)
    by_rows_and_columns = net.collective_cost("all-gather", planes, BYTES)
    assert link_seconds(by_rows_and_columns, "all-gather") == pytest.approx(one_link_of_a_row / 2)


def test_a_single_ring_through_a_plane_uses_two_links():
    net, ids = make_network((4, 4, 4))
    planes = ids[0].reshape(4, 16)
    cost = net.collective_cost("all-gather", planes, BYTES, parse_algorithm(ONE_RING))
    assert link_seconds(cost, "all-gather") == pytest.approx(15 / 16 * BYTES / (2 * LINK_RATE))


def test_the_compilers_dimension_orders_are_parsed():
    algorithm = parse_algorithm(TWO_DIMS)
    assert algorithm is not None and algorithm.sizes == (4, 4) and algorithm.orders == ((0, 1), (1, 0))
    net, ids = make_network((4, 4, 4))
    planes = ids[0].reshape(4, 16)
    assert net.collective_cost("all-reduce", planes, BYTES, algorithm) == net.collective_cost(
        "all-reduce", planes, BYTES
    )


def test_an_unstated_algorithm_is_none():
    assert parse_algorithm({}) is None


def test_a_chip_without_link_bandwidth_is_refused_with_its_key():
    v4 = make_machine("v4", make_topology((4, 4, 4)))
    v4.chip.ici_link_gbs, before = None, v4.chip.ici_link_gbs
    try:
        with pytest.raises(ValueError) as error:
            LinkModel(v4)
    finally:
        v4.chip.ici_link_gbs = before
    assert "ici_link_gbs" in str(error.value) and "target.chip=v4 " in str(error.value)
