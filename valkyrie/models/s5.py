"""The S5 block (arXiv 2208.04933): a diagonal state space between two projections, then a gate.

Symbols follow the paper: H inputs (`embed`), P complex states (`state`), Lambda, B_tilde, C_tilde, D, Delta.

Precision: the state space is computed in float32, as pairs of real arrays, up to its output 2 Re(C x) + D u. The output
is cast to the compute dtype, and GELU and the gate are computed in that dtype. On a TPU, the precision of the products
with B_bar and C depends on the policy. Under a bfloat16 policy, the matrix unit computes them in one pass: it rounds
both operands to bfloat16 and accumulates in float32. Under a float32 policy, it computes all products in float32, with
six passes. Discretisation and recurrence do not use the matrix unit and are always float32. According to the compiler's
estimates for TPU v4, the forward pass of a layer (16384 positions, H 1024, P 512) takes 0.8 ms with one pass. It would
take 1.25 ms with three passes and 1.8 ms with six.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from valkyrie.axes import Size
from valkyrie.models.block import ActivationSpec, Block, BlockContext, SavedActivation, Weight, saved, weight
from valkyrie.ops.choices import SCAN_STATES, CInit, Discretization, ScanImpl
from valkyrie.problems import Problem, ProblemCode, check_range


class Activation(Enum):
    """Activation of the output y of the state space. Names follow lindermanlab/S5 `layers.py`.

    With g = GELU(y), `gelu` is g, `half_glu1` is g * sigmoid(g W), `half_glu2` is y * sigmoid(g W), and `full_glu` is
    (g V) * sigmoid(g W). W and V are learned.
    """

    gelu = "gelu"
    half_glu1 = "half_glu1"
    half_glu2 = "half_glu2"
    full_glu = "full_glu"

    @property
    def matrix_count(self) -> int:
        """Number of (embed, embed) matrices in the activation."""
        return {Activation.gelu: 0, Activation.full_glu: 2}.get(self, 1)


@dataclass
class S5(Block):
    """An S5 layer (arXiv 2208.04933). The settings are those of its code (lindermanlab/S5), with longer names.

    Args:
        state_size: Number of real states before diagonalisation.
        blocks: Number of identical HiPPO-N blocks in the initial state matrix.
        conjugate_symmetric: Store only one state of each conjugate pair.
        discretization: Zero-order hold or bilinear.
        dt_min: Smallest initial step size Delta.
        dt_max: Largest initial step size.
        step_rescale: Factor of the step sizes: 2 for data sampled half as often as the training data.
        clip_eigenvalues: Limit the real parts of eigenvalues to at most -1e-4, so that no state grows.
        c_init: Initialiser of the output matrix C.
        activation: Activation after the state space.
        bidirectional: Scan in both directions, each with a separate C.
        scan: Implementation of the recurrence.
        scan_block: Block length of `scan=blocked`.
    """

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
        "mlp": "hidden channels of a feed-forward or gate",
    }
    activations = (("batch", "seq", "state"),)
    norm_group = "ssm"

    module_class = "valkyrie.models.s5_layer:S5Layer"

    @property
    def state_count(self) -> int:
        """P, the number of complex states stored: half of `state_size` under conjugate symmetry."""
        return self.state_size // 2 if self.conjugate_symmetric else self.state_size

    @property
    def is_causal(self) -> bool:
        """Whether the scan runs only forward, so that no position depends on later ones."""
        return not self.bidirectional

    def problems(self, key: str) -> list[Problem]:
        problems = []
        problems += check_range(f"{key}.blocks", self.blocks, least=1)
        blocks = max(self.blocks, 1)
        per_block, size_multiple = self.state_size // blocks, 2 * blocks
        uneven = self.state_size < 1 or self.state_size % blocks
        if uneven or (self.conjugate_symmetric and per_block % 2):
            nearest = max(1, (2 * self.state_size + size_multiple) // (2 * size_multiple)) * size_multiple
            text = (
                f"{key}.state_size={self.state_size} must be a positive multiple of "
                f"{blocks * (1 + self.conjugate_symmetric)}: {key}.blocks={self.blocks} splits it into equal blocks"
                f"{' of even size (conjugate pairs)' if self.conjugate_symmetric else ''}. "
                f"Use {key}.state_size={nearest}."
            )
            problems.append(Problem(ProblemCode.conflict, f"{key}.state_size", self.state_size, text))
        if not 0 < self.dt_min <= self.dt_max:
            text = f"{key}.dt_min={self.dt_min} must be above 0 and at most {key}.dt_max={self.dt_max}."
            problems.append(Problem(ProblemCode.conflict, f"{key}.dt_min", self.dt_min, text))
        problems += check_range(f"{key}.step_rescale", self.step_rescale, above=0)
        return problems + check_range(f"{key}.scan_block", self.scan_block, least=1)

    def sizes(self, context: BlockContext) -> dict[str, Size]:
        return {"state": Size(self.state_count, f"{context.key}.state_size"), "mlp": Size(context.embed, "model.embed")}

    def weights(self, context: BlockContext) -> dict[str, Weight]:
        """Return the parameters of the state space, all in float32, and the matrices of the gate."""
        weights = {"B": weight("state", "embed", 2, group="ssm", float32=True, output_first=True)}
        for name in ("C", "C_reverse")[: 1 + self.bidirectional]:
            weights[name] = weight("embed", "state", 2, float32=True, output_first=True)
        for name in ("gate", "out")[: self.activation.matrix_count]:
            weights[name] = weight("embed", "mlp")
        for name in ("Lambda_re", "Lambda_im", "log_step"):
            weights[name] = weight("state", group="ssm", float32=True)
        return weights | {"D": weight("embed", float32=True)}

    def flops(self, context: BlockContext, seq: int) -> float:
        """Return forward FLOPs per token: products with B and C, 8 FLOPs per state in each scan, and the gate."""
        direction_count = 1 + self.bidirectional
        projections = 4 * self.state_count * context.embed * (1 + direction_count)
        return float(
            projections + 8 * self.state_count * direction_count + 2 * self.activation.matrix_count * context.embed**2
        )

    def saves(self, context: BlockContext) -> list[ActivationSpec]:
        """Return the inputs and states of the scan, the products with C, and the factors of the gate."""
        direction_count, matrices = 1 + self.bidirectional, self.activation.matrix_count
        return [
            saved("state", name="driven", count=2, float32=True, product=True, needed_for=SCAN_STATES),
            saved("state", name=SCAN_STATES, count=2 * direction_count, float32=True),
            saved("embed", count=2 * direction_count, float32=True, product=True),
            saved("embed", name="read"),
            *(saved("embed", name=name, product=True) for name in ("s5_gate", "s5_out")[:matrices]),
            saved("embed", count=2, float32=True),
            saved("embed", count=2),
        ]

    def neighbours(self, context: BlockContext) -> list[tuple[SavedActivation, int | None]]:
        return [(activation, 1) for activation in self.saved_activations(context) if activation.name == SCAN_STATES]
