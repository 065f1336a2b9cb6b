"""The Flax module of the mixture-of-experts block (`valkyrie.models.moe`)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from valkyrie.axes import BATCH, EXPERTS, SEQ, InUse, Shard
from valkyrie.models.block import BlockContext
from valkyrie.models.feed_forward_layer import activate
from valkyrie.models.layers import AuxiliaryValues, Boundaries, add_bias, normal, parameter, project
from valkyrie.models.moe import Dispatch, LoadSpan, MoE
from valkyrie.ops.capacity import is_limited
from valkyrie.ops.exchange import combine_exchanged, dispatch_exchanged, plan_exchange, weigh_exchanged
from valkyrie.ops.experts import (
    add_grouped_bias,
    combine_dense,
    combine_sorted,
    dispatch_dense,
    dispatch_mask,
    dispatch_sorted,
    grouped_linear,
    scale_rows,
    sort_assignments,
    token_expert_axes,
    weigh_dense,
    weigh_sorted,
)
from valkyrie.ops.limited import combine_limited, dispatch_limited, plan_limited, weigh_limited
from valkyrie.ops.linear import FLOAT32, Numerics, gather_in_float32
from valkyrie.ops.routing import Routing, route


class MoELayer(nnx.Module):
    """A mixture of experts. Matrices are initialised like those of a dense feed-forward (`FeedForwardLayer`)."""

    router: nnx.Param
    router_bias: nnx.Param
    selection_bias: nnx.Param

    def __init__(self, block: MoE, context: BlockContext, *, numerics: Numerics, key: Array) -> None:
        self.block, self.numerics = block, numerics
        specs = block.parameters(context)
        down_deviation = 1 / math.sqrt(2 * context.layers * block.mlp)
        for (name, spec), weight_key in zip(specs.items(), jax.random.split(key, len(specs)), strict=True):
            deviation = down_deviation if name.endswith("down") else context.embed**-0.5
            value = normal(weight_key, spec.shape, deviation if spec.group == "matrix" else 0.0)
            setattr(self, name, parameter(spec, value, numerics))

    def __call__(
        self, x: Float[Array, "batch seq embed"], boundaries: Boundaries, shard: Shard
    ) -> tuple[Float[Array, "batch seq embed"], AuxiliaryValues]:
        """Return the weighted sum of the experts' outputs, and the values that `MoE.auxiliary` declares."""
        block = self.block
        with jax.named_scope("router"):
            logits = project("bse,en->bsn", x, self.router, shard=shard, numerics=FLOAT32)
            logits = shard(add_bias(logits, self.router_bias, shard) if block.biases else logits, "batch", "seq", None)
            routing = route(
                logits,
                self.selection_bias[...] if block.selection_bias else None,
                top_k=block.top_k,
                router=block.router,
                normalize=block.normalize,
                scaling=block.routed_scaling,
                groups=block.groups,
                top_groups=block.top_groups,
                group_score=block.group_score,
            )
        inputs = scale_rows(x, routing.weights[..., 0]) if block.scale_inputs else x
        y, dropped = self._apply_experts(inputs, routing, shard)
        if block.shared_experts:
            hidden = self._hidden("bse,enm->bsnm", x, "shared_", shard)
            hidden = shard(hidden, "batch", "seq", None, "mlp")
            y = y + self._project("bsnm,enm->bse", hidden, "shared_down", shard)
        return y, self._auxiliary(logits, routing, dropped)

    def _apply_experts(
        self, x: Float[Array, "batch seq embed"], routing: Routing, shard: Shard
    ) -> tuple[Float[Array, "batch seq embed"], Float[Array, " batch"]]:
        """Return the weighted sum of the outputs of each token's experts, and the share of dropped assignments."""
        if self.block.dispatch is not Dispatch.dense:
            return self._apply_sorted(x, routing, shard)
        mask = dispatch_mask(routing.one_hot, self.block.capacity(x.shape[1]))
        # The first constraint keeps the tokens on their devices, the second one is an all-to-all. With only the second,
        # XLA may gather the tokens of all devices instead.
        rows = shard(dispatch_dense(x, mask), None, "batch", None, "embed")
        rows = shard(rows, "experts", "batch", None, "embed")
        hidden = self._hidden("nbce,nem->nbcm", rows, "", shard)
        weights = None
        if not self.block.scale_inputs:
            weights = shard(weigh_dense(routing.weights, mask), "experts", "batch", None)
            hidden = scale_rows(hidden, weights)
        hidden = shard(hidden, "experts", "batch", None, "mlp")
        outputs = self._project("nbcm,nem->nbce", hidden, "down", shard, weights)
        outputs = shard(outputs, "experts", "batch", None, "embed")
        outputs = shard(outputs, None, "batch", None, "embed")
        y = combine_dense(outputs, mask)
        kept = jnp.sum(mask, axis=(1, 2, 3, 4), dtype=jnp.float32)
        return y, 1 - kept / (x.shape[1] * self.block.top_k)

    def _apply_sorted(
        self, x: Float[Array, "batch seq embed"], routing: Routing, shard: Shard
    ) -> tuple[Float[Array, "batch seq embed"], Float[Array, " batch"]]:
        embed, top_k = InUse("embed"), self.block.top_k
        rows, kept, (dispatch, weigh, combine) = self._plan_rows(routing, shard)
        inputs = dispatch(x.astype(self.numerics.compute), rows, top_k, embed, shard)
        # All devices together use one row per assignment that is not dropped.
        routed_share = min(routing.experts.size / inputs.shape[0], 1.0)

        def multiply(
            x: Float[Array, "rows inputs"], name: str, weights: Float[Array, " rows"] | None = None
        ) -> Float[Array, "rows outputs"]:
            w, is_down = getattr(self, name), name == "down"
            axes = w.get_metadata()["logical_axes"]
            settings: dict[str, Any] = {"shard": shard, "numerics": self.numerics, "routed_share": routed_share}
            with jax.named_scope(name):
                product = grouped_linear(x, w[...], rows.group_sizes, axes=axes, output_first=is_down, **settings)
                product = checkpoint_name(product, name)
                if not self.block.biases:
                    return product
                bias = getattr(self, f"{name}_bias")
                axes = bias.get_metadata()["logical_axes"]
                return add_grouped_bias(product, bias[...], rows.group_sizes, axes=axes, shard=shard, weights=weights)

        hidden = activate(self.block.kind, *(multiply(inputs, name) for name in self.block.matrix_names[:-1]))
        # Weights scale the inputs of `down`, not its outputs, which the backward pass would need for their gradients.
        weights = None if self.block.scale_inputs else weigh(routing.weights, rows, shard)
        scaled = hidden if weights is None else scale_rows(hidden, weights)
        y = combine(multiply(scaled, "down", weights), rows, routing.experts, embed, shard)
        dropped = jnp.zeros(x.shape[0]) if kept is None else 1 - kept / (x.shape[1] * top_k)
        return y, dropped

    def _plan_rows(
        self, routing: Routing, shard: Shard
    ) -> tuple[Any, Float[Array, " batch"] | None, tuple[Callable[..., Array], ...]]:
        """Return the rows of the experts, the kept assignments of each sequence, and functions of the rows.

        The second result is None if no assignment can be dropped. The functions return the tokens of the rows, their
        router weights, and the sum of the rows of each token.
        """
        block, chosen = self.block, (routing.experts, self.block.experts)
        if block.dispatch is Dispatch.exchanged and token_expert_axes(shard):
            functions = dispatch_exchanged, weigh_exchanged, combine_exchanged
            return *plan_exchange(*chosen, block.capacity_factor, shard), functions
        if is_limited(block.top_k, block.experts, shard.shard_count(InUse(EXPERTS)), block.capacity_factor):
            functions = dispatch_limited, weigh_limited, combine_limited
            return *plan_limited(*chosen, block.capacity_factor, shard), functions
        return sort_assignments(*chosen, shard), None, (dispatch_sorted, weigh_sorted, combine_sorted)

    def _hidden(self, equation: str, x: Float[Array, "..."], prefix: str, shard: Shard) -> Float[Array, "..."]:
        """Return the hidden activations of experts: products with `up` and `gate`, and the nonlinearity."""
        names = self.block.matrix_names[:-1]
        return activate(self.block.kind, *(self._project(equation, x, prefix + name, shard) for name in names))

    def _project(
        self,
        equation: str,
        x: Float[Array, "..."],
        name: str,
        shard: Shard,
        bias_weights: Float[Array, "experts batch capacity"] | None = None,
    ) -> Float[Array, "..."]:
        rows = (BATCH, SEQ) if name.startswith("shared_") else (EXPERTS, BATCH)
        weights = getattr(self, name)
        product = project(equation, x, weights, shard=shard, numerics=self.numerics, name=name, row_axes=rows)
        if not self.block.biases or name.startswith("shared_"):
            return product
        bias = getattr(self, f"{name}_bias")
        bias_f32 = gather_in_float32(bias[...], bias.get_metadata()["logical_axes"], shard)[:, None, None]
        scaled = bias_f32 if bias_weights is None else bias_f32 * bias_weights[..., None]
        return (product.astype(jnp.float32) + scaled).astype(product.dtype)

    def _auxiliary(
        self, logits: Float[Array, "batch seq experts"], routing: Routing, dropped: Float[Array, " batch"]
    ) -> AuxiliaryValues:
        block = self.block
        loads = block.experts * jnp.mean(routing.one_hot, axis=(1, 2), dtype=jnp.float32)
        balanced_loads = jnp.mean(loads, axis=0) if block.balance_over is LoadSpan.batch else loads
        logs = jnp.log(jnp.maximum(routing.probabilities, jnp.finfo(jnp.float32).tiny))
        values = {
            "balance": jnp.sum(balanced_loads * jnp.mean(routing.probabilities, axis=1), axis=-1),
            "z": jnp.mean(jnp.square(jax.nn.logsumexp(logits, axis=-1)), axis=-1),
            "max_load": jnp.max(loads, axis=-1),
            "dropped": dropped,
            "entropy": -jnp.mean(jnp.sum(routing.probabilities * logs, axis=-1), axis=-1),
        }
        return values | ({"bias": _with_load_gradient(self.selection_bias[...], loads)} if block.selection_bias else {})


_LOAD_GRADIENT_SCALE = 2.0**-20
"""Factor of the gradients of selection biases. Only their signs matter, and they should not add to the global norm."""


def _with_load_gradient(bias: Float[Array, " experts"], loads: Float[Array, "batch experts"]) -> Float[Array, " batch"]:
    """Return the largest absolute bias, whose gradient is the load of each expert minus the mean load, scaled down.

    As gradients, loads are summed over microbatches and devices under every partition and schedule.
    """
    excess = _LOAD_GRADIENT_SCALE * jnp.sum(bias * (loads - 1), axis=-1)
    return jax.lax.stop_gradient(jnp.max(jnp.abs(bias)) - excess) + excess
