"""Replays the schedule of a compiled step on one device of a slice, to predict the step time and its parts.

The device executes the instructions in order. Asynchronous transfers continue in the background, share links, and
block the device where it waits for them. A loop's body is replayed once and multiplied by the trip count. If transfers
are in flight when the loop starts, its first iterations are replayed one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from valkyrie.axes import ROUTED_SHARE
from valkyrie.compiled.collectives import (
    ASYNC_DONE,
    ASYNC_START,
    FUSED_CONFIG_KEY,
    Collective,
    CollectiveReader,
    CollectiveUse,
    collective_kind,
    find_cause,
    fused_kind,
    inner_collectives,
    is_between_slices,
    is_synchronous,
    slice_mask,
    wrapped_collectives,
)
from valkyrie.compiled.hlo import Computation, Instruction, Module
from valkyrie.compiled.loops import condition_and_body, trip_count
from valkyrie.hardware.target import ChipConfig
from valkyrie.machine import assumptions
from valkyrie.machine.links import LinkSimulator, Transfer
from valkyrie.machine.network import CollectiveCost, LinkModel, Machine
from valkyrie.machine.operations import OpCost, OpCostModel
from valkyrie.machine.timeline import COPIES
from valkyrie.parts import PartKind, StepPart, format_category

_EXPLICIT_ITERATIONS = 4
"""Maximum number of iterations at the start of a loop that are replayed one by one while transfers are in flight.

All further iterations are assumed to take as long as an iteration that starts without transfers in flight.
"""


@dataclass
class OpTotals:
    """Calls and seconds per step of all operations with the same kind, mesh axes, op_name and source."""

    kind: PartKind
    mesh_axes: tuple[str, ...]
    op_name: str
    source: str
    calls: float = 0.0
    seconds: float = 0.0


@dataclass(frozen=True)
class TimelineSpan:
    """An interval on a track of the timeline.

    `track` is `compute`, `copies`, or the mesh axes of a collective. `category` is the kind of work, such as
    `matmul` or `all-gather`.
    """

    track: str
    name: str
    category: str
    op_name: str
    source: str
    start_s: float
    duration_s: float


@dataclass
class Replay:
    """Predicted step of one device: the result of replaying a compiled HLO module.

    Args:
        step_s: Predicted duration of the step.
        parts: Disjoint parts of the step, which sum to `step_s`.
        flops: FLOPs of matrix products on the device.
        sending_s: Seconds during which any collective was in flight.
        collectives: All collectives, most bytes sent first.
        costs: All operations, longest first.
        spans: The timeline, with the first and the last iteration of each loop.
        notes: Assumptions that were necessary for this module.
        correction: Factor that the times were multiplied by after the replay.
    """

    step_s: float
    parts: list[StepPart]
    flops: float
    sending_s: float
    collectives: list[CollectiveUse]
    costs: list[OpTotals]
    spans: list[TimelineSpan]
    notes: list[str]
    correction: float = 1.0


class OperationModel(Protocol):
    """Computes the costs of operations other than collectives.

    `notes` has the assumptions made so far as keys. `compute_slowdown` is the factor on the time of operations while a
    collective is in flight. `has_fallback_branches` means that the branches of a conditional without a kernel are the
    fallback of a branch with one.
    """

    notes: dict[str, None]
    compute_slowdown: float
    has_fallback_branches: bool

    def cost(self, instruction: Instruction) -> OpCost:
        """Return the cost of one execution of an operation."""
        ...

    def background_cost(self, instruction: Instruction) -> tuple[float, str]:
        """Return the seconds that an asynchronous operation takes alone, and the link that it occupies."""
        ...


class NetworkModel(Protocol):
    """Computes the costs of collectives. `notes` has the assumptions made so far as keys."""

    notes: dict[str, None]

    def cost(self, collective: Collective) -> CollectiveCost:
        """Return the cost of one run of a collective."""
        ...


class ReducedNetwork:
    """A network model for which collectives send only a share of their bytes, from 0 to 1."""

    def __init__(self, network: NetworkModel, share: Callable[[Collective], float]) -> None:
        self.notes = network.notes
        self._network, self._share = network, share

    def cost(self, collective: Collective) -> CollectiveCost:
        """Return the cost of one run of the reduced collective."""
        cost, share = self._network.cost(collective), self._share(collective)
        return cost if share == 1 else cost.reduced(share)


class CostModels(NamedTuple):
    """Builds the cost models of a kind of chip: operations of a chip, and the network of a machine.

    `operations` also takes `Machine.routing_imbalance`, and `network` the mask of `slice_mask`.
    """

    operations: Callable[[ChipConfig, float], OperationModel]
    network: Callable[[Machine, np.ndarray | None], NetworkModel]


TPU_MODELS = CostModels(OpCostModel, LinkModel)


def replay(module: Module, machine: Machine, models: CostModels = TPU_MODELS) -> Replay:
    """Replay one step on a machine.

    Raises ValueError if the module was compiled for another number of devices, or if the chip lacks a figure that
    `models` need, such as its HBM bandwidth.
    """
    return _Replayer(module, machine, models).play()


@dataclass
class _Totals:
    """Totals over a part of the program: the entries of a Replay, and the duration."""

    seconds: dict[tuple[PartKind, tuple[str, ...]], float] = field(default_factory=dict)
    flops: float = 0.0
    sending_s: float = 0.0
    uses: dict[tuple[object, ...], CollectiveUse] = field(default_factory=dict)
    costs: dict[tuple[object, ...], OpTotals] = field(default_factory=dict)
    spans: list[TimelineSpan] = field(default_factory=list)
    duration_s: float = 0.0

    def add_time(
        self,
        kind: PartKind,
        seconds: float,
        op_name: str,
        source: str,
        calls: float = 1.0,
        mesh_axes: tuple[str, ...] = (),
    ) -> None:
        """Add device time to a part of the step and to the cost of an operation."""
        self.seconds[kind, mesh_axes] = self.seconds.get((kind, mesh_axes), 0.0) + seconds
        cost = self.costs.setdefault((kind, mesh_axes, op_name, source), OpTotals(kind, mesh_axes, op_name, source))
        cost.calls += calls
        cost.seconds += seconds

    def get_use(self, collective: Collective, torus_axes: tuple[str, ...]) -> CollectiveUse:
        """Return the `CollectiveUse` that counts the calls of a collective. Creates an empty one for the first call."""
        new = collective.empty_use(torus_axes)
        return self.uses.setdefault(new.key, new)

    def add(self, other: _Totals, repeats: int, start_s: float, name: str) -> None:
        """Add a part of the program that runs `repeats` times in a row from `start_s`.

        The timeline gets the spans of its first and last run, and one span for all runs in between.
        """
        self.flops += repeats * other.flops
        self.sending_s += repeats * other.sending_s
        for cost in other.costs.values():
            self.add_time(
                cost.kind, repeats * cost.seconds, cost.op_name, cost.source, repeats * cost.calls, cost.mesh_axes
            )
        for key, use in other.uses.items():
            self.uses.setdefault(key, use.copy_without_totals()).add(use, repeats)
        for iteration in sorted({0, repeats - 1}):
            shift_s = start_s + iteration * other.duration_s
            self.spans += [
                TimelineSpan(s.track, s.name, s.category, s.op_name, s.source, s.start_s + shift_s, s.duration_s)
                for s in other.spans
            ]
        if repeats > 2:
            middle_start_s, middle_duration_s = start_s + other.duration_s, (repeats - 2) * other.duration_s
            middle_name = f"{name}: iterations 2 to {repeats - 1}"
            self.spans.append(TimelineSpan("compute", middle_name, "loop", name, "", middle_start_s, middle_duration_s))


class _Replayer:
    def __init__(self, module: Module, machine: Machine, models: CostModels) -> None:
        self._module = module
        slices = [position.slice_index for position in machine.positions]
        self._collectives = CollectiveReader(module, machine.mesh_axes, slices)
        self._network = models.network(machine, slice_mask(slices, module.num_partitions))
        self._ops = models.operations(machine.chip, machine.routing_imbalance)
        self._links = LinkSimulator()
        self._pending_transfers: dict[Instruction | int, Transfer] = {}
        self._pending_sends: dict[str, Transfer] = {}
        self._totals = _Totals()
        self._isolated_totals: dict[Computation, _Totals] = {}
        self._notes: dict[str, None] = {}

    def play(self) -> Replay:
        if not self._module.is_scheduled:
            self._notes["the module is not scheduled: instructions are replayed in the order of the file"] = None
        self._replay_computation(self._module.entry)
        totals = self._totals
        notes = [*self._notes, *self._ops.notes, *self._network.notes]
        return Replay(
            step_s=self._links.now_s,
            parts=[StepPart(kind, axes, seconds) for (kind, axes), seconds in totals.seconds.items()],
            flops=totals.flops,
            sending_s=totals.sending_s + self._links.sending_s,
            collectives=sorted(totals.uses.values(), key=lambda u: -u.bytes_sent),
            costs=sorted(totals.costs.values(), key=lambda c: -c.seconds),
            spans=sorted(totals.spans, key=lambda s: s.start_s),
            notes=notes,
        )

    def _replay_computation(self, computation: Computation) -> None:
        for instruction in computation.instructions:
            self._replay_instruction(instruction)

    def _replay_instruction(self, instruction: Instruction) -> None:
        opcode = instruction.opcode
        if opcode == "while":
            self._replay_loop(instruction)
        elif opcode == "conditional":
            self._replay_conditional(instruction)
        elif opcode == "call":
            self._replay_computation(instruction.called_computations[0])
        elif opcode in ("send", "recv", "send-done", "recv-done"):
            self._replay_host_message(instruction)
        elif opcode.endswith("-done"):
            self._wait_for_start(instruction)
        elif opcode == "async-update":
            self._start_with_operands(instruction)
        elif opcode == "async-start" and not instruction.operands:
            pass  # loads the program of a SparseCore, which runs once an `async-update` brings the operands
        elif opcode.endswith("-start"):
            self._start_transfer(instruction)
        elif collective_kind(opcode):
            self._wait(self._start_collective(instruction.name, self._collectives.read(instruction)))
        elif opcode == "fusion" and (inner_instructions := inner_collectives(instruction.called_computations[0])):
            self._replay_fusion(instruction, inner_instructions)
        else:
            self._replay_compute(instruction)

    def _replay_compute(self, instruction: Instruction) -> None:
        cost = self._ops.cost(instruction)
        if cost.duration_s <= 0 and not cost.flops:
            return
        totals, links = self._totals, self._links
        op_name, source = find_cause(instruction)
        start_s = links.now_s
        links.compute(cost.duration_s, self._ops.compute_slowdown)
        duration_s = links.now_s - start_s
        totals.spans.append(
            TimelineSpan("compute", instruction.name, cost.kind.value, op_name, source, start_s, duration_s)
        )
        totals.add_time(cost.kind, duration_s, op_name, source)
        totals.flops += cost.flops

    def _replay_fusion(self, instruction: Instruction, inner_instructions: list[Instruction]) -> None:
        """Replay a fusion that starts, continues or ends an asynchronous collective, or contains a synchronous one."""
        start_instructions, done_instructions = (
            wrapped_collectives(target, instruction.called_computations[0]) for target in (ASYNC_START, ASYNC_DONE)
        )
        async_parts = [i for i in inner_instructions if FUSED_CONFIG_KEY in i.backend_config]
        if not async_parts and not start_instructions and not done_instructions:
            collective = self._collectives.read(
                inner_instructions[0], fused_kind(instruction, inner_instructions[0]), instruction
            )
            self._wait(self._start_collective(instruction.name, collective))
            return
        for i in start_instructions:
            collective = self._collectives.read(i, caller=instruction)
            self._pending_transfers[i.message.channel_id] = self._start_collective(instruction.name, collective)
        if instruction.cycles is not None:
            self._replay_compute(instruction)
        for i in done_instructions:
            transfer = self._pending_transfers.pop(i.message.channel_id, None)
            if transfer is not None:
                self._wait(transfer)

    def _start_collective(self, name: str, collective: Collective) -> Transfer:
        cost = self._network.cost(collective)
        work_s = cost.total_s - cost.latency_s
        link_shares = {link: busy_s / work_s for link, busy_s in cost.busy_s.items()} if work_s > 0 else {}
        transfer = Transfer(cost.latency_s, work_s, link_shares, tag=(name, collective))
        if collective.kind == "ragged-all-to-all":
            text = f"a ragged-all-to-all is assumed to send its whole operand, or its share {ROUTED_SHARE}"
            self._notes[f"{text}, evenly across its group"] = None
        self._links.start(transfer)
        return transfer

    def _start_transfer(self, instruction: Instruction) -> None:
        opcode = instruction.opcode
        inner_instructions = [i for c in instruction.called_computations for i in inner_collectives(c)]
        if collective_kind(opcode) or inner_instructions:
            collective = self._collectives.read(
                instruction if collective_kind(opcode) else inner_instructions[0], caller=instruction
            )
            self._pending_transfers[instruction] = transfer = self._start_collective(instruction.name, collective)
            if is_synchronous(instruction):
                self._wait(transfer)
            return
        seconds, link = self._ops.background_cost(instruction)
        link_shares, tag = {link: 1.0} if link else {}, (instruction.name, None)
        transfer = Transfer(assumptions.DMA_START_S, seconds, link_shares, tag, is_between_devices=False)
        self._pending_transfers[instruction] = transfer
        self._links.start(transfer)

    def _start_with_operands(self, update: Instruction) -> None:
        """Start the transfer of an `async-start` without operands, unless an earlier `async-update` did."""
        start = _async_start(update)
        if not start.operands and start not in self._pending_transfers:
            self._start_transfer(start)

    def _wait_for_start(self, instruction: Instruction) -> None:
        start = _async_start(instruction)
        transfer = self._pending_transfers.pop(start, None)
        if transfer is None:
            self._notes[f"{instruction.name} waits for {start.name}, which was not found: no wait is assumed"] = None
        elif not is_synchronous(start):
            self._wait(transfer)

    def _replay_host_message(self, instruction: Instruction) -> None:
        """Replay a send or receive between device and host.

        Collectives between slices run in the host's runtime: `send` starts one, and `recv-done` waits for it. All other
        messages, such as callbacks, are assumed to take no time.
        """
        key = instruction.attributes.get("_xla_host_transfer_rendezvous", instruction.name)
        if is_between_slices(instruction):
            self._pending_sends[key] = self._start_collective(
                instruction.name, self._collectives.read_between_slices(instruction)
            )
        elif instruction.opcode == "recv-done":
            receive = instruction.operands[0]
            transfer = self._pending_sends.pop(receive.attributes.get("_xla_host_transfer_rendezvous", ""), None)
            if transfer is not None:
                self._wait(transfer)
        elif instruction.opcode == "send":
            self._notes["messages to the host, such as callbacks and debug prints, are assumed to take no time"] = None

    def _wait(self, transfer: Transfer) -> None:
        totals, links = self._totals, self._links
        wait_start_s = links.now_s
        waited_s = links.wait(transfer)
        name, collective = transfer.tag
        end_s = links.now_s if transfer.end_s is None else transfer.end_s
        duration_s = end_s - transfer.start_s
        if collective is None:
            totals.spans.append(TimelineSpan(COPIES, name, "copy", "", "", transfer.start_s, duration_s))
            if waited_s > 0:
                totals.spans.append(
                    TimelineSpan("compute", f"wait for {name}", PartKind.copies.value, "", "", wait_start_s, waited_s)
                )
                totals.add_time(PartKind.copies, waited_s, "wait for a copy between memories", "")
            return
        cost = self._network.cost(collective)
        use = totals.get_use(collective, tuple(cost.bytes_by_axis))
        use.calls += 1
        use.bytes_sent += cost.bytes_sent or collective.bytes_sent
        use.busy_s += duration_s
        use.exposed_s += waited_s
        for axis, bytes_sent in cost.bytes_by_axis.items():
            use.bytes_by_torus_axis[axis] = use.bytes_by_torus_axis.get(axis, 0.0) + bytes_sent
        cause = (collective.op_name, collective.source)
        if duration_s > 0:
            totals.spans.append(
                TimelineSpan(collective.label, name, collective.kind, *cause, transfer.start_s, duration_s)
            )
        if waited_s > 0:
            category = format_category(PartKind.exposed, collective.mesh_axes)
            totals.spans.append(TimelineSpan("compute", f"wait for {name}", category, *cause, wait_start_s, waited_s))
            totals.add_time(PartKind.exposed, waited_s, *cause, mesh_axes=collective.mesh_axes)

    def _replay_loop(self, instruction: Instruction) -> None:
        trips = trip_count(instruction)
        if trips is None:
            self._notes[f"the trip count of {instruction.name} ({instruction.op_name}) is unknown: 1 is assumed"] = None
            trips = 1
        body = condition_and_body(instruction)[1]
        replayed_count = 0
        while self._links.active_transfers and replayed_count < min(trips, _EXPLICIT_ITERATIONS):
            self._replay_computation(body)
            self._add_loop_overhead(instruction, 1)
            replayed_count += 1
        remaining_trips = trips - replayed_count
        if remaining_trips > 0:
            body_totals = self._replay_alone(body)
            self._totals.add(body_totals, remaining_trips, self._links.now_s, instruction.name)
            self._links.pass_time(remaining_trips * body_totals.duration_s)
            self._add_loop_overhead(instruction, remaining_trips)

    def _add_loop_overhead(self, loop: Instruction, repeats: int) -> None:
        """Add the time of branching and scalar work in `repeats` iterations of a loop (`LOOP_ITERATION_S`)."""
        seconds = repeats * assumptions.LOOP_ITERATION_S
        self._totals.add_time(PartKind.compute, seconds, "loop control", loop.source, float(repeats))
        self._links.pass_time(seconds)

    def _replay_alone(self, body: Computation) -> _Totals:
        """Replay a computation once, without transfers from outside in flight, and return its totals."""
        if body not in self._isolated_totals:
            outer_totals, outer_links = self._totals, self._links
            self._totals, self._links = _Totals(), LinkSimulator()
            self._replay_computation(body)
            self._totals.duration_s = self._links.now_s
            self._totals.sending_s += self._links.sending_s
            self._isolated_totals[body] = self._totals
            self._totals, self._links = outer_totals, outer_links
        return self._isolated_totals[body]

    def _replay_conditional(self, instruction: Instruction) -> None:
        """Replay all branches of a conditional, and add the longest to the step.

        If only some branches run a kernel, the others may be its fallback (`OperationModel.has_fallback_branches`) and
        are then not added.
        """
        branch_totals = [self._replay_alone(branch) for branch in instruction.called_computations]
        kernel_branches = [
            totals
            for totals in branch_totals
            if self._ops.has_fallback_branches and (PartKind.kernel, ()) in totals.seconds
        ]
        longest_branch = max(kernel_branches or branch_totals, key=lambda totals: totals.duration_s)
        self._totals.add(longest_branch, 1, self._links.now_s, instruction.name)
        self._links.pass_time(longest_branch.duration_s)
        which = "branch with a kernel" if kernel_branches else "longest branch"
        self._notes[f"the {which} of a conditional is assumed to run"] = None


def _async_start(instruction: Instruction) -> Instruction:
    """Return the start of an asynchronous operation, given its `-done` or an `async-update`."""
    start = instruction.operands[0]
    while start.opcode == "async-update":
        start = start.operands[0]
    return start
