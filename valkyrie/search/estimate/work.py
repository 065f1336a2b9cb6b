"""The work of a step under any layout, as blocks declare it: products, mixing, activations, parameters."""

from __future__ import annotations

import math
from dataclasses import dataclass

from valkyrie.axes import BATCH, SEQ, Parameter
from valkyrie.config.run import Run
from valkyrie.models import Layered
from valkyrie.models.block import Block, BlockContext, SavedActivation
from valkyrie.parallel.remat import ActivationLocation, RematConfig

_OF_PRODUCTS = ("matrix", "ssm")


@dataclass(frozen=True)
class Product:
    """A product of every token with a parameter, in `count` layers.

    Args:
        reads, makes: Logical axes of the operand and of the result, with their lengths.
        count: Number of layers.
        numbers: Real numbers per element of the parameter: 1, or 2 if complex.
        float32: Whether it is computed in float32.
        operand: Key of the operand. Products of a layer with the same key read the same activations.
        name: Name of the result in remat policies, or None if it has none.
        remade: Whether the backward pass needs the result when no activation of the block was saved.
    """

    reads: tuple[tuple[str, int], ...]
    makes: tuple[tuple[str, int], ...]
    count: int
    numbers: int
    float32: bool
    operand: tuple[object, ...]
    name: str | None
    remade: bool

    @property
    def k(self) -> int:
        """Length of the dimension that it sums over."""
        return math.prod(n for _, n in self.reads)

    @property
    def n(self) -> int:
        """Length of its result."""
        return math.prod(n for _, n in self.makes)

    def is_remade(self, remat: RematConfig) -> bool:
        """Check whether a backward pass recomputes the product."""
        return self.remade and remat.location(self.name, product=True) is ActivationLocation.nowhere


@dataclass(frozen=True)
class Mixing:
    """The work of a block other than its products, such as attention scores or a scan.

    Args:
        flops: FLOPs per token of a forward pass.
        scores: Numbers per token that belong to pairs of positions. If a kernel computes them, they stay on the chip.
        axes: Logical axes that split the work.
        count: Number of layers.
        name: Name of the result in remat policies, or None if it has none.
        over_rows: Whether mesh axes that split the residual stream, and none of `axes`, split its rows.
        neighbours: Activations that it reads from other shards of the sequence, with the number of positions (None:
            all).
    """

    flops: float
    scores: float
    axes: tuple[str, ...]
    count: int
    name: str | None
    over_rows: bool
    neighbours: tuple[tuple[SavedActivation, int | None], ...]


@dataclass(frozen=True)
class Work:
    """A step of a model: its products, mixing, and parameters.

    `embed` is the width of the residual stream, `passes` the number of passes through the stack. `moved` are the
    activations that are written and read again, each with its number of layers.
    """

    run: Run
    embed: int
    products: tuple[Product, ...]
    mixing: tuple[Mixing, ...]
    moved: tuple[tuple[SavedActivation, int], ...]
    parameters: dict[str, Parameter]
    passes: float

    @property
    def tokens(self) -> int:
        """Tokens of the global batch."""
        return self.run.config.batch * self.run.config.seq

    @property
    def itemsize(self) -> int:
        """Bytes of a number in the compute dtype."""
        return self.run.config.precision.compute.itemsize


def work_of(run: Run, *, whole_blocks: bool = False) -> Work:
    """Return the work of a step of a run. Raises ValueError for a model that does not declare its layers.

    With `whole_blocks`, blocks are recomputed up to their last product, as PyTorch does. XLA leaves out results that
    nothing reads.
    """
    model = run.model
    if not isinstance(model, Layered):
        raise ValueError(
            f"model.family={model.family} goes through its blocks again and again, and estimates are of models whose "
            "blocks stand one after another. Compile its layouts: valkyrie-train -m mode=compile hydra/sweeper=layouts."
        )
    products, mixing, moved = [], [], []
    total = 2.0 * model.embed * model.vocab_rows
    for group, repeats in model.segments():
        for i, layer in enumerate(group):
            total += repeats * layer.flops(run.config.seq)
            blocks = list(layer.blocks.values())
            for j, (block, site) in enumerate(blocks):
                last = i == len(group) - 1 and j == len(blocks) - 1 and not whole_blocks
                found = _products(block, site, repeats, (i, site.number, j), last)
                products += found
                own = sum(2.0 * p.k * p.n * p.numbers for p in found)
                mixing.append(_mixing(block, site, repeats, run.config.seq, own))
                moved += [(kept, repeats) for kept in block.kept(site)]
    passes = model.flops_per_token(run.config.seq) / total
    return Work(run, model.embed, tuple(products), tuple(mixing), tuple(moved), model.parameters(), passes)


def _products(block: Block, site: BlockContext, count: int, place: tuple[object, ...], last: bool) -> list[Product]:
    """Return the products of a block. Each takes the name of the next named activation of the same size."""
    named = [pair for pair in zip(block.saves(site), block.kept(site), strict=True) if pair[0].product]
    products = []
    for parameter in block.parameters(site).values():
        pairs = [(a, n) for a, n in zip(parameter.axes, parameter.shape, strict=True) if a is not None]
        if parameter.group not in _OF_PRODUCTS or len(pairs) < 2:
            continue
        first, rest = tuple(pairs[:1]), tuple(pairs[1:])
        reads, makes = (rest, first) if parameter.output_first else (first, rest)
        length = math.prod(n for _, n in makes)
        given = next((pair for pair in named if math.prod(pair[1].tensor.shape[2:]) == length), None)
        if given is not None:
            named.remove(given)
        numbers = parameter.size // math.prod(n for _, n in pairs)
        operand = (*place, tuple(axis for axis, _ in reads), parameter.group)
        name, remade = (None, True) if given is None else (given[0].name, not (last and given[0].result))
        products.append(Product(reads, makes, count, numbers, parameter.float32, operand, name, remade))
    return products


def _mixing(block: Block, site: BlockContext, count: int, seq: int, of_products: float) -> Mixing:
    """Return the work of a block that is not in its products. `of_products` is the number of FLOPs in those."""
    inner = [kept for kept in block.kept(site) if kept.name is not None and not kept.product]
    axes = tuple(a for a in (block.activations[0] if block.activations else ()) if a not in (BATCH, SEQ))
    of_positions = tuple(block.neighbours(site))
    flops = max(block.flops(site, seq) - of_products, 0.0)
    name = inner[0].name if inner else None
    return Mixing(flops, block.scores(site, seq), axes, count, name, block.over_rows, of_positions)
