"""The work of a training step, independent of the layout: matmuls, mixing of positions, and activations."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from valkyrie.axes import BATCH, SEQ, GatheredRows, Parameter
from valkyrie.config.run import Run
from valkyrie.hardware.platforms import Platform, get_platform
from valkyrie.models import LayeredModel
from valkyrie.models.block import Block, BlockContext, SavedActivation
from valkyrie.models.dispatch import DispatchWork
from valkyrie.parallel.remat import ActivationLocation, RematConfig

_PRODUCT_GROUPS = ("matrix", "ssm")


DENSE_SCORES_PASSES = 1.5
"""Number of times that a forward pass of dense attention moves its float32 scores through HBM.

From one compiled step: gpt_tiny, 2,048 sequences of 128 tokens on 8 v5e chips.
"""


@dataclass(frozen=True)
class Product:
    """A matmul of the activations of all tokens with a parameter, `count` times.

    Args:
        input_axes, output_axes: Logical axes of the operand and of the result, with their lengths.
        count: Number of layers.
        components: Real numbers per element of the parameter: 1, or 2 if complex.
        float32: Whether it is computed in float32.
        operand_key: Key of the operand. Matmuls with the same key read the same activations.
        name: Name of the result in remat policies, or None if it has none.
        is_needed_backward: Whether the backward pass needs the result if no activation of the block was saved.
        stack: Logical axis and number of matrices that each multiply some of the tokens, such as experts, or (None, 1).
        rows_per_token: Mean number of these matrices that a token is multiplied by, including empty rows.
        gathered_rows: Its rows, if a device has those of several devices (`SavedActivation`).
    """

    input_axes: tuple[tuple[str, int], ...]
    output_axes: tuple[tuple[str, int], ...]
    count: float
    components: int
    float32: bool
    operand_key: tuple[object, ...]
    name: str | None
    is_needed_backward: bool
    stack: tuple[str | None, int] = (None, 1)
    rows_per_token: float = 1.0
    gathered_rows: GatheredRows | None = None

    @property
    def k(self) -> int:
        """Size of the contracting dimension."""
        return math.prod(n for _, n in self.input_axes)

    @property
    def n(self) -> int:
        """Number of output features."""
        return math.prod(n for _, n in self.output_axes)

    def is_recomputed(self, remat: RematConfig) -> bool:
        """Check whether the backward pass recomputes the product under a remat policy."""
        return self.is_needed_backward and remat.location(self.name, product=True) is ActivationLocation.nowhere


@dataclass(frozen=True)
class Mixing:
    """The work of a block outside its matmuls, such as attention scores or a scan.

    Args:
        flops: FLOPs per token of a forward pass.
        scores: Number of scores between positions, such as attention logits, that a forward pass computes per token.
            Counted even if a fused kernel never writes them to HBM.
        dense_scores: Scores per token that the block computes as whole matrices, although the platform has a kernel,
            because the sequence is short or `impl=dense`.
        axes: Logical axes that split the work.
        count: Number of layers.
        name: Name of the result in remat policies, or None if it has none.
        shards_rows_over_embed: Whether tokens are also split over the mesh axes that split `embed` but none of `axes`.
        neighbours: Activations that a shard of the sequence reads from other shards, each with the number of positions
            that it reads, or None for all positions.
        exchanged_halves: Activations whose half-shards are exchanged if the sequence is split
            (`Block.exchanged_halves`).
        dispatched_axes: Logical axes along which tokens are sent to parameters, such as experts (`Block.dispatches`).
        dispatched: Activations that are sent along them (`Block.dispatched_activations`).
        dispatch: Other work to send tokens along them.
        is_result_needed: Whether the backward pass needs the results that are sent back.
    """

    flops: float
    scores: float
    dense_scores: float
    axes: tuple[str, ...]
    count: int
    name: str | None
    shards_rows_over_embed: bool
    neighbours: tuple[tuple[SavedActivation, int | None], ...]
    exchanged_halves: tuple[SavedActivation, ...]
    dispatched_axes: tuple[str, ...] = ()
    dispatched: tuple[SavedActivation, ...] = ()
    dispatch: DispatchWork = DispatchWork()
    is_result_needed: bool = True


@dataclass(frozen=True)
class StepWork:
    """The work of one training step of a run.

    Args:
        run: The run.
        embed: Width of the residual stream.
        products: Matrix products with parameters.
        mixing: Other work of the blocks.
        activations: Activations that are written to memory and read again, each with its number of layers.
        parameters: Parameters by name.
        passes: Number of passes through the stack of layers.
    """

    run: Run
    embed: int
    products: tuple[Product, ...]
    mixing: tuple[Mixing, ...]
    activations: tuple[tuple[SavedActivation, int], ...]
    parameters: dict[str, Parameter]
    passes: float

    @property
    def tokens(self) -> int:
        """Tokens of the global batch."""
        return self.run.config.batch * self.run.config.seq

    @property
    def lanes(self) -> int:
        """Attention's head dimension is padded to a multiple of this number (`Platform.lanes`)."""
        return get_platform(self.run.config.target.platform).lanes

    @property
    def itemsize(self) -> int:
        """Bytes of a number in the compute dtype."""
        return self.run.config.precision.compute.itemsize

    @cached_property
    def loss_chunk(self) -> int | None:
        """`model.loss_chunk`, or None if the loss computes all logits at once."""
        return next((a.positions for a in self.run.model.working_activations() if a.positions is not None), None)


def step_work(run: Run, *, recompute_last_matmul: bool = False) -> StepWork:
    """Return the work of a step of a run. Raises ValueError for a model that does not declare its layers.

    With `recompute_last_matmul`, recomputation includes the last matmul of each group of layers
    (`LayeredModel.segments`), as in PyTorch. XLA skips it, because nothing in the backward pass reads its result.
    """
    model = run.model
    if not isinstance(model, LayeredModel):
        raise ValueError(
            f"model.family={model.family} is recursive, and layouts of recursive models cannot be estimated. Compile "
            "them instead: valkyrie-train -m mode=compile hydra/sweeper=layouts."
        )
    products, mixing, activations = [], [], []
    platform = get_platform(run.config.target.platform)
    flops_per_pass = 2.0 * model.embed * model.vocab_rows
    for group, repeats in model.segments():
        for i, layer in enumerate(group):
            flops_per_pass += repeats * layer.flops(run.config.seq)
            blocks = list(layer.blocks.values())
            for j, (block, context) in enumerate(blocks):
                is_result_unused = i == len(group) - 1 and j == len(blocks) - 1 and not recompute_last_matmul
                block_products = _products(block, context, repeats, (i, context.number, j), is_result_unused)
                products += block_products
                product_flops = sum(2.0 * p.k * p.n * p.components * p.rows_per_token for p in block_products)
                mixing.append(
                    _mixing(block, context, repeats, run.config.seq, product_flops, platform, not is_result_unused)
                )
                activations += [(activation, repeats) for activation in block.saved_activations(context)]
    passes = model.flops_per_token(run.config.seq) / flops_per_pass
    return StepWork(run, model.embed, tuple(products), tuple(mixing), tuple(activations), model.parameters(), passes)


def _products(
    block: Block, context: BlockContext, count: int, block_key: tuple[object, ...], is_result_unused: bool
) -> list[Product]:
    """Return the matmuls of a block. Each is matched to a saved activation and takes its name.

    A match is the activation with the name of the parameter or, if there is none, one of the same size.

    With `is_result_unused`, the backward pass does not read the result of the block.
    """
    parameters, products = block.parameters(context), []
    pairs_by_name = {
        (s.name or i): (s, a)
        for i, (s, a) in enumerate(zip(block.saves(context), block.saved_activations(context), strict=True))
        if s.product
    }
    for name, parameter in parameters.items():
        matrix_dims = zip(parameter.axes[parameter.stack_dims :], parameter.shape[parameter.stack_dims :], strict=True)
        pairs = [(a, n) for a, n in matrix_dims if a is not None]
        if parameter.group not in _PRODUCT_GROUPS or len(pairs) < 2:
            continue
        first_axis, other_axes = tuple(pairs[:1]), tuple(pairs[1:])
        input_axes, output_axes = (other_axes, first_axis) if parameter.output_first else (first_axis, other_axes)
        length = math.prod(n for _, n in output_axes)
        unnamed = (
            key
            for key, pair in pairs_by_name.items()
            if key not in parameters and math.prod(pair[1].tensor.shape[2:]) == length
        )
        match = pairs_by_name.pop(name if name in pairs_by_name else next(unnamed, name), None)
        stacked = math.prod(parameter.shape[: parameter.stack_dims])
        components = parameter.size // stacked // math.prod(n for _, n in pairs)
        is_stack = parameter.matrices_per_token is not None
        operand_key = (*block_key, tuple(axis for axis, _ in input_axes), parameter.group, is_stack)
        result_name, is_needed_backward = (
            (None, True) if match is None else (match[0].name, not (is_result_unused and match[0].result))
        )
        products.append(
            Product(
                input_axes,
                output_axes,
                count,
                components,
                parameter.float32,
                operand_key,
                result_name,
                is_needed_backward,
                (parameter.axes[parameter.stack_dims - 1], parameter.shape[parameter.stack_dims - 1])
                if is_stack
                else (None, 1),
                parameter.matrices_per_token or 1.0,
                None if match is None else match[1].gathered_rows,
            )
        )
    return products


def _mixing(
    block: Block,
    context: BlockContext,
    count: int,
    seq: int,
    product_flops: float,
    platform: Platform,
    is_result_needed: bool,
) -> Mixing:
    """Return the work of a block outside its matmuls, such as attention scores or a scan.

    Args:
        block: The block.
        context: Where the block is used.
        count: Number of layers.
        seq: Sequence length.
        product_flops: FLOPs per token of the block's matrix products, which are subtracted from its total.
        platform: Provides the padding of head dimensions (`lanes`) and the cost of attention over long sequences.
        is_result_needed: Whether the backward pass needs the result of the block.
    """
    named_activations = [
        activation
        for activation in block.saved_activations(context)
        if activation.name is not None and not activation.product
    ]
    axes = tuple(a for a in (block.activations[0] if block.activations else ()) if a not in (BATCH, SEQ))
    neighbours = tuple(block.neighbours(context))
    exchanged_halves = tuple(block.exchanged_halves(context)) if platform.attention == "splash" else ()
    flops = max(block.flops(context, seq) - product_flops, 0.0)
    name = named_activations[0].name if named_activations else None
    flops *= block.lane_padding(context, platform.lanes)
    if block.uses_wide_blocks(context, seq):
        flops *= platform.wide_attention_cost
    return Mixing(
        flops,
        block.scores(context, seq),
        0.0 if platform.attention is None else block.dense_scores(context, seq),
        axes,
        count,
        name,
        block.shards_rows_over_embed,
        neighbours,
        exchanged_halves,
        block.dispatches,
        tuple(block.dispatched_activations(context)),
        block.dispatch_work(context, seq),
        is_result_needed,
    )
