"""The mixture-of-experts feed-forward: a router sends each token to a few of many small feed-forwards."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from functools import partial

from valkyrie.axes import BATCH, EXPERTS, SEQ, Size
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
from valkyrie.problems import Problem, check_range


class RouterScores(Enum):
    """Function from a token's router logits to its scores: softmax over all experts, or a sigmoid of each logit."""

    softmax = "softmax"
    sigmoid = "sigmoid"


class Dispatch(Enum):
    """How tokens reach their experts.

    `dense`: Products with one-hot masks copy the tokens of a sequence into a buffer of equal capacity per expert
    (GShard, arXiv 2006.16668). Tokens beyond the capacity skip the experts.

    `sorted`: Devices sort their tokens by expert, and multiply each group by the matrices of its expert (MegaBlocks,
    arXiv 2211.15841). No token skips an expert. If experts and tokens are split over the same mesh axis, devices gather
    the tokens of all devices along it and apply their own experts, and the results are reduce-scattered.
    """

    dense = "dense"
    sorted = "sorted"


@dataclass
class MoE(Block):
    """Mixture of experts (arXiv 1701.06538), each a feed-forward with `mlp` hidden channels.

    The router computes scores in float32. Every token uses the `top_k` experts with the highest scores, and sums their
    outputs, weighted by the scores.

    Args:
        experts: Number of experts.
        top_k: Number of experts per token.
        mlp: Hidden channels of each expert.
        shared_experts: Number of additional experts that every token uses, with weight 1 (DeepSeekMoE, arXiv
            2401.06066).
        kind: Nonlinearity of the experts.
        router: Function from router logits to scores.
        normalize: Divide the scores of the chosen experts by their sum. With softmax, this is a softmax over the chosen
            logits (Mixtral, arXiv 2401.04088).
        dispatch: How tokens reach their experts.
        capacity_factor: Capacity of an expert under `dispatch=dense`, relative to its share of the tokens of a sequence
            if all experts get equally many; null: capacity for all tokens.
        balance_weight: Weight of the load-balancing loss (Switch Transformer, arXiv 2101.03961) of each sequence.
        z_weight: Weight of the squared log-sum-exp of the router logits (ST-MoE, arXiv 2202.08906).
    """

    experts: int = 8
    top_k: int = 2
    mlp: int = 512
    shared_experts: int = 0
    kind: Nonlinearity = Nonlinearity.swiglu
    router: RouterScores = RouterScores.softmax
    normalize: bool = False
    dispatch: Dispatch = Dispatch.sorted
    capacity_factor: float | None = 1.25
    balance_weight: float = 0.01
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
        `dropped`: Share of assignments beyond the capacity.
        `entropy`: Mean entropy of a token's router probabilities, in nats.
        """
        return {
            "balance": self.balance_weight,
            "z": self.z_weight,
            "max_load": 0.0,
            "dropped": 0.0,
            "entropy": 0.0,
        }

    def problems(self, key: str) -> list[Problem]:
        bounds = {"experts": 1, "top_k": 1, "mlp": 1, "shared_experts": 0, "balance_weight": 0, "z_weight": 0}
        problems = [
            p for name, least in bounds.items() for p in check_range(f"{key}.{name}", vars(self)[name], least=least)
        ]
        if self.experts >= 1:
            problems += check_range(f"{key}.top_k", self.top_k, most=self.experts)
        otherwise = "null for no limit"
        return problems + check_range(f"{key}.capacity_factor", self.capacity_factor, above=0, otherwise=otherwise)

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
        for name in self.matrix_names:
            is_down = name == "down"
            weights[name] = weight("experts", "embed", "mlp", output_first=is_down, matrices_per_token=rows)
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
        """Return the tokens that devices gather under `sorted`.

        An all-to-all of the buffers of `dense` takes about a quarter of the time to gather them, on a ring of devices.
        """
        count = 1.0 if self.dispatch is Dispatch.sorted else self.rows_per_token / 4
        return [SavedActivation(tensor((BATCH, SEQ, "embed"), self._sizes(context)), count)]

    @property
    def rows_per_token(self) -> float:
        """Rows of all experts, including empty slots of their buffers under `dense`, per token."""
        if self.dispatch is Dispatch.sorted:
            return float(self.top_k)
        factor = math.inf if self.capacity_factor is None else self.capacity_factor
        return float(min(self.experts, self.top_k * factor))

    def dispatch_work(self, context: BlockContext, seq: int) -> DispatchWork:
        if self.dispatch is Dispatch.sorted:
            return DispatchWork(rows=self.top_k)
        return DispatchWork(mask_elements=self.experts * self.capacity(seq))

    def saves(self, context: BlockContext) -> list[ActivationSpec]:
        """Return the activations that the backward pass needs, with one row per assignment of a token to an expert.

        Under `sorted`, a device has the rows of all devices that split its experts' axis, most of them unused. The
        masks of `dense` are not included.
        """
        # TODO: the masks have experts * capacity elements per token, which depends on the sequence length.
        is_sorted = self.dispatch is Dispatch.sorted
        row = partial(saved, gathered_along=EXPERTS if is_sorted else None)
        rows = self.rows_per_token
        products = ("up", "gate") if self.kind.is_gated else ("up",)
        activations = [row("mlp", name=name, count=rows, product=True) for name in products]
        activations += [
            row("embed", name="down", count=rows, product=True),
            row("mlp", count=2 * rows),
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
