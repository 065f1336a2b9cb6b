"""The S5 block (arXiv 2208.04933): a diagonal state space, then a gate. Its module is in `s5_layer`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from valkyrie.axes import Size
from valkyrie.models.block import Block, Saved, SavedActivation, Site, Weight, saved, weight
from valkyrie.ops.choices import STATES, CInit, Discretization, ScanImpl

if TYPE_CHECKING:
    from jaxtyping import Array

    from valkyrie.ops.linear import Numerics


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

    def problems(self, key: str) -> list[str]:
        """Return every reason why it cannot be built."""
        refusals = []
        per_block, pairs = self.state_size // max(self.blocks, 1), 2 * max(self.blocks, 1)
        uneven = self.blocks < 1 or self.state_size < 1 or self.state_size % self.blocks
        if uneven or (self.conjugate_symmetric and per_block % 2):
            nearest = max(1, (2 * self.state_size + pairs) // (2 * pairs)) * pairs
            refusals.append(
                f"{key}.state_size={self.state_size} does not split into {key}.blocks={self.blocks} blocks"
                f"{' of an even size (conjugate pairs)' if self.conjugate_symmetric else ''}. "
                f"Nearest: state_size={nearest}."
            )
        if not 0 < self.dt_min <= self.dt_max:
            refusals.append(f"{key} needs 0 < dt_min <= dt_max; got dt_min={self.dt_min}, dt_max={self.dt_max}.")
        if not self.step_rescale > 0:
            refusals.append(f"{key}.step_rescale={self.step_rescale:g}: must be above 0.")
        if self.scan_block < 1:
            refusals.append(f"{key}.scan_block={self.scan_block}: at least 1 is needed.")
        return refusals

    def sizes(self, site: Site) -> dict[str, Size]:
        """Return how many states it keeps, and the width of its gate."""
        return {"state": Size(self.states, f"{site.key}.state_size"), "mlp": Size(site.embed, "model.embed")}

    def weights(self, site: Site) -> dict[str, Weight]:
        """Return the state space, all of it in float32, and the matrices of the gate."""
        own = {"B": weight("state", "embed", 2, group="ssm", float32=True, output_first=True)}
        for name in ("C", "C_reverse")[: 1 + self.bidirectional]:
            own[name] = weight("embed", "state", 2, float32=True, output_first=True)
        for name in ("gate", "out")[: self.activation.products]:
            own[name] = weight("embed", "mlp")
        for name in ("Lambda_re", "Lambda_im", "log_step"):
            own[name] = weight("state", group="ssm", float32=True)
        return own | {"D": weight("embed", float32=True)}

    def flops(self, site: Site, seq: int) -> float:
        """Return forward FLOPs per token: the products with B and C, 8 a state for each scan, and the gate's."""
        directions = 1 + self.bidirectional
        projections = 4 * self.states * site.embed * (1 + directions)
        return float(projections + 8 * self.states * directions + 2 * self.activation.products * site.embed**2)

    def saves(self, site: Site) -> list[Saved]:
        """Return the driven states and those of each scan, the products that read them, and the gate's factors."""
        directions, products = 1 + self.bidirectional, self.activation.products
        return [
            saved("state", name="driven", count=2, float32=True, product=True, remakes=STATES),
            saved("state", name=STATES, count=2 * directions, float32=True),
            saved("embed", count=2 * directions, float32=True, product=True),
            saved("embed", name="read"),
            *(saved("embed", name=name, product=True) for name in ("s5_gate", "s5_out")[:products]),
            saved("embed", count=2, float32=True),
            saved("embed", count=2),
        ]

    def neighbours(self, site: Site) -> list[tuple[SavedActivation, int | None]]:
        """Return the state after the positions before."""
        return [(kept, 1) for kept in self.kept(site) if kept.name == STATES]

    def build(self, site: Site, *, numerics: Numerics, key: Array) -> Any:
        """Return the module."""
        from valkyrie.models.s5_layer import S5Layer

        return S5Layer(self, site, numerics=numerics, key=key)
