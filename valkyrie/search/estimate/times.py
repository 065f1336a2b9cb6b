"""The step time of many layouts by closed formulas, part by part.

FLOPs and bytes are those that the blocks declare. The collectives of a product follow from the sharding of its operands
(GSPMD, arXiv 2105.04663): mesh axes that split the summed dimension leave partial results, which are summed; axes that
split an operand but not the parameter are gathered. A pipeline of p stages is idle for (p - 1)/(m + p - 1) of a step of
m microbatches, and interleaved rounds divide that (Megatron-LM, arXiv 2104.04473).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from valkyrie.axes import BATCH, LAYERS, SEQ, Parameter
from valkyrie.hardware.target import ChipConfig
from valkyrie.parallel.candidates import Candidates
from valkyrie.parallel.remat import ActivationLocation, RematConfig
from valkyrie.search.estimate.efficiency import Efficiency
from valkyrie.search.estimate.network import CollectiveModel
from valkyrie.search.estimate.work import Mixing, Product, Work

BACKWARD = 2.0
"""FLOPs of a product's backward pass over those of its forward pass: it has two products of the same size."""
MIXING_BACKWARD = 2.5
"""The same ratio for attention: five products to two (FlashAttention-2, arXiv 2307.08691)."""


@dataclass(frozen=True)
class Times:
    """Seconds per step by part, with one entry per layout. The parts add up to the step.

    Compute is `products`, `mixing` (attention scores, scans), `moving` (activations through HBM), `head`, `optimizer`,
    `launching` (starting operations, as far as it takes longer than they do), and the `bubble` of a pipeline. Waiting
    is for `weights` gathered, `gradients` summed, `activations` of tensor and sequence parallelism, `host` memory, and
    activations sent between `stages`.
    """

    parts: dict[str, np.ndarray]

    @cached_property
    def step_s(self) -> np.ndarray:
        """Seconds per step."""
        return np.sum(list(self.parts.values()), axis=0)


class Step:
    """Step times of layouts on a chip. Everything that does not depend on the remat policy is computed once."""

    def __init__(
        self, work: Work, layouts: Candidates, chip: ChipConfig, efficiency: Efficiency, network: CollectiveModel
    ) -> None:
        self.work, self.layouts = work, layouts
        self.efficiency, self.network = efficiency, network
        peak = max(chip.peak_tflops.get(name, 0.0) for name in ("bfloat16", work.run.config.precision.compute.value))
        self.peak = peak * 1e12 / chip.devices
        self.hbm = (chip.hbm_gbs or 1.0) * 1e9 / chip.devices * efficiency.hbm
        self.host = chip.host_gbs * 1e9
        self.rows = work.tokens / (layouts.parts(layouts.activations[BATCH]) * layouts.parts(layouts.activations[SEQ]))
        self.rows = self.rows / layouts.microbatches
        """Tokens of a device in a microbatch."""
        self.share = work.passes / layouts.stages
        """Share of all layers that a device has."""

    def under(self, remat: RematConfig) -> Times:
        """Return the parts of a step under a remat policy."""
        layouts, e = self.layouts, self.efficiency
        m, stages = layouts.microbatches, layouts.stages
        again = [product.is_remade(remat) for product in self.work.products]
        products = self.share * _total((1 + BACKWARD + a) * s for a, s in zip(again, self._products, strict=True))
        mixing, (moved, to_host) = self._mixing_under(remat), self._moved_under(remat)
        moving = moved / self.hbm * self.share
        computing = products + mixing + moving
        launches = [(1 + BACKWARD + a) * p.count for a, p in zip(again, self.work.products, strict=True)]
        launching = e.launch_s * sum(launches) * self.share
        activations = self._activations_under(remat, again)
        gathered, summed = self._weights, self._gradients
        waiting = {
            "activations": _exposed(activations, computing, e.hidden_activations),
            "weights": _exposed(gathered, computing, e.hidden_weights),
            "gradients": _exposed(summed / m, computing, e.hidden_gradients),
            "host": _exposed(2 * to_host * self.share / self.host, computing, e.hidden_host),
        }
        of_stage = computing + waiting["activations"] + waiting["weights"]
        parts = {name: m * seconds for name, seconds in {"products": products, "mixing": mixing}.items()}
        parts |= {"moving": m * moving, "head": m * self._head}
        parts |= {name: m * seconds for name, seconds in waiting.items()}
        parts["gradients"] = parts["gradients"] + self._updated * (1 - e.hidden_updates)
        parts["launching"] = m * np.maximum(launching - of_stage, 0.0)
        idle = (stages - 1) / layouts.rounds
        parts["bubble"] = idle * np.maximum(of_stage, launching)
        parts["stages"] = np.where(stages > 1, (m + stages - 1) * self._handed_on * (1 - e.hidden_stages), 0.0)
        if layouts.shares_loss:
            parts["stages"] = parts["stages"] + np.where(stages > 1, self._over_stages, 0.0)
        parts["optimizer"] = self._optimizer
        return Times(parts)

    @cached_property
    def _products(self) -> list[np.ndarray]:
        """Seconds of each product with a parameter of a block, once per microbatch."""
        return [product.count * self._product(product) for product in self.work.products]

    def _product(self, product: Product) -> np.ndarray:
        k, n = float(product.k), float(product.n)
        for axis, length in product.reads:
            k = k / self.layouts.split(axis, "used", length)
        for axis, length in product.makes:
            n = n / self.layouts.split(axis, "used", length)
        passes = self.efficiency.float32_passes if product.float32 else 1.0
        return product.numbers * passes * self._matrix(self.rows, np.asarray(k), np.asarray(n))

    def _matrix(self, rows: np.ndarray, k: np.ndarray, n: np.ndarray) -> np.ndarray:
        """Return the seconds of a product of these sizes: at the matrix unit's rate in whole tiles, or at HBM's."""
        e, flops = self.efficiency, 2.0 * rows * k * n
        padded = _tiles(k, e.tile) * _tiles(n, e.tile)
        rate = self.peak * e.products * padded * flops / (flops + e.half_rate_flops)
        bytes_ = self.work.itemsize * (rows * k + k * n + rows * n)
        return np.maximum(flops / rate, bytes_ / self.hbm)

    @cached_property
    def _head(self) -> np.ndarray:
        """Seconds of the logits, forward and backward, which the stages of a pipeline may share."""
        model = self.work.run.model
        rows = self.rows / self._loss_rows() / (self.layouts.stages if self.layouts.shares_loss else 1)
        n = model.vocab_rows / self.layouts.split("vocab", "used", model.vocab_rows)
        k = np.full(len(self.layouts), float(self.work.embed))
        logits = 4.0 * 2 * rows * n / self.hbm
        return (1 + BACKWARD) * self._matrix(rows, k, np.asarray(n)) + self.efficiency.logits_passes * logits

    def _loss_rows(self) -> np.ndarray:
        """Return the number of parts of the loss's positions: axes split them that split `embed` but not `vocab`."""
        free = [a for a in self.layouts.activations["embed"] if a not in self.layouts.activations["vocab"]]
        return self.layouts.parts(free)

    def _mixing_under(self, remat: RematConfig) -> np.ndarray:
        """Return the seconds of attention scores and scans in forward, recomputation and backward."""
        again = [remat.location(mixing.name) is ActivationLocation.nowhere for mixing in self.work.mixing]
        flops = _total((1 + MIXING_BACKWARD + a) * n for a, n in zip(again, self._mixing_flops, strict=True))
        scores = _total((1 + BACKWARD + a) * n for a, n in zip(again, self._scores, strict=True))
        moved = self.work.itemsize * self.efficiency.scores_passes * scores
        return self.share * (flops / (self.peak * self.efficiency.mixing) + moved / self.hbm)

    @cached_property
    def _mixing_flops(self) -> list[np.ndarray]:
        return [mixing.count * mixing.flops * self.rows / self._mixing_parts(mixing) for mixing in self.work.mixing]

    @cached_property
    def _scores(self) -> list[np.ndarray]:
        return [mixing.count * mixing.scores * self.rows / self._mixing_parts(mixing) for mixing in self.work.mixing]

    def _mixing_parts(self, mixing: Mixing) -> np.ndarray:
        of = self.layouts.activations
        split = [a for axis in mixing.axes for a in of[axis]]
        free = [a for a in of["embed"] if a not in split] if mixing.over_rows else []
        return self.layouts.parts(tuple(dict.fromkeys([*split, *free])))

    def _moved_under(self, remat: RematConfig) -> tuple[np.ndarray, np.ndarray]:
        """Return the bytes of activations that go through HBM, in all passes, and of those that go to the host."""
        e, moved, to_host = self.efficiency, np.zeros(len(self.layouts)), np.zeros(len(self.layouts))
        for (kept, _), bytes_ in zip(self.work.moved, self._moved, strict=True):
            place = remat.location(kept.name, product=kept.product)
            moved = moved + bytes_ * (
                e.passes + (e.passes_again if place is ActivationLocation.nowhere else e.passes_kept)
            )
            to_host = to_host + (bytes_ if place is ActivationLocation.host else 0.0)
        return moved, to_host

    @cached_property
    def _moved(self) -> list[np.ndarray]:
        """Bytes of each kind of activation in a microbatch."""
        each = []
        for kept, count in self.work.moved:
            numbers = kept.count * count * self.rows
            for axis, length in zip(kept.tensor.axes[2:], kept.tensor.shape[2:], strict=True):
                numbers = numbers * length / self.layouts.split(axis, "active", length)
            each.append(numbers * (4 if kept.float32 else self.work.itemsize))
        return each

    def _activations_under(self, remat: RematConfig, again: Sequence[bool]) -> np.ndarray:
        """Return the seconds of activation collectives of products and mixing in a microbatch."""
        sent = zip(again, self._sent_by_products, strict=True)
        seconds = _total((1 + a) * f + b + (0 if a else anew) for a, (f, b, anew) in sent)
        for mixing, sent in zip(self.work.mixing, self._sent_by_mixing, strict=True):
            seconds = seconds + mixing.count * (2 + (remat.location(mixing.name) is ActivationLocation.nowhere)) * sent
        return seconds * self.share + self._table_collectives

    @cached_property
    def _sent_by_products(self) -> list[tuple[np.ndarray, ...]]:
        operands, each = set[tuple[object, ...]](), []
        for product in self.work.products:
            seconds = self._sent_by(product, product.operand not in operands)
            operands.add(product.operand)
            each.append(tuple(product.count * part for part in seconds))
        return each

    @cached_property
    def _sent_by_mixing(self) -> list[np.ndarray]:
        return [self._neighbours(mixing) for mixing in self.work.mixing]

    def _sent_by(self, product: Product, first: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the seconds of the collectives around a product: forward, backward, and repeated gathers.

        Scattered gradients of the result are gathered both for the gradient of the operand and for that of the
        parameter. The latter also needs the gathered operand: the third result is the time to gather it again, unless a
        recomputation has done so. `first` if no earlier product has gathered the same operand.
        """
        layouts, network = self.layouts, self.network
        reading = [(a, n, layouts.activations[a], layouts.used(a)) for a, n in product.reads]
        making = [(a, n, layouts.activations[a], layouts.used(a)) for a, n in product.makes]
        width = 4 if product.float32 else self.work.itemsize
        read = self.rows * width * product.numbers
        for axis, n, _, _ in reading:
            read = read * n / layouts.split(axis, "used", n)
        made = self.rows * width * product.numbers
        for axis, n, _, _ in making:
            made = made * n / layouts.split(axis, "used", n)
        gathered = [m for _, _, active, used in reading for m in active if m not in used]
        summed = [m for _, _, _, used in reading for m in used]
        scattered = [m for _, _, active, used in making for m in active if m in summed]
        summed = [m for m in summed if m not in scattered]
        back_summed = [m for _, _, _, used in making for m in used]
        back_scattered = [m for m in gathered if m in back_summed]
        back_summed = [m for m in back_summed if m not in back_scattered]
        forward = network.sum(layouts, summed, made) + network.scatter(layouts, scattered, made, one_ring=True)
        windowed = self.efficiency.windowed
        backward = (1 + windowed) * network.gather(layouts, scattered, made, one_ring=True)
        anew = np.zeros(len(layouts))
        if first:
            gather = network.gather(layouts, gathered, read, one_ring=True)
            forward, anew = forward + gather, windowed * gather
        if first or self.efficiency.apart > 0:
            backward = backward + network.sum(layouts, back_summed, read)
            backward = backward + network.scatter(layouts, back_scattered, read, one_ring=True)
        for axes, other in ((product.reads, made), (product.makes, read)):
            backward = backward + sum(self._whole_batches(axis, other) for axis, _ in axes)
        return forward, backward, anew

    def _whole_batches(self, logical: str, other: np.ndarray) -> np.ndarray:
        """Return the seconds of gathering a product's other side over data axes for the gradient of its parameter.

        XLA does this if an axis of the parameter is split over both kinds of mesh axes, those that split data and those
        that do not, because it cannot scatter a sum within a part.
        """
        layouts, stored = self.layouts, self.layouts.stored(logical)
        data = tuple(axis for axis in stored if axis in layouts.data)
        parts = layouts.parts(data)
        both = (parts > 1) & (layouts.parts(layouts.used(logical)) > 1)
        seconds = self.network.gather(layouts, data, other * parts)
        return np.where(both, self.efficiency.whole_batches * seconds, 0.0)

    def _neighbours(self, mixing: Mixing) -> np.ndarray:
        """Return the seconds that a block needs to fetch activations from other shards of the sequence."""
        layouts, axes = self.layouts, self.layouts.activations[SEQ]
        seconds, seq = np.zeros(len(layouts)), self.work.run.config.seq
        for kept, positions in mixing.neighbours:
            width = kept.count * (4 if kept.float32 else self.work.itemsize)
            for axis, n in zip(kept.tensor.axes[2:], kept.tensor.shape[2:], strict=True):
                width = width * n / layouts.split(axis, "active", n)
            per_position = width * self.rows / (seq / layouts.parts(axes))
            if positions is None:
                seconds += self.network.gather(layouts, axes, per_position * seq)
            else:
                seconds += self.network.exchange(layouts, axes, per_position * min(positions, seq))
        return seconds

    @cached_property
    def _table_collectives(self) -> np.ndarray:
        """Seconds of summing over the vocabulary: looked-up rows, and the gradient of the last hidden states."""
        layouts, vocab = self.layouts, self.layouts.used("vocab")
        stream = self.rows * self.work.embed * self.work.itemsize
        free = [a for a in layouts.activations["embed"] if a not in layouts.activations["vocab"]]
        rows = stream / layouts.parts(free)
        return 2 * self.network.sum(layouts, vocab, rows)

    @cached_property
    def _weights(self) -> np.ndarray:
        """Seconds of gathering parameters that are stored split over data axes, forward and backward."""
        seconds, itemsize = np.zeros(len(self.layouts)), self.work.itemsize
        for spec in self.work.parameters.values():
            axes = self._gathered_axes(spec)
            if axes:
                seconds += 2 * self.network.gather(self.layouts, axes, self.layouts.shard(spec, "used") * itemsize)
        return seconds

    @cached_property
    def _gradients(self) -> np.ndarray:
        """Seconds of summing gradients over data axes, in all microbatches.

        A pipeline sums them once, after its last microbatch. ZeRO-1 scatters gradients that are otherwise summed whole.
        """
        layouts, seconds = self.layouts, np.zeros(len(self.layouts))
        itemsize = self.work.run.config.precision.reduction.itemsize
        for spec in self.work.parameters.values():
            split, stored = self._gathered_axes(spec), [m for axis in spec.axes for m in layouts.stored(axis)]
            # No sum over data axes that split the parameter: they scatter it, or its shard gets all dispatched tokens.
            rest = tuple(axis for axis in layouts.data if axis not in stored)
            bytes_ = self.layouts.shard(spec, "used") * itemsize
            seconds += self.network.scatter(layouts, split, bytes_)
            scattered = layouts.partition.zero1 and not self.efficiency.whole_sums
            reduce = self.network.scatter if scattered else self.network.sum
            seconds += reduce(layouts, rest, bytes_ / layouts.parts(split))
        piped = layouts.stages > 1
        ticks = np.where(self.efficiency.loop_sums > 0, layouts.microbatches + layouts.stages - 1, 1)
        times = np.where(piped, ticks, layouts.microbatches)
        return seconds * np.where(layouts.sums_once, 1, times)

    @cached_property
    def _over_stages(self) -> np.ndarray:
        """Seconds of the communication of a pipeline once per step, in addition to that between stages.

        The stream of all microbatches goes to the first stage, from the last stage to all, and back. Gradients of
        parameters outside the layers are summed over the stages.
        """
        layouts, axes = self.layouts, self.layouts.parameters.get(LAYERS, ())
        width = self.work.embed / layouts.split("embed", "active", self.work.embed)
        stream = self.rows * layouts.microbatches * width * self.work.itemsize
        seconds = 4 * (layouts.stages - 1) * self.network.exchange(layouts, axes, stream / layouts.stages)
        itemsize = self.work.run.config.precision.reduction.itemsize
        whole = [spec for spec in self.work.parameters.values() if LAYERS not in spec.axes]
        return seconds + self.network.sum(
            layouts, axes, itemsize * _total(self.layouts.shard(spec, "used") for spec in whole)
        )

    @cached_property
    def _updated(self) -> np.ndarray:
        """Seconds of gathering the parameters that ZeRO-1 updated in parts, once per step."""
        seconds = np.zeros(len(self.layouts))
        if self.layouts.partition.zero1:
            for spec in self.work.parameters.values():
                bytes_ = 4 * self.layouts.shard(spec, "used") / self.layouts.parts(self._gathered_axes(spec))
                seconds += self.network.gather(self.layouts, self.layouts.spread(spec.axes), bytes_, one_ring=True)
        return seconds

    def _gathered_axes(self, spec: Parameter) -> tuple[str, ...]:
        return tuple(m for axis in spec.axes for m in self.layouts.gathered(axis))

    @cached_property
    def _handed_on(self) -> np.ndarray:
        """Seconds of sending a microbatch to the next stage, forward and backward."""
        layouts = self.layouts
        width = self.work.embed / layouts.split("embed", "active", self.work.embed)
        bytes_, axes = self.rows * width * self.work.itemsize, layouts.parameters.get(LAYERS, ())
        if layouts.sends_parts:
            split = (*axes, *layouts.data, *layouts.activations["embed"])
            alike = [axis for axis in layouts.sizes if axis not in split]
            sent = self.network.exchange(layouts, axes, bytes_ / layouts.parts(alike))
            return 2 * layouts.rounds * (sent + self.network.gather(layouts, alike, bytes_))
        return 2 * layouts.rounds * self.network.exchange(layouts, axes, bytes_)

    @cached_property
    def _optimizer(self) -> np.ndarray:
        """Seconds of the optimizer's step: its bytes at HBM's rate, and its products at the matrix unit's."""
        # TODO: count Muon's two exchanges of matrices in the compute dtype. XLA makes an all-to-all, a gather or a
        # slice of each, by how the matrix is stored, and no closed form of that choice has been checked.
        config = self.work.run.config.optimizer
        bytes_ = np.zeros(len(self.layouts))
        for spec in self.work.parameters.values():
            bytes_ += config.update_bytes(spec) * self.layouts.state_shard(spec)
        flops = config.update_flops(self.work.parameters.values(), self.layouts.devices)
        return bytes_ / self.hbm + flops / (self.peak * self.efficiency.products)


def _total(arrays: Iterable[np.ndarray]) -> np.ndarray:
    return functools.reduce(np.add, arrays)


def _exposed(sent: np.ndarray, computing: np.ndarray, hidden: float) -> np.ndarray:
    """Return the exposed seconds of communication. At most the share `hidden` overlaps, if there is enough compute."""
    return np.maximum((1 - hidden) * sent, sent - computing)


def _tiles(length: np.ndarray, tile: float) -> np.ndarray:
    """Return the share of whole tiles that a length fills."""
    return length / (np.ceil(length / tile) * tile)
