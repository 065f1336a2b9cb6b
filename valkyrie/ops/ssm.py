"""Initialisation and discretisation of an S5 state space (arXiv 2208.04933, sections 3 and 4).

The mathematics follows lindermanlab/S5. HiPPO-N blocks are diagonalised in float64 on the host. B and C are sampled in
the coordinates of HiPPO and rotated into those of its eigenvectors. Everything after that is float32, as real pairs.
Symbols follow the paper: H inputs (`embed`), P stored complex states (`state`), Lambda, B_tilde, C_tilde, D, Delta.
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
from valkyrie.ops.scan_complex import Eigenvalues, add, div, mul, scale_by

LAMBDA_RE_MAX = -1e-4
"""Maximum real part of eigenvalues under `clip_eigenvalues`. It is below 0, so that states decay."""

_SERIES_RADIUS = 0.25
"""Below this |Lambda Delta|, the zero-order hold is computed as a series of `_SERIES_TERMS` terms."""

_SERIES_TERMS = 9
"""Number of terms of the zero-order hold's series. The first omitted term is below float32 rounding."""


@dataclass(frozen=True, eq=False)
class BlockHippo:
    """Diagonalised initial state matrix of a layer, made of `block_count` identical HiPPO-N blocks.

    With conjugate symmetry, only the eigenvalues with negative imaginary part are stored, so `V` is rectangular.

    Args:
        Lambda: Stored eigenvalues of all blocks.
        V: Eigenvectors of one block, as columns.
        Vinv: Conjugate transpose of `V`.
        block_count: Number of blocks.
    """

    Lambda: Complex128[np.ndarray, " state"]
    V: Complex128[np.ndarray, "block kept"]
    Vinv: Complex128[np.ndarray, "kept block"]
    block_count: int

    @property
    def state_count(self) -> int:
        """Number of complex states that the layer stores (the paper's P)."""
        return len(self.Lambda)

    @property
    def state_size(self) -> int:
        """Number of real states before diagonalisation: `state_count`, or twice that with conjugate symmetry."""
        return self.block_count * self.V.shape[0]


@lru_cache(maxsize=16)
def hippo_n(n: int) -> tuple[Complex128[np.ndarray, " block"], Complex128[np.ndarray, "block block"]]:
    """Return the eigenvalues and eigenvectors (as columns) of the normal part of the n x n HiPPO-LegS matrix.

    The normal part is -I/2 + K with K skew-symmetric, K_ij = -p_i p_j below the diagonal and p_i = sqrt(i + 1/2)
    (S4, arXiv 2111.00396, theorem 1). Every real part is thus exactly -1/2. Imaginary parts are in ascending order, in
    pairs of opposite sign, up to about n**2 / pi. Raises ValueError for n below 1.
    """
    if n < 1:
        raise ValueError(f"n={n}: a HiPPO block has at least 1 state. Use n=1 or more.")
    p = np.sqrt(np.arange(n) + 0.5)
    below = -np.tril(np.outer(p, p), -1)
    imaginary, V = np.linalg.eigh(-1j * (below - below.T))
    Lambda = -0.5 + 1j * imaginary
    Lambda.flags.writeable = V.flags.writeable = False
    return Lambda, V


def block_hippo(state_size: int, blocks: int, conjugate_symmetric: bool = True) -> BlockHippo:
    """Return the diagonalised HiPPO-N initialisation of `state_size` real states in `blocks` identical blocks.

    With conjugate symmetry, each full block is diagonalised first and halved afterwards, as in lindermanlab/S5. Halving
    first would change the eigenvalues.

    Raises ValueError if `state_size` or `blocks` is below 1, if `blocks` does not divide `state_size`, or if the size
    of a block is odd with conjugate symmetry.
    """
    if blocks < 1:
        raise ValueError(f"blocks={blocks} must be at least 1.")
    divisor = 2 if conjugate_symmetric else 1
    multiple = divisor * blocks
    if state_size < 1 or state_size % multiple:
        below = max(state_size // multiple, 1) * multiple
        equal = "equal blocks of even size" if conjugate_symmetric else "equal blocks"
        raise ValueError(
            f"state_size={state_size} must be a positive multiple of {multiple}: blocks={blocks} splits it into "
            f"{equal}. Use state_size={below} or state_size={below + multiple}."
        )
    Lambda, V = hippo_n(state_size // blocks)
    stored_count = len(Lambda) // divisor
    return BlockHippo(np.tile(Lambda[:stored_count], blocks), V[:, :stored_count], V[:, :stored_count].conj().T, blocks)


def init_Lambda(hippo: BlockHippo) -> Eigenvalues:
    """Return the initial continuous-time eigenvalues, as float32 (real, imaginary)."""
    return jnp.asarray(np.real(hippo.Lambda), jnp.float32), jnp.asarray(np.imag(hippo.Lambda), jnp.float32)


def init_B_tilde(key: Array, hippo: BlockHippo, embed: int) -> Float32[Array, "state embed 2"]:
    """Return V^-1 B, with real and imaginary parts on the last axis.

    B is real and sampled from a truncated normal distribution of variance 1 / state_size.
    """
    B = truncated_normal(key, (hippo.state_size, embed), math.sqrt(1 / hippo.state_size))
    B = B.reshape(hippo.block_count, -1, embed)
    rotated = [_einsum_float32("kn,bnh->bkh", part, B) for part in (np.real(hippo.Vinv), np.imag(hippo.Vinv))]
    return jnp.stack(rotated, axis=-1).reshape(hippo.state_count, embed, 2)


def init_C_tilde(key: Array, hippo: BlockHippo, embed: int, method: CInit) -> Float32[Array, "embed state 2"]:
    """Return C V, with real and imaginary parts on the last axis.

    The methods sample real and imaginary parts with these variances:
        `trunc_standard_normal`: 1 / state_size for C. Despite its name, this is LeCun normal by rows.
        `lecun_normal`: 1 / (state_size * embed) for C, with the fan-in that lindermanlab/S5 uses.
        `complex_normal`: 1/2 for C V, which is sampled directly.
    """
    if method is CInit.complex_normal:
        return jax.random.normal(key, (embed, hippo.state_count, 2), jnp.float32) * math.sqrt(0.5)
    fan_in = hippo.state_size * (embed if method is CInit.lecun_normal else 1)
    C = truncated_normal(key, (embed, hippo.state_size, 2), math.sqrt(1 / fan_in)).reshape(
        embed, hippo.block_count, -1, 2
    )
    re, im = C[..., 0], C[..., 1]

    def rotate(part: np.ndarray, matrix: Array) -> Array:
        return _einsum_float32("hbn,nk->hbk", matrix, part)

    V_re, V_im = np.real(hippo.V), np.imag(hippo.V)
    parts = rotate(V_re, re) - rotate(V_im, im), rotate(V_im, re) + rotate(V_re, im)
    return jnp.stack(parts, axis=-1).reshape(embed, hippo.state_count, 2)


def init_D(key: Array, embed: int) -> Float32[Array, " embed"]:
    """Return the feedthrough D, sampled from a standard normal."""
    return jax.random.normal(key, (embed,), jnp.float32)


def init_log_step(key: Array, state: int, step_min: float = 1e-3, step_max: float = 1e-1) -> Float32[Array, " state"]:
    """Return log Delta for each state, uniform between log(step_min) and log(step_max).

    Raises ValueError unless 0 < step_min <= step_max.
    """
    if not 0 < step_min <= step_max:
        raise ValueError(f"step_min={step_min} must be above 0 and at most step_max={step_max}.")
    return jax.random.uniform(key, (state,), jnp.float32, math.log(step_min), math.log(step_max))


def discretize(
    Lambda_re: Float[Array, " state"],
    Lambda_im: Float[Array, " state"],
    log_step: Float[Array, " state"],
    method: Discretization = Discretization.zoh,
    *,
    step_rescale: float = 1.0,
    clip_eigenvalues: bool = False,
) -> tuple[Eigenvalues, Eigenvalues]:
    """Return Lambda_bar and the factor s with B_bar = s B_tilde, each as float32 (real, imaginary).

    s is one number per state, so scaling rows of B_tilde gives B_bar. Delta is `step_rescale` times exp(log_step).
    `step_rescale` is the time between positions relative to the training data: 2 for data sampled half as often (the
    paper's zero-shot resampling). `clip_eigenvalues` limits real parts to at most -1e-4, so that no state grows (Goel
    et al., arXiv 2202.09729).

    Zero-order hold: Lambda_bar = exp(Lambda Delta), s = (Lambda_bar - 1) / Lambda, by series for small Lambda Delta.
    Bilinear: Lambda_bar = (1 + Lambda Delta / 2) / (1 - Lambda Delta / 2), s = Delta / (1 - Lambda Delta / 2).

    For given float32 Lambda and Delta, Lambda_bar is accurate to 5e-7 and s to about 1e-6 of min(Delta, 1 / |Lambda|).
    Rounding Delta = exp(log_step) to float32 also rotates Lambda_bar, by up to 1e-7 |Im Lambda| Delta rad: measured at
    Delta = 0.1, 7e-8 for HiPPO blocks of 16 states, 4e-6 for 64, 4e-5 for 256. This is less than the effect of moving
    log_step to the next float32, so float32 parameters do not allow higher accuracy.
    """
    Delta = step_rescale * jnp.exp(log_step.astype(jnp.float32))
    re, im = Lambda_re.astype(jnp.float32), Lambda_im.astype(jnp.float32)
    if clip_eigenvalues:
        re = jnp.minimum(re, LAMBDA_RE_MAX)
    if method is Discretization.zoh:
        return _zero_order_hold((re, im), Delta)
    half = scale_by(Delta / 2, (re, im))
    denominator, numerator = (1 - half[0], -half[1]), (1 + half[0], half[1])
    return div(numerator, denominator), div((Delta, jnp.zeros_like(Delta)), denominator)


def _zero_order_hold(Lambda: Eigenvalues, Delta: Float32[Array, " state"]) -> tuple[Eigenvalues, Eigenvalues]:
    """Return exp(Lambda Delta) and (exp(Lambda Delta) - 1) / Lambda without cancellation, in value and gradient."""
    z = scale_by(Delta, Lambda)
    lam_bar = scale_by(jnp.exp(z[0]), unit_phase(Lambda[1], Delta))
    is_small = z[0] * z[0] + z[1] * z[1] < _SERIES_RADIUS**2
    small_z = jnp.where(is_small, z[0], 0), jnp.where(is_small, z[1], 0)
    series = jnp.full_like(small_z[0], 1 / math.factorial(_SERIES_TERMS)), jnp.zeros_like(small_z[1])
    for term in range(_SERIES_TERMS - 1, 0, -1):
        series = add(mul(series, small_z), (jnp.float32(1 / math.factorial(term)), jnp.float32(0)))
    series_scale = scale_by(Delta, series)
    safe_lambda = jnp.where(is_small, 1, Lambda[0]), jnp.where(is_small, 0, Lambda[1])
    quotient_scale = div((lam_bar[0] - 1, lam_bar[1]), safe_lambda)
    scale = (
        jnp.where(is_small, series_scale[0], quotient_scale[0]),
        jnp.where(is_small, series_scale[1], quotient_scale[1]),
    )
    return lam_bar, scale


@jax.custom_jvp
def unit_phase(frequency: Float32[Array, " state"], step: Float32[Array, " state"]) -> Eigenvalues:
    """Return exp(i frequency step) as (cosine, sine), accurate to about 1e-6 for |frequency step| < 25000.

    A float32 product of 2000 radians has an error of 1e-4 before the cosine is taken. To avoid it, both factors are
    split into halves of 12 bits, which have exact products, and whole turns are subtracted before anything is rounded
    (Cody and Waite's reduction, with 2 pi in three parts).
    """
    frequency_parts, step_parts = _split_bits(frequency), _split_bits(step)
    turns = jnp.round(frequency * step * (1 / (2 * math.pi)))
    angle = frequency_parts[0] * step_parts[0]
    for part in _TWO_PI:
        angle = angle - turns * part
    angle = angle + (
        frequency_parts[0] * step_parts[1] + frequency_parts[1] * step_parts[0] + frequency_parts[1] * step_parts[1]
    )
    return jnp.cos(angle), jnp.sin(angle)


@unit_phase.defjvp
def _unit_phase_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Eigenvalues, Eigenvalues]:
    frequency, step = primals
    cosine, sine = unit_phase(frequency, step)
    angle_tangent = tangents[0] * step + frequency * tangents[1]
    return (cosine, sine), (-sine * angle_tangent, cosine * angle_tangent)


def _split_constant(value: float, bits: int) -> tuple[float, ...]:
    """Split a value into a sum of two numbers with `bits` significant bits each, and a remainder."""
    parts = []
    for _ in range(2):
        unit = 2.0 ** (math.frexp(value)[1] - bits)
        parts.append(math.floor(value / unit) * unit)
        value -= parts[-1]
    return *parts, value


_TWO_PI = _split_constant(2 * math.pi, 11)
"""2 pi in three parts. Products of the first two with a whole number of turns below 2**13 are exact in float32."""


def _split_bits(x: Float32[Array, " state"]) -> tuple[Array, Array]:
    """Split `x` into a sum of two float32 numbers of at most 12 significant bits each."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0xFFFFF000)
    upper = jax.lax.bitcast_convert_type(bits, jnp.float32)
    return upper, x - upper


_TRUNCATED_DEVIATION = 0.87962566103423978
"""Standard deviation of the unit normal distribution truncated at -2 and 2."""


def truncated_normal(key: Array, shape: tuple[int, ...], deviation: float) -> Float32[Array, "..."]:
    """Sample a normal distribution truncated at two standard deviations and scaled.

    The samples have standard deviation `deviation`, after truncation.
    """
    return deviation / _TRUNCATED_DEVIATION * jax.random.truncated_normal(key, -2.0, 2.0, shape, jnp.float32)


def _einsum_float32(subscripts: str, *operands: Array | np.ndarray) -> Array:
    """Compute an einsum in full float32 on every backend, without bfloat16 passes."""
    operands_f32 = [jnp.asarray(operand, jnp.float32) for operand in operands]
    return jnp.einsum(subscripts, *operands_f32, precision=jax.lax.Precision.HIGHEST)
