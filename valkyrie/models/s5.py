"""The S5 block (arXiv 2208.04933): a diagonal state space between two projections, then a gate.

Letters are the paper's: H inputs (`embed`), P complex states (`state`), Lambda, B_tilde, C_tilde, D, Delta. Everything
up to the layer's output is kept in float32, as real pairs; only the output is cast to the compute dtype. The products
with B_bar and C have float32 operands and results on every backend, but under a bfloat16 policy a TPU's matrix unit
takes one pass: it rounds both operands to bfloat16 and adds in float32, as in every other product there. Discretisation
and recurrence are not products of that kind and stay float32. Under a float32 policy all products are float32 (six
passes). By the v4 compiler's estimates a layer's forward of 0.8 ms (16384 positions, H 1024, P 512) would take 1.25 ms
with three passes and 1.8 ms with six.
"""

# No `from __future__ import annotations` here: annotations of the module are checked in tests, and name local imports.

from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, Any

from valkyrie.axes import UNSHARDED, Axes, Shard, Size
from valkyrie.models.block import Block, BlockContext, Saved, SavedActivation, Weight, saved, weight
from valkyrie.ops.choices import STATES, CInit, Discretization, ScanImpl
from valkyrie.problems import Problem, ProblemCode, check_range

if TYPE_CHECKING:
    from jaxtyping import Array

    from valkyrie.ops.linear import Numerics


_B_AXES: Axes = ("state", "embed")
_C_AXES: Axes = ("embed", "state")


class Activation(Enum):
    """The gate after an S5 layer, by the S5 paper's names (lindermanlab/S5 `layers.py`)."""

    gelu = "gelu"
    half_glu1 = "half_glu1"
    half_glu2 = "half_glu2"
    full_glu = "full_glu"

    @property
    def products(self) -> int:
        """How many square matrices the gate has."""
        return {Activation.gelu: 0, Activation.full_glu: 2}.get(self, 1)


@dataclass
class S5(Block):
    """An S5 layer; letters and defaults as in the paper and its code."""

    state_size: int = 64
    blocks: int = 4
    conjugate_symmetric: bool = True
    discretization: Discretization = Discretization.zoh
    dt_min: float = 1e-3
    dt_max: float = 1e-1
    step_rescale: float = 1.0
    clip_eigenvalues: bool = True
    c_init: CInit = CInit.trunc_standard_normal
    activation: Activation = Activation.half_glu1
    bidirectional: bool = False
    scan: ScanImpl = ScanImpl.auto
    scan_block: int = 128

    axes = {
        "state": "complex states of an S5 layer",
        "mlp": "the hidden side of a feed-forward or gating product",
    }
    activations = (("batch", "seq", "state"),)
    norm_group = "ssm"

    @property
    def states(self) -> int:
        """P, the complex states kept: half of `state_size` under conjugate symmetry."""
        return self.state_size // 2 if self.conjugate_symmetric else self.state_size

    @property
    def is_causal(self) -> bool:
        """Whether it scans forwards alone."""
        return not self.bidirectional

    def problems(self, key: str) -> list[Problem]:
        problems = []
        per_block, pairs = self.state_size // max(self.blocks, 1), 2 * max(self.blocks, 1)
        uneven = self.blocks < 1 or self.state_size < 1 or self.state_size % self.blocks
        if uneven or (self.conjugate_symmetric and per_block % 2):
            nearest = max(1, (2 * self.state_size + pairs) // (2 * pairs)) * pairs
            text = (
                f"{key}.state_size={self.state_size} does not split into {key}.blocks={self.blocks} blocks"
                f"{' of an even size (conjugate pairs)' if self.conjugate_symmetric else ''}. "
                f"Nearest: state_size={nearest}."
            )
            problems.append(Problem(ProblemCode.conflict, f"{key}.state_size", self.state_size, text))
        if not 0 < self.dt_min <= self.dt_max:
            text = f"{key} needs 0 < dt_min <= dt_max; got dt_min={self.dt_min}, dt_max={self.dt_max}."
            problems.append(Problem(ProblemCode.conflict, f"{key}.dt_min", self.dt_min, text))
        problems += check_range(f"{key}.step_rescale", self.step_rescale, above=0)
        return problems + check_range(f"{key}.scan_block", self.scan_block, least=1)

    def sizes(self, site: BlockContext) -> dict[str, Size]:
        return {"state": Size(self.states, f"{site.key}.state_size"), "mlp": Size(site.embed, "model.embed")}

    def weights(self, site: BlockContext) -> dict[str, Weight]:
        """Return the state space, all of it in float32, and the matrices of the gate."""
        own = {"B": weight("state", "embed", 2, group="ssm", float32=True, output_first=True)}
        for name in ("C", "C_reverse")[: 1 + self.bidirectional]:
            own[name] = weight("embed", "state", 2, float32=True, output_first=True)
        for name in ("gate", "out")[: self.activation.products]:
            own[name] = weight("embed", "mlp")
        for name in ("Lambda_re", "Lambda_im", "log_step"):
            own[name] = weight("state", group="ssm", float32=True)
        return own | {"D": weight("embed", float32=True)}

    def flops(self, site: BlockContext, seq: int) -> float:
        """Return forward FLOPs per token: the products with B and C, 8 a state for each scan, and the gate's."""
        directions = 1 + self.bidirectional
        projections = 4 * self.states * site.embed * (1 + directions)
        return float(projections + 8 * self.states * directions + 2 * self.activation.products * site.embed**2)

    def saves(self, site: BlockContext) -> list[Saved]:
        """Return the driven states and those of each scan, the products that read them, and the gate's factors."""
        directions, products = 1 + self.bidirectional, self.activation.products
        return [
            saved("state", name="driven", count=2, float32=True, product=True, needed_for=STATES),
            saved("state", name=STATES, count=2 * directions, float32=True),
            saved("embed", count=2 * directions, float32=True, product=True),
            saved("embed", name="read"),
            *(saved("embed", name=name, product=True) for name in ("s5_gate", "s5_out")[:products]),
            saved("embed", count=2, float32=True),
            saved("embed", count=2),
        ]

    def neighbours(self, site: BlockContext) -> list[tuple[SavedActivation, int | None]]:
        return [(kept, 1) for kept in self.kept(site) if kept.name == STATES]

    def build(self, site: BlockContext, *, numerics: "Numerics", key: "Array") -> Any:
        return s5_layer()(self, site, numerics=numerics, key=key)


@cache
def s5_layer() -> Any:
    """Return the class of the module. It is made here, so that declarations are imported without JAX."""
    import jax
    import jax.numpy as jnp
    from flax import nnx
    from jax.ad_checkpoint import checkpoint_name
    from jaxtyping import Array, Float

    from valkyrie.models.layers import Boundaries, normal, parameter, project
    from valkyrie.ops.linear import FLOAT32, Numerics, linear
    from valkyrie.ops.scan import is_checkable, linear_recurrence, recurrence_step, sharded_linear_recurrence
    from valkyrie.ops.scan_complex import Carry, Eigenvalues, States, mul
    from valkyrie.ops.ssm import block_hippo, discretize, init_B_tilde, init_C_tilde, init_D, init_Lambda, init_log_step

    class S5Layer(nnx.Module):
        """y = 2 Re(C x) + D u over x_t = Lambda_bar x_{t-1} + B_bar u_t, then a gated activation.

        Without conjugate symmetry the factor 2 goes; a bidirectional layer scans both ways and has a C for each.
        """

        def __init__(self, block: S5, site: BlockContext, *, numerics: Numerics, key: Array) -> None:
            keys, embed, specs = jax.random.split(key, 7), site.embed, block.parameters(site)
            hippo = block_hippo(block.state_size, block.blocks, block.conjugate_symmetric)
            re, im = init_Lambda(hippo)
            self.config, self.numerics = block, numerics
            self.Lambda_re = parameter(specs["Lambda_re"], re, numerics)
            self.Lambda_im = parameter(specs["Lambda_im"], im, numerics)
            log_step = init_log_step(keys[0], hippo.state, block.dt_min, block.dt_max)
            self.log_step = parameter(specs["log_step"], log_step, numerics)
            self.B = parameter(specs["B"], init_B_tilde(keys[1], hippo, embed), numerics)
            self.C = parameter(specs["C"], init_C_tilde(keys[2], hippo, embed, block.c_init), numerics)
            if block.bidirectional:
                C_reverse = init_C_tilde(keys[3], hippo, embed, block.c_init)
                self.C_reverse = parameter(specs["C_reverse"], C_reverse, numerics)
            self.D = parameter(specs["D"], init_D(keys[4], embed), numerics)
            if block.activation is Activation.full_glu:
                self.out = parameter(specs["out"], normal(keys[5], (embed, embed), embed**-0.5), numerics)
            if block.activation is not Activation.gelu:
                self.gate = parameter(specs["gate"], normal(keys[6], (embed, embed), embed**-0.5), numerics)

        def __call__(
            self, x: Float[Array, "batch seq embed"], boundaries: Boundaries, shard: Shard
        ) -> Float[Array, "batch seq embed"]:
            """Return the layer's output before the residual sum, in the compute dtype.

            The state begins anew where `boundaries.keep` is 0.
            """
            wide, keep = x.astype(jnp.float32), boundaries.keep
            lam_bar, bu = self._driven(wide, shard)
            y = self._read(self.C[...], self._scan(lam_bar, bu, keep, shard, reverse=False), shard)
            if self.config.bidirectional:
                ends = None if keep is None else jnp.concatenate([keep[:, 1:], jnp.ones_like(keep[:, :1])], axis=1)
                y = y + self._read(self.C_reverse[...], self._scan(lam_bar, bu, ends, shard, reverse=True), shard)
            y = shard(y + self.D[...] * wide, "batch", "seq", "embed")
            return self._gated(checkpoint_name(y.astype(self.numerics.compute), "read"), shard)

        def init_state(self, batch: int, max_len: int) -> Carry:
            """Return the state before the first position: zeros, however long the sequence."""
            zeros = jnp.zeros((batch, self.config.states), jnp.float32)
            return zeros, zeros

        def step(self, x: Float[Array, "batch embed"], state: Carry) -> tuple[Float[Array, "batch embed"], Carry]:
            """Return the output of one more position and the state after it: the streaming form."""
            wide, shard = x.astype(jnp.float32)[:, None], UNSHARDED
            lam_bar, bu = self._driven(wide, shard)
            state = recurrence_step(lam_bar, state, (bu[0][:, 0], bu[1][:, 0]))
            y = self._read(self.C[...], (state[0][:, None], state[1][:, None]), shard) + self.D[...] * wide
            return self._gated(y.astype(self.numerics.compute), shard)[:, 0], state

        def _driven(self, u: Float[Array, "batch seq embed"], shard: Shard) -> tuple[Eigenvalues, States]:
            """Return Lambda_bar and B_bar u."""
            c, B, u = self.config, self.B[...], _apart(u)
            # B_bar, a parameter's size, is formed before the product: scaling B_tilde u instead would read and write
            # arrays of (batch, seq, state) again, forward and backward.
            lam_bar, scale = discretize(
                self.Lambda_re[...],
                self.Lambda_im[...],
                self.log_step[...],
                c.discretization,
                step_rescale=c.step_rescale,
                clip_eigs=c.clip_eigenvalues,
            )
            B_bar = mul((scale[0][:, None], scale[1][:, None]), (B[..., 0], B[..., 1]))
            with jax.named_scope("driven"):
                re, im = (linear("bse,pe->bsp", u, part, axes=_B_AXES, shard=shard, numerics=FLOAT32) for part in B_bar)
            return lam_bar, (checkpoint_name(re, "driven"), checkpoint_name(im, "driven"))

        def _scan(
            self,
            lam_bar: Eigenvalues,
            bu: States,
            keep: Float[Array, "batch seq"] | None,
            shard: Shard,
            *,
            reverse: bool,
        ) -> States:
            c, axis_names = self.config, shard.mesh_axes_of("seq")

            def local(lam_bar: Eigenvalues, bu: States, keep: Array | None) -> list[Array]:
                chosen = {
                    "keep": keep,
                    "reverse": reverse,
                    "impl": c.scan,
                    "block": c.scan_block,
                    "backend": shard.backend,
                }
                if axis_names:
                    return list(sharded_linear_recurrence(lam_bar, bu, axis_names=axis_names, **chosen))
                return list(linear_recurrence(lam_bar, bu, **chosen))

            states: Axes = ("batch", "seq", "state")
            of_keep = None if keep is None else ("batch", "seq")
            checked = is_checkable(c.scan, shard.backend)
            run = shard.map(local, [("state",), states, of_keep], [states, states], checked=checked)
            with jax.named_scope(STATES):
                re, im = run(lam_bar, bu, keep)
            return re, im

        def _read(self, C: Array, x: States, shard: Shard) -> Float[Array, "batch seq embed"]:
            # A sum, not a difference: where `state` is split, a compiler may then add first and reduce over devices
            # once.
            signed = C[..., 0], -C[..., 1]
            with jax.named_scope("read"):
                re, im = (
                    linear("bsp,ep->bse", x[i], signed[i], axes=_C_AXES, shard=shard, numerics=FLOAT32) for i in (0, 1)
                )
            return (2 if self.config.conjugate_symmetric else 1) * (re + im)

        def _gated(self, y: Float[Array, "batch seq embed"], shard: Shard) -> Float[Array, "batch seq embed"]:
            kind = self.config.activation
            if kind is Activation.gelu:
                return jax.nn.gelu(y)

            def dense(x: Array, w: nnx.Param, name: str) -> Array:
                return project("bse,em->bsm", x, w, shard=shard, numerics=self.numerics, name=name)

            active = jax.nn.gelu(y)
            # Gathered once: without its place, a compiler gathers a product with it here and a sum of gradients later.
            gate = shard(jax.nn.sigmoid(dense(active, self.gate, "s5_gate")), "batch", "seq", "embed")
            if kind is Activation.full_glu:
                return dense(active, self.out, "s5_out") * gate
            return (active if kind is Activation.half_glu1 else y) * gate

    @jax.custom_vjp
    def _apart(u: Float[Array, "batch seq embed"]) -> Float[Array, "batch seq embed"]:
        """Return `u`; the gradients of its uses are added to each other before any other use of the argument's.

        Both parts of B u need a sum over devices where `state` is split: side by side, a compiler makes one of them.
        """
        return u

    _apart.defvjp(lambda u: (u, None), lambda _, g: (g,))

    return S5Layer
