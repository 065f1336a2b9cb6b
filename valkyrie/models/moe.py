"""The mixture-of-experts feed-forward: a router sends each token to a few of many small feed-forwards."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial

from valkyrie.axes import BATCH, EXPERTS, SEQ, GatheredRows, InUse, Size
from valkyrie.models.alternatives import Alternatives
from valkyrie.models.block import (
    ActivationSpec,
    Block,
    BlockContext,
    SavedActivation,
    Weight,
    saved,
    tensor,
    weight,
)
from valkyrie.models.dispatch import DispatchWork
from valkyrie.models.feed_forward import Nonlinearity
from valkyrie.ops.choices import GroupScore, RouterScores
from valkyrie.problems import Problem, ProblemCode, Range, check_range, nearest_divisor
from valkyrie.units import percent_text

_MIN_KEPT_SHARE = 0.5
"""Capacity factors below this share of the mean load get a note, because most rows of balanced experts are dropped."""


class LoadSpan(Enum):
    """Tokens over which the load-balancing loss counts loads.

    `sequence`: Those of one sequence.

    `batch`: Those of all sequences that are processed together: the batch, or a microbatch, and with
    `partition.sum_gradients_per=step` only a device's part of it.
    """

    sequence = "sequence"
    batch = "batch"


class Dispatch(Enum):
    """How tokens reach their experts.

    `dense`: Products with one-hot masks copy the tokens of a sequence into a buffer of equal capacity per expert
    (GShard, arXiv 2006.16668).

    `sorted`: Devices sort their tokens by expert, and multiply each group by the matrices of its expert (MegaBlocks,
    arXiv 2211.15841). If experts and tokens are split over the same mesh axis, devices gather the tokens of all devices
    along it and apply their own experts, and the results are reduce-scattered.

    `exchanged`: Like `sorted`, but along such an axis, ragged all-to-alls send each token only to the devices of its
    experts, once per expert. This sends less if the axis is longer than `top_k`.
    """

    dense = "dense"
    sorted = "sorted"
    exchanged = "exchanged"


@dataclass
class MoE(Block):
    """Mixture of experts (arXiv 1701.06538), each a feed-forward with `mlp` hidden channels.

    The router computes scores in float32. Every token uses the `top_k` experts with the highest scores, and sums their
    outputs, weighted by the scores. With `groups`, it uses only experts of the `top_groups` best groups of neighbouring
    experts (DeepSeek-V2, arXiv 2405.04434).

    Args:
        experts: Number of experts.
        top_k: Number of experts per token.
        mlp: Hidden channels of each expert.
        shared_experts: Number of additional experts that every token uses, with weight 1 (DeepSeekMoE, arXiv
            2401.06066).
        kind: Nonlinearity of the experts.
        biases: Add a bias to the router logits and to each product of the experts (gpt-oss). Shared experts have none.
        router: Function from router logits to scores.
        selection_bias: Add a bias to the scores to choose experts, but not to weight them. After each step, the biases
            of experts with more than the mean load decrease by `optimizer.balance_rate`, and those of others increase
            (arXiv 2408.15664).
        groups: Number of groups of experts.
        top_groups: Number of groups with the highest scores. A token uses only experts of these groups.
        group_score: Score of a group.
        normalize: Divide the scores of the chosen experts by their sum. With softmax, this is a softmax over the chosen
            logits (Mixtral, arXiv 2401.04088).
        routed_scaling: Factor of the weights (DeepSeek-V3, arXiv 2412.19437: 2.5).
        scale_inputs: Multiply the input of a token's expert by the weight, instead of its output (Llama 4). Needs
            `top_k=1`.
        dispatch: How tokens reach their experts.
        capacity_factor: Size of buffers, relative to the tokens in them if all experts get equally many. Tokens beyond
            a buffer skip the expert: only the residual stream and their other experts remain. null: buffers have room
            for all tokens. `dense` has a buffer per expert and sequence, which makes null expensive. `sorted` and
            `exchanged` have one per device, for all its experts and the tokens of all devices that send to it. Which
            tokens skip depends on the mesh then, and on tokens of other sequences. Values of at least 1 change nothing
            if experts are not split over devices.
        balance_weight: Weight of the load-balancing loss (Switch Transformer, arXiv 2101.03961).
        balance_over: Tokens over which that loss counts loads.
        z_weight: Weight of the squared log-sum-exp of the router logits (ST-MoE, arXiv 2202.08906).
    """

    experts: int = 8
    top_k: int = 2
    mlp: int = 512
    shared_experts: int = 0
    kind: Nonlinearity = Nonlinearity.swiglu
    biases: bool = False
    router: RouterScores = RouterScores.softmax
    selection_bias: bool = False
    groups: int = 1
    top_groups: int = 1
    group_score: GroupScore = GroupScore.top_2
    normalize: bool = False
    routed_scaling: float = 1.0
    scale_inputs: bool = False
    dispatch: Dispatch = Dispatch.sorted
    capacity_factor: float | None = None
    balance_weight: float = 0.01
    balance_over: LoadSpan = LoadSpan.sequence
    z_weight: float = 0.001

    axes = {"experts": "experts of a mixture", "mlp": "hidden channels of a feed-forward or gate"}
    activations = (("experts", "batch", "embed"), ("experts", "batch", "mlp"))
    dispatches = ("experts",)
    pointwise = True

    module_class = "valkyrie.models.moe_layer:MoELayer"

    @property
    def auxiliary(self) -> dict[str, float]:
        """Auxiliary losses, and metrics with weight 0: means over sequences of values of one sequence.

        `balance`: E * sum of (share of assignments x mean probability) over the E experts; 1 if balanced.
        `z`: Mean squared log-sum-exp of the router logits.
        `max_load`: Assignments to the busiest expert, divided by the mean over experts.
        `dropped`: Share of assignments beyond the capacity, which the experts skip.
        `entropy`: Mean entropy of a token's router probabilities, in nats.
        `bias`: Largest absolute selection bias, if there are any. Its weight makes their gradients the loads.
        """
        return {
            "balance": self.balance_weight,
            "z": self.z_weight,
            "max_load": 0.0,
            "dropped": 0.0,
            "entropy": 0.0,
        } | ({"bias": 1.0} if self.selection_bias else {})

    def problems(self, key: str) -> list[Problem]:
        bounds = {"experts": 1, "top_k": 1, "mlp": 1, "shared_experts": 0, "balance_weight": 0, "z_weight": 0}
        problems = [
            p for name, least in bounds.items() for p in check_range(f"{key}.{name}", vars(self)[name], least=least)
        ]
        problems += check_range(f"{key}.routed_scaling", self.routed_scaling, above=0)
        if self.experts >= 1:
            problems += self._group_problems(key)
            problems += check_range(f"{key}.top_k", self.top_k, most=1 if self.scale_inputs else self.experts)
        otherwise = "null for no limit"
        return problems + check_range(f"{key}.capacity_factor", self.capacity_factor, above=0, otherwise=otherwise)

    def sequence_problems(self, context: BlockContext, seq: int) -> list[Problem]:
        """Refuse a capacity of less than one token per expert and sequence, unless it has room for half of all rows."""
        least = min(_MIN_KEPT_SHARE, self.experts / (seq * self.top_k))
        if self.capacity_factor is None or self.capacity_factor >= least:
            return []
        key, rows = f"{context.key}.capacity_factor", self.capacity_factor * seq * self.top_k / self.experts
        nearest = math.ceil(1e4 * least) / 1e4 if least >= 1e-3 else least
        text = (
            f"{key}={self.capacity_factor:g} has room for {rows:.2g} tokens per expert and sequence of seq={seq}, so "
            f"nearly all tokens skip their experts. Use at least {nearest:g}, 1 or more to drop few, or "
            "null to drop none."
        )
        return [Problem(ProblemCode.out_of_range, key, self.capacity_factor, text, allowed=Range(least=least))]

    def _group_problems(self, key: str) -> list[Problem]:
        """Return the problems of the settings of groups, for at least one expert."""
        if self.groups < 1 or self.experts % self.groups:
            nearest = nearest_divisor(self.experts, self.groups)
            text = f"{key}.groups={self.groups} must divide {key}.experts={self.experts}. Use {key}.groups={nearest}."
            return [Problem(ProblemCode.not_divisible, f"{key}.groups", self.groups, text, nearest=(nearest,))]
        group_size = self.experts // self.groups
        problems = check_range(f"{key}.top_groups", self.top_groups, least=1, most=self.groups)
        if not problems and self.top_k > self.top_groups * group_size:
            fitting = -(-self.top_k // group_size)
            if fitting <= self.groups:
                text = (
                    f"{key}.top_groups={self.top_groups} contain {self.top_groups * group_size} experts, but "
                    f"{key}.top_k={self.top_k}. Use {key}.top_groups={fitting} or more."
                )
                problems.append(Problem(ProblemCode.conflict, f"{key}.top_groups", self.top_groups, text))
        if self.top_groups < self.groups and self.group_score is GroupScore.top_2 and group_size < 2:
            text = (
                f"{key}.group_score=top_2 needs two experts per group, but {key}.groups={self.groups} have one each. "
                f"Use {key}.group_score=max."
            )
            problems.append(Problem(ProblemCode.conflict, f"{key}.group_score", "top_2", text))
        return problems

    def sizes(self, context: BlockContext) -> dict[str, Size]:
        return {name: Size(getattr(self, name), f"{context.key}.{name}") for name in self.axes}

    @property
    def matrix_names(self) -> tuple[str, ...]:
        """Names of the matrices of an expert."""
        return ("up", "gate", "down") if self.kind.is_gated else ("up", "down")

    def weights(self, context: BlockContext) -> dict[str, Weight]:
        """Return the router (embed, experts), the experts' matrices (experts, embed, mlp), and the shared experts'.

        Shared experts have shape (embed, shared_experts, mlp). The router is never split over experts, because every
        device needs the scores of all of them.
        """
        weights, rows = {"router": weight("embed", self.experts, float32=True)}, self.rows_per_token
        if self.selection_bias:
            weights["selection_bias"] = weight(self.experts, group="balance", float32=True)
        if self.biases:
            weights["router_bias"] = weight(self.experts, group="vector", float32=True)
        for name in self.matrix_names:
            is_down = name == "down"
            weights[name] = weight("experts", "embed", "mlp", output_first=is_down, matrices_per_token=rows)
            if self.biases:
                weights[f"{name}_bias"] = weight("experts", "embed" if is_down else "mlp", group="vector")
            if self.shared_experts:
                weights[f"shared_{name}"] = weight("embed", self.shared_experts, "mlp", output_first=is_down)
        return weights

    def capacity(self, seq: int) -> int:
        """Return the maximum number of tokens per expert and sequence of `seq` tokens under `dispatch=dense`."""
        if self.capacity_factor is None:
            return seq
        return min(seq, math.ceil(self.capacity_factor * seq * self.top_k / self.experts))

    def flops(self, context: BlockContext, seq: int) -> float:
        """Return the FLOPs of the router and of the experts that a token uses, not of the dispatch."""
        expert = 2.0 * context.embed * self.mlp * len(self.matrix_names)
        return 2.0 * context.embed * self.experts + (self.top_k + self.shared_experts) * expert

    def dispatched_activations(self, context: BlockContext) -> list[SavedActivation]:
        """Return the tokens that devices gather under `sorted`, or the rows that all-to-alls send otherwise."""
        count = 1.0 if self.dispatch is Dispatch.sorted else self.rows_per_token
        return [SavedActivation(tensor((BATCH, SEQ, "embed"), self._sizes(context)), count)]

    @property
    def rows_per_token(self) -> float:
        """Rows of all experts, including empty slots of their buffers under `dense`, per token."""
        if self.dispatch is not Dispatch.dense:
            return float(self.top_k)
        factor = math.inf if self.capacity_factor is None else self.capacity_factor
        return float(min(self.experts, self.top_k * factor))

    @property
    def _gathered_rows(self) -> GatheredRows | None:
        if self.dispatch is Dispatch.dense:
            return None
        return GatheredRows(EXPERTS, self.experts / self.top_k, self.capacity_factor)

    def layout_notes(self, context: BlockContext, shard_count: Callable[[str], int]) -> list[str]:
        factor, rows = self.capacity_factor, self._gathered_rows
        key, remedy = f"{context.key}.capacity_factor", "null to drop none"
        if factor is not None and factor < _MIN_KEPT_SHARE:
            text = f"about {percent_text(1 - factor)} of the rows are dropped even if all experts get equally many"
            remedy = f"1 or more, or {remedy}"
        elif rows is not None and rows.is_limited(shard_count(InUse(EXPERTS))):
            text = f"rows beyond {factor:g} times the mean load of a device are dropped"
        else:
            return []
        return [f"{key}={factor:g}: {text}. Use {key}={remedy}"]

    def dispatch_work(self, context: BlockContext, seq: int) -> DispatchWork:
        if self.dispatch is not Dispatch.dense:
            is_exchanged = self.dispatch is Dispatch.exchanged
            return DispatchWork(
                self.top_k,
                self.top_k if is_exchanged else 0,
                gathered_rows=self._gathered_rows,
                sends_rows=is_exchanged,
            )
        return DispatchWork(mask_elements=self.experts * self.capacity(seq), sends_rows=True)

    def alternatives(self, context: BlockContext) -> list[Alternatives]:
        """Return the values of `dispatch` that drop the same assignments. `dense` is tried only if it is set."""
        is_dense = self.dispatch is Dispatch.dense
        if is_dense and self.capacity_factor is not None:
            return []
        values = dict.fromkeys((self.dispatch, Dispatch.sorted, Dispatch.exchanged))
        return [Alternatives(f"{context.key}.dispatch", tuple(values), None if is_dense else EXPERTS)]

    def saves(self, context: BlockContext) -> list[ActivationSpec]:
        """Return the activations that the backward pass needs, with one row per assignment of a token to an expert.

        Except under `dense`, a device has the rows of all devices that split its experts' axis, most of them unused
        (`GatheredRows`).
        The masks of `dense` are not included.
        """
        # TODO: the masks have experts * capacity elements per token, which depends on the sequence length.
        row = partial(saved, gathered_rows=self._gathered_rows)
        rows = self.rows_per_token
        products = ("up", "gate") if self.kind.is_gated else ("up",)
        activations = [row("mlp", name=name, count=rows, product=True) for name in products]
        activations += [
            row("embed", name="down", count=rows, product=True, result=True),
            row("mlp", count=3 * rows),
            row("embed", count=rows),
        ]
        for name in products if self.shared_experts else ():
            activations.append(saved(self.shared_experts, "mlp", name=f"shared_{name}", product=True))
        if self.shared_experts:
            activations.append(saved("embed", name="shared_down", product=True, result=True))
            activations.append(saved(self.shared_experts, "mlp", count=2))
        return [
            *activations,
            saved(self.experts, count=3, float32=True),
            saved("embed"),
            saved("embed", count=2, float32=True),
        ]
