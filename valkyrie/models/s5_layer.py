"""The Flax module of the S5 block (`valkyrie.models.s5`)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from valkyrie.axes import UNSHARDED, Axes, Shard
from valkyrie.models.block import BlockContext
from valkyrie.models.layers import Boundaries, normal, parameter, project
from valkyrie.models.s5 import S5, Activation
from valkyrie.ops.choices import SCAN_STATES
from valkyrie.ops.linear import FLOAT32, Numerics, linear
from valkyrie.ops.scan import linear_recurrence, recurrence_step, sharded_linear_recurrence, supports_vma_check
from valkyrie.ops.scan_complex import Carry, Eigenvalues, States, mul
from valkyrie.ops.ssm import block_hippo, discretize, init_B_tilde, init_C_tilde, init_D, init_Lambda, init_log_step

_B_AXES: Axes = ("state", "embed")

_C_AXES: Axes = ("embed", "state")


class S5Layer(nnx.Module):
    """The S5 layer: y_t = 2 Re(C x_t) + D u_t with x_t = Lambda_bar x_{t-1} + B_bar u_t, followed by the activation.

    Without conjugate symmetry there is no factor 2. A bidirectional layer scans in both directions, with a C for each.
    """

    def __init__(self, block: S5, context: BlockContext, *, numerics: Numerics, key: Array) -> None:
        keys, embed, specs = jax.random.split(key, 7), context.embed, block.parameters(context)
        hippo = block_hippo(block.state_size, block.blocks, block.conjugate_symmetric)
        re, im = init_Lambda(hippo)
        self.config, self.numerics = block, numerics
        self.Lambda_re = parameter(specs["Lambda_re"], re, numerics)
        self.Lambda_im = parameter(specs["Lambda_im"], im, numerics)
        log_step = init_log_step(keys[0], hippo.state_count, block.dt_min, block.dt_max)
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
        """Return the output of the layer before the residual sum, in the compute dtype.

        The state is reset where `boundaries.keep` is 0.
        """
        u, keep = x.astype(jnp.float32), boundaries.keep
        lam_bar, bu = self._discretize_inputs(u, shard)
        y = self._read_output(self.C[...], self._scan(lam_bar, bu, keep, shard, reverse=False), shard)
        if self.config.bidirectional:
            keep_next = None if keep is None else jnp.concatenate([keep[:, 1:], jnp.ones_like(keep[:, :1])], axis=1)
            y = y + self._read_output(
                self.C_reverse[...], self._scan(lam_bar, bu, keep_next, shard, reverse=True), shard
            )
        y = shard(y + self.D[...] * u, "batch", "seq", "embed")
        return self._gate(checkpoint_name(y.astype(self.numerics.compute), "read"), shard)

    def init_state(self, batch: int, max_len: int) -> Carry:
        """Return the state before the first position: zeros, as real and imaginary parts. `max_len` is not used."""
        zeros = jnp.zeros((batch, self.config.state_count), jnp.float32)
        return zeros, zeros

    def step(self, x: Float[Array, "batch embed"], state: Carry) -> tuple[Float[Array, "batch embed"], Carry]:
        """Process one position of each sequence. Returns the output for input `x` and the new state."""
        u, shard = x.astype(jnp.float32)[:, None], UNSHARDED
        lam_bar, bu = self._discretize_inputs(u, shard)
        state = recurrence_step(lam_bar, state, (bu[0][:, 0], bu[1][:, 0]))
        y = self._read_output(self.C[...], (state[0][:, None], state[1][:, None]), shard) + self.D[...] * u
        return self._gate(y.astype(self.numerics.compute), shard)[:, 0], state

    def _discretize_inputs(self, u: Float[Array, "batch seq embed"], shard: Shard) -> tuple[Eigenvalues, States]:
        """Return Lambda_bar and the inputs B_bar u of the recurrence, each as a pair of real and imaginary parts."""
        c, B, u = self.config, self.B[...], _sum_gradients_first(u)
        # B_bar, which is as small as a parameter, is computed before the product. Scaling B_tilde u instead would read
        # and write arrays of shape (batch, seq, state) once more, forward and backward.
        lam_bar, scale = discretize(
            self.Lambda_re[...],
            self.Lambda_im[...],
            self.log_step[...],
            c.discretization,
            step_rescale=c.step_rescale,
            clip_eigenvalues=c.clip_eigenvalues,
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
        c, axis_names = self.config, shard.activation_mesh_axes("seq")

        def scan_shard(lam_bar: Eigenvalues, bu: States, keep: Array | None) -> list[Array]:
            options = {
                "keep": keep,
                "reverse": reverse,
                "impl": c.scan,
                "block": c.scan_block,
                "backend": shard.backend,
            }
            if axis_names:
                return list(sharded_linear_recurrence(lam_bar, bu, axis_names=axis_names, **options))
            return list(linear_recurrence(lam_bar, bu, **options))

        state_axes: Axes = ("batch", "seq", "state")
        keep_axes = None if keep is None else ("batch", "seq")
        check_vma = supports_vma_check(c.scan, shard.backend)
        run = shard.map(scan_shard, [("state",), state_axes, keep_axes], [state_axes, state_axes], check_vma=check_vma)
        with jax.named_scope(SCAN_STATES):
            re, im = run(lam_bar, bu, keep)
        return re, im

    def _read_output(self, C: Array, x: States, shard: Shard) -> Float[Array, "batch seq embed"]:
        # A sum, not a difference: if `state` is sharded, the compiler can then add first and reduce over devices once.
        signed = C[..., 0], -C[..., 1]
        with jax.named_scope("read"):
            re, im = (
                linear("bsp,ep->bse", x[i], signed[i], axes=_C_AXES, shard=shard, numerics=FLOAT32) for i in (0, 1)
            )
        return (2 if self.config.conjugate_symmetric else 1) * (re + im)

    def _gate(self, y: Float[Array, "batch seq embed"], shard: Shard) -> Float[Array, "batch seq embed"]:
        kind = self.config.activation
        if kind is Activation.gelu:
            return jax.nn.gelu(y)

        def dense(x: Array, w: nnx.Param, name: str) -> Array:
            return project("bse,em->bsm", x, w, shard=shard, numerics=self.numerics, name=name)

        gelu_y = jax.nn.gelu(y)
        # The constraint makes the compiler gather the gate once. Without it, the compiler gathers a product with the
        # gate here and a sum of gradients later.
        gate = shard(jax.nn.sigmoid(dense(gelu_y, self.gate, "s5_gate")), "batch", "seq", "embed")
        if kind is Activation.full_glu:
            return dense(gelu_y, self.out, "s5_out") * gate
        return (gelu_y if kind is Activation.half_glu1 else y) * gate


@jax.custom_vjp
def _sum_gradients_first(u: Float[Array, "batch seq embed"]) -> Float[Array, "batch seq embed"]:
    """Identity that sums the gradients of all uses of its result before adding those of other uses of `u`.

    If `state` is sharded, the gradients through the real and imaginary parts of B u must be summed over devices. When
    these two gradients are added to each other first, the compiler needs only one all-reduce.
    """
    return u


_sum_gradients_first.defvjp(lambda u: (u, None), lambda _, g: (g,))
