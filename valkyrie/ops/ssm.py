"""Initialisation and discretisation of an S5 state space (arXiv 2208.04933, sections 3 and 4).

The mathematics follows lindermanlab/S5: HiPPO-N by blocks in float64 on the host, B and C drawn in the coordinates of
HiPPO and rotated into those of its eigenvectors, and everything after that in float32 as real pairs. Symbols follow the
paper: H inputs (`embed`), P stored complex states (`state`), Lambda, B_tilde, C_tilde, D, Delta.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Complex128, Float, Float32

from valkyrie.ops.choices import CInit, Discretization
from valkyrie.ops.scan_complex import Eigenvalues, add, div, mul, scaled

LAMBDA_RE_MAX = -1e-4
"""Maximum real part of clipped eigenvalues, per unit of time."""

_SERIES_RADIUS = 0.25
"""Below this |Lambda Delta|, the zero-order hold is computed as a series of _SERIES_TERMS terms."""

_SERIES_TERMS = 9


@dataclass(frozen=True, eq=False)
class BlockHippo:
    """The initial state matrix of a layer: `blocks` equal HiPPO-N blocks, diagonalised.

    `Lambda` lists the stored eigenvalues of all blocks. `V` holds the eigenvectors of one block as columns and `Vinv`
    is its conjugate transpose; the block-diagonal matrices of the whole layer are never formed. With conjugate
    symmetry only half of each block is stored (the eigenvalues with negative imaginary part), and `V` is rectangular.
    """

    Lambda: Complex128[np.ndarray, " state"]
    V: Complex128[np.ndarray, "block kept"]
    Vinv: Complex128[np.ndarray, "kept block"]
    blocks: int

    @property
    def state(self) -> int:
        """Number of complex states that the layer stores (the paper's P)."""
        return len(self.Lambda)

    @property
    def state_size(self) -> int:
        """Order of the real system before diagonalisation; 2 P with conjugate symmetry."""
        return self.blocks * self.V.shape[0]


@lru_cache(maxsize=16)
def hippo_n(n: int) -> tuple[Complex128[np.ndarray, " block"], Complex128[np.ndarray, "block block"]]:
    """Return the eigenvalues and eigenvectors (as columns) of the normal part of the n x n HiPPO-LegS matrix.

    The normal part is -I/2 + K with K skew-symmetric, K_ij = -p_i p_j below the diagonal and p_i = sqrt(i + 1/2)
    (S4, arXiv 2111.00396, theorem 1). Every real part is thus exactly -1/2. Imaginary parts are in ascending order, in
    pairs of opposite sign, up to about n**2 / pi. Raises ValueError for n below 1.
    """
    if n < 1:
        raise ValueError(f"a HiPPO block of {n} states was asked for: it needs at least 1.")
    p = np.sqrt(np.arange(n) + 0.5)
    below = -np.tril(np.outer(p, p), -1)
    imaginary, V = np.linalg.eigh(-1j * (below - below.T))
    Lambda = -0.5 + 1j * imaginary
    Lambda.flags.writeable = V.flags.writeable = False
    return Lambda, V


def block_hippo(state_size: int, blocks: int, conjugate_symmetric: bool = True) -> BlockHippo:
    """Return the diagonalised HiPPO-N initialisation of `state_size` real states in `blocks` equal blocks.

    Each full block is diagonalised first and halved afterwards, as in lindermanlab/S5. Halving first would change the
    eigenvalues. Raises ValueError if the blocks do not divide the states, or if conjugate symmetry would halve an odd
    block.
    """
    if blocks < 1:
        raise ValueError(f"blocks={blocks}: an S5 layer has at least 1 block. Use blocks=1 or more.")
    halves = 2 if conjugate_symmetric else 1
    unit = halves * blocks
    if state_size < 1 or state_size % unit:
        below = max(state_size // unit, 1) * unit
        number = "an even number" if conjugate_symmetric else "the same number"
        raise ValueError(
            f"state_size={state_size} with blocks={blocks}: each block needs {number} of states, so state_size must be "
            f"a multiple of {unit}. Use state_size={below} or state_size={below + unit}."
        )
    Lambda, V = hippo_n(state_size // blocks)
    kept = len(Lambda) // halves
    return BlockHippo(np.tile(Lambda[:kept], blocks), V[:, :kept], V[:, :kept].conj().T, blocks)


def init_Lambda(hippo: BlockHippo) -> Eigenvalues:
    """Return the initial continuous-time eigenvalues, as float32 (real, imaginary)."""
    return jnp.asarray(np.real(hippo.Lambda), jnp.float32), jnp.asarray(np.imag(hippo.Lambda), jnp.float32)


def init_B_tilde(key: Array, hippo: BlockHippo, embed: int) -> Float32[Array, "state embed 2"]:
    """Return V^-1 B as (real, imaginary) on the last axis, for a real LeCun-normal B of variance 1 / state_size."""
    B = truncated_normal(key, (hippo.state_size, embed), math.sqrt(1 / hippo.state_size))
    B = B.reshape(hippo.blocks, -1, embed)
    rotated = [_exact("kn,bnh->bkh", part, B) for part in (np.real(hippo.Vinv), np.imag(hippo.Vinv))]
    return jnp.stack(rotated, axis=-1).reshape(hippo.state, embed, 2)


def init_C_tilde(key: Array, hippo: BlockHippo, embed: int, method: CInit) -> Float32[Array, "embed state 2"]:
    """Return C V as (real, imaginary) on the last axis. A bidirectional layer draws one for each direction.

    `trunc_standard_normal`: the parts of C have variance 1 / state_size (despite the name: it is LeCun normal by rows).
    `lecun_normal`: variance 1 / (state_size * embed), upstream's fan-in of the whole array.
    `complex_normal`: C V itself is drawn, with parts of variance 1/2.
    """
    if method is CInit.complex_normal:
        return jax.random.normal(key, (embed, hippo.state, 2), jnp.float32) * math.sqrt(0.5)
    fan_in = hippo.state_size * (embed if method is CInit.lecun_normal else 1)
    C = truncated_normal(key, (embed, hippo.state_size, 2), math.sqrt(1 / fan_in)).reshape(embed, hippo.blocks, -1, 2)
    re, im = C[..., 0], C[..., 1]

    def rotated(part: np.ndarray, by: Array) -> Array:
        return _exact("hbn,nk->hbk", by, part)

    V_re, V_im = np.real(hippo.V), np.imag(hippo.V)
    parts = rotated(V_re, re) - rotated(V_im, im), rotated(V_im, re) + rotated(V_re, im)
    return jnp.stack(parts, axis=-1).reshape(embed, hippo.state, 2)


def init_D(key: Array, embed: int) -> Float32[Array, " embed"]:
    """Return the feedthrough D, sampled from a standard normal."""
    return jax.random.normal(key, (embed,), jnp.float32)


def init_log_step(key: Array, state: int, step_min: float = 1e-3, step_max: float = 1e-1) -> Float32[Array, " state"]:
    """Return log Delta for each state, uniform between log(step_min) and log(step_max).

    Raises ValueError unless 0 < step_min <= step_max.
    """
    if not 0 < step_min <= step_max:
        raise ValueError(f"step_min={step_min} and step_max={step_max}: need 0 < step_min <= step_max.")
    return jax.random.uniform(key, (state,), jnp.float32, math.log(step_min), math.log(step_max))


def discretize(
    Lambda_re: Float[Array, " state"],
    Lambda_im: Float[Array, " state"],
    log_step: Float[Array, " state"],
    method: Discretization = Discretization.zoh,
    *,
    step_rescale: float = 1.0,
    clip_eigs: bool = False,
) -> tuple[Eigenvalues, Eigenvalues]:
    """Return Lambda_bar and the factor s with B_bar = s B_tilde, each as float32 (real, imaginary).

    s is one number per state, so scaling rows of B_tilde gives B_bar. Delta is `step_rescale` times exp(log_step).
    `step_rescale` is the ratio of the training data's step to the current data's step, as in the paper's zero-shot
    resampling. `clip_eigs` limits real parts to at most -1e-4, so that no state grows (Goel et al., arXiv 2202.09729).

    Zero-order hold: Lambda_bar = exp(Lambda Delta), s = (Lambda_bar - 1) / Lambda, by series for small Lambda Delta.
    Bilinear: Lambda_bar = (1 + Lambda Delta / 2) / (1 - Lambda Delta / 2), s = Delta / (1 - Lambda Delta / 2).

    For given float32 Lambda and Delta, Lambda_bar is accurate to 5e-7 and s to about 1e-6 of min(Delta, 1 / |Lambda|).
    The rounding of Delta = exp(log_step) adds an error: it rotates Lambda_bar by up to 1e-7 |Im Lambda| Delta rad.
    Measured at Delta = 0.1: 7e-8 for blocks of 16, 4e-6 for 64, 4e-5 for 256. This is less than the effect of moving
    log_step to the next float32, so float32 parameters do not allow higher accuracy.
    """
    Delta = step_rescale * jnp.exp(log_step.astype(jnp.float32))
    re, im = Lambda_re.astype(jnp.float32), Lambda_im.astype(jnp.float32)
    if clip_eigs:
        re = jnp.minimum(re, LAMBDA_RE_MAX)
    if method is Discretization.zoh:
        return _zero_order_hold((re, im), Delta)
    half = scaled(Delta / 2, (re, im))
    ahead, behind = (1 - half[0], -half[1]), (1 + half[0], half[1])
    return div(behind, ahead), div((Delta, jnp.zeros_like(Delta)), ahead)


def _zero_order_hold(Lambda: Eigenvalues, Delta: Float32[Array, " state"]) -> tuple[Eigenvalues, Eigenvalues]:
    """Return exp(Lambda Delta) and (exp(Lambda Delta) - 1) / Lambda without cancellation, in value and gradient."""
    z = scaled(Delta, Lambda)
    lam_bar = scaled(jnp.exp(z[0]), unit_phase(Lambda[1], Delta))
    small = z[0] * z[0] + z[1] * z[1] < _SERIES_RADIUS**2
    near = jnp.where(small, z[0], 0), jnp.where(small, z[1], 0)
    series = jnp.full_like(near[0], 1 / math.factorial(_SERIES_TERMS)), jnp.zeros_like(near[1])
    for term in range(_SERIES_TERMS - 1, 0, -1):
        series = add(mul(series, near), (jnp.float32(1 / math.factorial(term)), jnp.float32(0)))
    by_series = scaled(Delta, series)
    far = jnp.where(small, 1, Lambda[0]), jnp.where(small, 0, Lambda[1])
    by_quotient = div((lam_bar[0] - 1, lam_bar[1]), far)
    scale = jnp.where(small, by_series[0], by_quotient[0]), jnp.where(small, by_series[1], by_quotient[1])
    return lam_bar, scale


@jax.custom_jvp
def unit_phase(frequency: Float32[Array, " state"], step: Float32[Array, " state"]) -> Eigenvalues:
    """Return exp(i frequency step) as (cosine, sine), accurate to about 1e-6 for |frequency step| < 25000.

    A float32 product of 2000 radians has an error of 1e-4 before the cosine is taken. To avoid it, both factors are
    split into halves of 12 bits, which have exact products, and whole turns are subtracted before anything is rounded
    (Cody and Waite's reduction, with 2 pi in three parts).
    """
    upper, lower = _halves(frequency), _halves(step)
    turns = jnp.round(frequency * step * (1 / (2 * math.pi)))
    angle = upper[0] * lower[0]
    for part in _TWO_PI:
        angle = angle - turns * part
    angle = angle + (upper[0] * lower[1] + upper[1] * lower[0] + upper[1] * lower[1])
    return jnp.cos(angle), jnp.sin(angle)


@unit_phase.defjvp
def _unit_phase_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Eigenvalues, Eigenvalues]:
    frequency, step = primals
    cosine, sine = unit_phase(frequency, step)
    turning = tangents[0] * step + frequency * tangents[1]
    return (cosine, sine), (-sine * turning, cosine * turning)


def _in_parts(value: float, bits: int) -> tuple[float, ...]:
    """Split the value into two numbers of `bits` bits and a remainder."""
    parts = []
    for _ in range(2):
        unit = 2.0 ** (math.frexp(value)[1] - bits)
        parts.append(math.floor(value / unit) * unit)
        value -= parts[-1]
    return *parts, value


_TWO_PI = _in_parts(2 * math.pi, 11)


def _halves(x: Float32[Array, " state"]) -> tuple[Array, Array]:
    """Split x into a sum of two float32 numbers of at most 12 significant bits each."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0xFFFFF000)
    upper = jax.lax.bitcast_convert_type(bits, jnp.float32)
    return upper, x - upper


_TRUNCATED = 0.87962566103423978
"""Standard deviation of the unit normal distribution truncated at -2 and 2."""


def truncated_normal(key: Array, shape: tuple[int, ...], deviation: float) -> Float32[Array, "..."]:
    """Return normal random numbers truncated at two deviations, scaled to this standard deviation after truncation."""
    return deviation / _TRUNCATED * jax.random.truncated_normal(key, -2.0, 2.0, shape, jnp.float32)


def _exact(subscripts: str, *operands: Array | np.ndarray) -> Array:
    """Compute an einsum in full float32 on every backend, without bfloat16 passes."""
    narrow = [jnp.asarray(operand, jnp.float32) for operand in operands]
    return jnp.einsum(subscripts, *narrow, precision=jax.lax.Precision.HIGHEST)
