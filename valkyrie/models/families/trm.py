"""The Tiny Recursive Model (arXiv 2510.04871): one small network, applied many times, that improves an answer.

Two states of every position, z_H (the answer) and z_L (its reasoning), pass through the same few layers 21 times a step
of supervision; the gradient flows through the last seven. It is not a language model: its task is `puzzles`.
"""

# No `from __future__ import annotations` here: annotations of the module are checked in tests, and name local imports.

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from valkyrie.axes import SHARED_AXES, UNSHARDED, Arrays, Parameter, Shard, Size, Tensor
from valkyrie.models.block import BLOCK_INPUT, SavedActivation, tensor
from valkyrie.ops.choices import CONTEXT
from valkyrie.problems import Problem, ProblemCode, check_range

if TYPE_CHECKING:
    from jaxtyping import Array

    from valkyrie.ops.linear import Numerics


class MixerKind(Enum):
    """What mixes positions: attention of all of them (with rotary positions), or a gated product over the length."""

    attention = "attention"
    mlp = "mlp"


@dataclass
class Config:
    """A recursive model: `layers` blocks that are one network, of width `embed`, for puzzles of `context` cells.

    `vocab_size` counts what a cell may hold, 0 (padding) among it. `puzzles` rows of `puzzle_embed` numbers are
    learned, one for each puzzle identifier; it stands in `puzzle_tokens` positions before the cells. A step of
    supervision runs `high_cycles` cycles, each `low_cycles` updates of z_L and one of z_H, the last cycle with
    gradient. A puzzle is worked on for at most `max_steps` steps; with probability `exploration` it may not end before
    a number of them that is drawn from 2 to `max_steps`. `mlp` and `length_mlp` are the hidden sides of the gated
    products over the width and, with `mixer: mlp`, over the length.
    """

    task: ClassVar[str] = "puzzles"
    family: str = "trm"
    name: str = "trm"
    context: int = 81
    tokenizer: str = "none"
    vocab_size: int = 11
    embed: int = 512
    layers: int = 2
    mixer: MixerKind = MixerKind.attention
    heads: int = 8
    head_dim: int = 64
    mlp: int = 1536
    length_mlp: int = 512
    rope_theta: float = 10000.0
    norm_epsilon: float = 1e-5
    puzzles: int = 1
    puzzle_embed: int = 512
    puzzle_tokens: int = 16
    high_cycles: int = 3
    low_cycles: int = 6
    max_steps: int = 16
    exploration: float = 0.1
    dropout: float = 0.0

    @property
    def vocab_rows(self) -> int:
        """Rows of the token embedding."""
        return self.vocab_size

    @property
    def has_attention(self) -> bool:
        """Whether attention mixes positions, so that puzzles may have any length."""
        return self.mixer is MixerKind.attention

    @property
    def causal(self) -> bool:
        """Whether a position sees none after it: never."""
        return False

    @property
    def positions(self) -> int:
        """Positions of the states: those of the puzzle's identifier, then the cells."""
        return self.puzzle_tokens + self.context

    @property
    def forward_passes(self) -> int:
        """How often the network runs in a step of supervision."""
        return self.high_cycles * (self.low_cycles + 1)

    def problems(self) -> list[Problem]:
        least = dict.fromkeys(("context", "embed", "layers", "mlp", "puzzles", "high_cycles", "low_cycles"), 1)
        least |= {"max_steps": 1, "vocab_size": 2, "puzzle_tokens": 1, "puzzle_embed": 1}
        least |= {"heads": 1, "head_dim": 1} if self.has_attention else {"length_mlp": 1}
        problems = [
            problem
            for name, number in least.items()
            for problem in check_range(f"model.{name}", getattr(self, name), least=number)
        ]
        if self.has_attention and self.head_dim % 2:
            text = f"model.head_dim={self.head_dim} is odd: rotary positions need pairs."
            problems.append(Problem(ProblemCode.unsupported, "model.head_dim", self.head_dim, text))
        if self.puzzle_embed > self.puzzle_tokens * self.embed:
            room = self.puzzle_tokens * self.embed
            text = (
                f"model.puzzle_embed={self.puzzle_embed}: puzzle_tokens={self.puzzle_tokens} positions of embed="
                f"{self.embed} hold {room} numbers. Use model.puzzle_embed={room} or below."
            )
            problems.append(Problem(ProblemCode.conflict, "model.puzzle_embed", self.puzzle_embed, text))
        problems += check_range("model.exploration", self.exploration, least=0, most=1)
        if self.dropout:
            text = f"model.dropout={self.dropout}: a recursive model has no dropout. Use model.dropout=0."
            problems.append(Problem(ProblemCode.unsupported, "model.dropout", self.dropout, text))
        problems += check_range("model.norm_epsilon", self.norm_epsilon, least=0)
        return problems + check_range("model.rope_theta", self.rope_theta, above=0)

    def parameters(self) -> dict[str, Parameter]:
        sizes = self._sizes
        matrices: dict[str, tuple[str | int, ...]] = {
            "embedding": (self.vocab_size, "embed"),
            "head": (self.vocab_size, "embed"),
            "halt.weight": (2, "embed"),
            "halt.bias": (2,),
        }
        for i in range(self.layers):
            matrices |= {f"layer_{i}.{name}": dims for name, dims in self._of_layer().items()}
        parameters = {name: _parameter(dims, sizes) for name, dims in matrices.items()}
        for name in ("initial_high", "initial_low"):
            parameters[name] = _parameter(("embed",), sizes, group="fixed")
        table = Tensor((None, "embed"), (self.puzzles, self.puzzle_embed), ("model.puzzles", "model.puzzle_embed"))
        parameters["puzzle_embedding"] = Parameter(**vars(table), group="puzzle", float32=True)
        return dict(sorted(parameters.items(), key=lambda item: item[0].split(".")))

    def arrays(self) -> Arrays:
        """Return what a layout splits of it; rows of tables, and the length in its products, are never split."""
        parameters: dict[Tensor, list[str]] = {}
        for name, parameter in self.parameters().items():
            where = name.replace("layer_0.", "layer.", 1)
            if not name.startswith("layer_") or where != name:
                parameters.setdefault(Tensor(parameter.axes, parameter.shape, parameter.keys), []).append(where)
        axes = {**SHARED_AXES, "embed": "the width of a position", "mlp": "the hidden side of a gated product"}
        asked: list[tuple[str, ...]] = [("embed",), ("mlp",)]
        if self.has_attention:
            axes |= {"heads": "attention heads", "head_dim": "the width of one head"}
            asked.append(("heads", "head_dim"))
        activations = {}
        for dims in asked:
            found = tensor(("batch", "seq", *dims), self._sizes)
            whole = replace(found, shape=(0, self.positions, *found.shape[2:]))
            keyed = replace(whole, keys=(None, "model.puzzle_tokens", *found.keys[2:]))
            activations[keyed] = [f"activation (batch, seq, {', '.join(dims)})"]
        return Arrays(axes, parameters, activations)

    def parameter_count(self) -> int:
        """Return how many numbers the network learns, without its initial states and the rows of single puzzles."""
        return sum(p.size for p in self.parameters().values() if p.group == "matrix")

    def flops_per_token(self, seq: int) -> float:
        """Return forward FLOPs per cell of a step of supervision: all passes of the network, and the logits."""
        per_position = self._network_flops(seq + self.puzzle_tokens)
        return self.forward_passes * per_position * self._share(seq) + 2.0 * self.embed * self.vocab_size

    def step_flops_per_token(self, seq: int) -> float:
        """Return FLOPs per cell of a training step: all passes forward, and twice those of the last cycle backward."""
        backward = (self.low_cycles + 1) * self._network_flops(seq + self.puzzle_tokens) * self._share(seq)
        return self.flops_per_token(seq) + 2.0 * (backward + 2.0 * self.embed * self.vocab_size)

    def kept(self) -> list[SavedActivation]:
        """Return what the backward pass needs of the last cycle, by name where it has one; an estimate."""
        count = (self.low_cycles + 1) * self.layers
        return [replace(kept, count=kept.count * count) for kept in self._kept_of_layer()]

    def working(self) -> list[SavedActivation]:
        """Return what exists while one layer is worked on, and the logits; an estimate."""
        logits = SavedActivation(tensor(("batch", "seq", self.vocab_size), self._sizes), 4, float32=True)
        return [*self._kept_of_layer(), logits]

    def build(self, *, numerics: "Numerics", key: "Array") -> Any:
        """Return the module (`valkyrie.models.recursive_model.RecursiveModel`); imports JAX."""
        return recursive_model()(self, numerics=numerics, key=key)

    @property
    def _sizes(self) -> dict[str, Size]:
        names = ("embed", "mlp", "heads", "head_dim")
        return {name: Size(getattr(self, name), f"model.{name}") for name in names}

    def _of_layer(self) -> dict[str, tuple[str | int, ...]]:
        """Return the dimensions of a layer's matrices."""
        gated = dict.fromkeys(("down", "gate", "up"), ("embed", "mlp"))
        if self.has_attention:
            return {**gated, **dict.fromkeys(("key", "out", "query", "value"), ("embed", "heads", "head_dim"))}
        over_length = (self.positions, self.length_mlp)
        return {**gated, **{f"length_{name}": over_length for name in ("down", "gate", "up")}}

    def _network_flops(self, positions: int) -> float:
        """Return forward FLOPs per position of one pass of the network over so many positions."""
        feed_forward = 6.0 * self.embed * self.mlp
        heads = self.heads * self.head_dim
        attention = 8.0 * self.embed * heads + 4.0 * heads * positions
        over_length = 6.0 * self.embed * self.length_mlp
        return self.layers * (feed_forward + (attention if self.has_attention else over_length))

    def _share(self, seq: int) -> float:
        """Return how many positions there are for each cell."""
        return (seq + self.puzzle_tokens) / seq

    def _kept_of_layer(self) -> list[SavedActivation]:
        """Return what the backward pass of one layer needs; norms keep their input in float32."""

        def saved(*dims: str | int, count: int = 1, float32: bool = False, name: str | None = None) -> SavedActivation:
            named = name is not None and name not in (BLOCK_INPUT, CONTEXT)
            activation = tensor(("batch", "seq", *dims), self._sizes)
            return SavedActivation(activation, count, float32, name=name, product=named)

        kept = [saved("embed", name=BLOCK_INPUT), saved("embed", count=4, float32=True), saved("embed", count=2)]
        kept += [saved("mlp", name="up"), saved("mlp", name="gate"), saved("mlp", count=2), saved("embed", name="down")]
        if self.has_attention:
            kept += [saved("heads", "head_dim", name=name) for name in ("query", "key", "value")]
            kept += [saved("heads", "head_dim", count=3), saved("heads", self.positions, count=2, float32=True)]
            return [*kept, saved("embed", name="out")]
        rows = self.length_mlp / self.positions  # a hidden side is over the length, for each number of the width
        return [*kept, replace(saved("embed", count=4), count=4 * rows)]


def _parameter(dims: tuple[str | int, ...], sizes: Mapping[str, Size], group: str = "matrix") -> Parameter:
    return Parameter(**vars(tensor(dims, sizes)), group=group)


@cache
def recursive_model() -> Any:
    """Return the class of the module. It is made here, so that declarations are imported without JAX."""
    import jax
    import jax.numpy as jnp
    from flax import nnx
    from jax.ad_checkpoint import checkpoint_name
    from jaxtyping import Array, Float, Int

    from valkyrie.models.layers import Checkpoint, parameter, project
    from valkyrie.ops.linear import Numerics, lookup
    from valkyrie.ops.rotary import rotate
    from valkyrie.ops.ssm import truncated_normal

    class States(NamedTuple):
        """The two states of every position of a batch, in the compute dtype: the answer z_H and its reasoning z_L."""

        high: Float[Array, "batch seq embed"]
        low: Float[Array, "batch seq embed"]

    class Answers(NamedTuple):
        """What a step of supervision gives: float32 logits of every cell, and those of halting; the states after it."""

        logits: Float[Array, "batch cells vocab"]
        halt: Float[Array, " batch"]
        states: States

    class RecursiveLayer(nnx.Module):
        """A mixer of positions and a gated product, each followed by a norm of its residual sum without parameters."""

        def __init__(self, config: Config, specs: dict[str, Parameter], *, numerics: Numerics, key: Array) -> None:
            self.config, self.numerics = config, numerics
            fan_in = {"down": config.mlp, "out": config.heads * config.head_dim}
            fan_in |= dict.fromkeys(("length_gate", "length_up"), config.positions) | {"length_down": config.length_mlp}
            for (name, spec), k in zip(specs.items(), jax.random.split(key, len(specs)), strict=True):
                made = truncated_normal(k, spec.shape, fan_in.get(name, config.embed) ** -0.5)
                setattr(self, name, parameter(spec, made, numerics))

        def __call__(self, x: Float[Array, "batch seq embed"], shard: Shard) -> Float[Array, "batch seq embed"]:
            """Return the positions after this layer."""
            x = checkpoint_name(x, BLOCK_INPUT)
            if self.config.has_attention:
                x = self._normalised(x + self._attention(x, shard), -1)
            else:
                mixed = self._gated(x, "length_", "bse,sm->bme", "bme,sm->bse", shard)
                x = self._normalised(x + mixed, 1)  # over the length: the reference transposes before the norm
            mixed = self._gated(x, "", "bse,em->bsm", "bsm,em->bse", shard)
            return shard(self._normalised(x + mixed, -1), "batch", "seq", "embed")

        def _normalised(self, x: Array, axis: int) -> Array:
            wide = x.astype(jnp.float32)
            square = jnp.mean(jnp.square(wide), axis=axis, keepdims=True)
            return (wide * jax.lax.rsqrt(square + self.config.norm_epsilon)).astype(x.dtype)

        def _gated(self, x: Array, which: str, into: str, back: str, shard: Shard) -> Array:
            def of(name: str, equation: str, y: Array) -> Array:
                weights: nnx.Param = getattr(self, f"{which}{name}")
                known = None if which else name
                return project(equation, y, weights, shard=shard, numerics=self.numerics, name=known)

            up, gate = of("up", into, x), of("gate", into, x)
            if not which:
                up, gate = shard(up, "batch", "seq", "mlp"), shard(gate, "batch", "seq", "mlp")
            return of("down", back, jax.nn.silu(gate) * up)

        def _attention(self, x: Array, shard: Shard) -> Array:
            positions, theta = jnp.arange(x.shape[1]), self.config.rope_theta

            def weights(name: str) -> nnx.Param:
                return getattr(self, name)

            def of(name: str) -> Array:
                y = project("bse,ehd->bshd", x, weights(name), shard=shard, numerics=self.numerics)
                y = y if name == "value" else rotate(y, positions, theta, shard.backend)
                return checkpoint_name(shard(y, "batch", "seq", "heads", "head_dim"), name)

            query, key, value = of("query"), of("key"), of("value")
            with jax.named_scope(CONTEXT):
                mixed = jax.nn.dot_product_attention(query, key, value, implementation="xla")
            return project("bshd,ehd->bse", mixed, weights("out"), shard=shard, numerics=self.numerics, name="out")

    class Halt(nnx.Module):
        """The head that says whether a puzzle is solved; it begins at weight 0 and bias -5, which is no."""

        def __init__(self, specs: dict[str, Parameter], numerics: Numerics) -> None:
            weight, bias = specs["halt.weight"], specs["halt.bias"]
            self.weight = parameter(weight, jnp.zeros(weight.shape), numerics)
            self.bias = parameter(bias, jnp.full(bias.shape, -5.0), numerics)
            self.numerics = numerics

        def __call__(self, first: Float[Array, "batch embed"]) -> Float[Array, " batch"]:
            """Return the float32 logit of halting, of the first position; the second output is never used."""
            weight = self.weight[0].astype(self.numerics.compute)
            logit = jnp.einsum("be,e->b", first, weight, preferred_element_type=jnp.float32)
            return logit + self.bias[0].astype(jnp.float32)

    class RecursiveModel(nnx.Module):
        """The Tiny Recursive Model: `embed` a puzzle, then `__call__` is one step of supervision on given states."""

        def __init__(self, config: Config, *, numerics: Numerics, key: Array) -> None:
            specs, keys = config.parameters(), jax.random.split(key, 4)
            self.config, self.numerics = config, numerics
            deviation = config.embed**-0.5

            def initial(name: str, key: Array, deviation: float) -> nnx.Param:
                return parameter(specs[name], truncated_normal(key, specs[name].shape, deviation), numerics)

            self.embedding, self.head = initial("embedding", keys[0], deviation), initial("head", keys[1], deviation)
            self.halt = Halt(specs, numerics)
            first = jax.random.split(keys[2])
            self.initial_high, self.initial_low = (
                initial("initial_high", first[0], 1.0),
                initial("initial_low", first[1], 1.0),
            )
            table = specs["puzzle_embedding"]
            self.puzzle_embedding = parameter(table, jnp.zeros(table.shape), numerics)
            for i, k in enumerate(jax.random.split(keys[3], config.layers)):
                start = f"layer_{i}."
                own = {name.removeprefix(start): spec for name, spec in specs.items() if name.startswith(start)}
                setattr(self, start[:-1], RecursiveLayer(config, own, numerics=numerics, key=k))

        def embed(
            self, inputs: Int[Array, "batch cells"], puzzles: Int[Array, " batch"], *, shard: Shard = UNSHARDED
        ) -> Float[Array, "batch seq embed"]:
            """Return what the puzzles bring into every pass: the row of each identifier, then its cells, scaled."""
            c, axes = self.config, (None, "embed")
            cells = lookup(self.embedding[...], inputs, axes=axes, shard=shard, numerics=self.numerics)
            rows = lookup(self.puzzle_embedding[...], puzzles, axes=axes, shard=shard, numerics=self.numerics)
            used = -(-c.puzzle_embed // c.embed)  # the positions that a row reaches into
            rows = jnp.pad(rows, ((0, 0), (0, used * c.embed - c.puzzle_embed))).reshape(-1, used, c.embed)
            rows = jnp.pad(rows, ((0, 0), (0, c.puzzle_tokens - used), (0, 0)))
            scaled = jnp.asarray(c.embed**0.5, cells.dtype) * jnp.concatenate([rows, cells], axis=1)
            return shard(scaled, "batch", "seq", "embed")

        def initial(self, batch: int, cells: int, *, shard: Shard = UNSHARDED) -> States:
            """Return the states of puzzles that are begun: the same two vectors at every position, never learned."""
            shape = (batch, self.config.puzzle_tokens + cells, self.config.embed)

            def everywhere(vector: nnx.Param) -> Array:
                fixed = jax.lax.stop_gradient(vector[...]).astype(self.numerics.compute)
                return shard(jnp.broadcast_to(fixed, shape), "batch", "seq", "embed")

            return States(everywhere(self.initial_high), everywhere(self.initial_low))

        def __call__(
            self,
            states: States,
            x: Float[Array, "batch seq embed"],
            *,
            shard: Shard = UNSHARDED,
            checkpoint: Checkpoint = lambda block: block,
        ) -> Answers:
            """Return the answers after one step of supervision; the gradient flows through its last cycle alone.

            The states that come back carry no gradient to the next step.
            """
            graph, state = nnx.split(self)
            fixed = nnx.merge(graph, jax.tree.map(jax.lax.stop_gradient, state))
            states, still = jax.lax.stop_gradient(states), jax.lax.stop_gradient(x)

            def cycle(states: States, _: None) -> tuple[States, None]:
                return fixed._cycle(states, still, shard, lambda block: block), None

            if self.config.high_cycles > 1:
                states, _ = jax.lax.scan(cycle, states, None, length=self.config.high_cycles - 1)
            states = self._cycle(states, x, shard, checkpoint)
            head = self.head[...].astype(self.numerics.compute)
            answer = states.high[:, self.config.puzzle_tokens :]
            logits = jnp.einsum("bse,ve->bsv", answer, head, preferred_element_type=jnp.float32)
            return Answers(logits, self.halt(states.high[:, 0]), jax.lax.stop_gradient(states))

        def _cycle(self, states: States, x: Array, shard: Shard, checkpoint: Checkpoint) -> States:
            """Return the states after `low_cycles` updates of z_L and one of z_H."""

            def low(z: Array, _: None) -> tuple[Array, None]:
                return self._network(z, states.high + x, shard, checkpoint), None

            z_low, _ = jax.lax.scan(low, states.low, None, length=self.config.low_cycles)
            return States(self._network(states.high, z_low, shard, checkpoint), z_low)

        def _network(self, z: Array, injected: Array, shard: Shard, checkpoint: Checkpoint) -> Array:
            z = z + injected
            for i in range(self.config.layers):
                layer: RecursiveLayer = getattr(self, f"layer_{i}")
                z = checkpoint(lambda z, layer=layer: layer(z, shard))(z)
            return z

    return RecursiveModel
