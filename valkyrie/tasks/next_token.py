"""Next-token prediction over packed documents: cross-entropy per token, and bits per byte in evaluation.

Only functions that compute import JAX, because runs are checked before JAX loads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from valkyrie.axes import Shard
from valkyrie.models.block import Block
from valkyrie.models.stack import Stack
from valkyrie.problems import Problem, ProblemCode
from valkyrie.tasks import Array, BatchLoss, Task

if TYPE_CHECKING:
    import jax
    import numpy as np

    from valkyrie.data.tokenizer import Tokenizer
    from valkyrie.models.language_model import LanguageModel, Losses
    from valkyrie.models.layers import Checkpoint

    Batch = dict[str, jax.Array]

_DTYPES = {"tokens": "int32", "targets": "int32", "segment_ids": "int32", "weights": "float32"}


def token_losses(
    module: LanguageModel, batch: Batch, *, shard: Shard, checkpoint: Checkpoint, key: jax.Array | None
) -> Losses:
    """Return the losses of a batch with the arrays `tokens`, `targets`, `segment_ids` and `weights`, each (batch, seq).

    See `Task.loss` for the other arguments.
    """
    x = module.embed(batch["tokens"], shard=shard)
    boundaries = module.boundaries(batch["segment_ids"], batch["tokens"])
    targets = batch["targets"], batch["weights"]
    return module.losses(x, boundaries, *targets, shard=shard, checkpoint=checkpoint, key=key)


def _find_causal_setting(key: str, mixer: Block) -> str | None:
    """Return a setting such as `model.s5.bidirectional=false` that makes a mixer causal. None if no bool setting does.

    `key` is the configuration key of the mixer.
    """
    for name in (field.name for field in fields(mixer) if isinstance(getattr(mixer, field.name), bool)):
        value = not getattr(mixer, name)
        if replace(mixer, **{name: value}).is_causal:
            return f"{key}.{name}={str(value).lower()}"
    return None


@dataclass
class Config(Task):
    """Predicts each token from the previous ones. Losses are averaged over tokens."""

    name: str = "next_token"
    family: str = "next_token"

    def problems(self, model: Any, seq: int) -> list[Problem]:
        """Return problems if the model is not causal or supports fewer than `seq` positions."""
        max_seq, problems = getattr(model, "max_seq", seq), []
        if not model.causal:
            cause, remedies = "", [f"task={model.task}"]
            mixers = model.used_mixers if isinstance(model, Stack) else {}
            if mixers := {f"model.{kind}": mixer for kind, mixer in mixers.items() if not mixer.is_causal}:
                cause = f" because of {' and '.join(mixers)}"
                settings = [_find_causal_setting(key, mixer) for key, mixer in mixers.items()]
                remedies = [setting or "other mixers in model.block_pattern" for setting in settings]
            text = (
                f"model={model.name} is not causal{cause}, but task={self.name} needs a causal model. Use "
                f"{' and '.join(dict.fromkeys(remedies))}, or mode=show."
            )
            problems.append(Problem(ProblemCode.unsupported, "model", model.name, text))
        if seq > max_seq:
            text = f"seq={seq}: model={model.name} has {max_seq} positions. Use seq={max_seq}, or model.context={seq}."
            problems.append(Problem(ProblemCode.conflict, "seq", seq, text))
        return problems

    def batch(self, batch: int, seq: int) -> dict[str, Array]:
        """Return the shape (batch, seq), the dtype and the logical axes of each array in a global batch, by name."""
        return {name: Array((batch, seq), dtype, ("batch", "seq")) for name, dtype in _DTYPES.items()}

    def random_batch(
        self, batch: int, seq: int, vocab_size: int, seed: int, places: Sequence[int]
    ) -> dict[str, np.ndarray]:
        """Return the rows with indices `places` of a global batch of random tokens. Each row is one document."""
        import numpy as np

        rows = [np.random.default_rng([seed, place]).integers(0, vocab_size, seq + 1) for place in places]
        tokens = np.stack(rows).astype(np.int32)
        shape = (len(tokens), seq)
        constants = {"segment_ids": np.zeros(shape, np.int32), "weights": np.ones(shape, np.float32)}
        return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], **constants}

    def loss(
        self,
        module: Any,
        batch: Batch,
        carry: Any,
        *,
        shard: Shard,
        checkpoint: Checkpoint,
        key: jax.Array | None,
    ) -> BatchLoss:
        """Return the objective (with z-loss and auxiliary losses), the sums, and the unchanged carry.

        The sums are `loss` (nats, cross-entropy only), `weight` (targets) and the auxiliary values of the model's
        blocks.
        """
        losses = token_losses(module, batch, shard=shard, checkpoint=checkpoint, key=key)
        sums = {"loss": losses.loss_sum, "weight": losses.weight_sum, **losses.auxiliary}
        return BatchLoss(losses.objective_sum, sums, carry)

    def metrics(self, sums: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Return `loss` (nats per token), `tokens`, and the means of the auxiliary values of the model's blocks."""
        import jax.numpy as jnp

        weight = jnp.maximum(sums["weight"], 1.0)
        return {name: total / weight for name, total in sums.items() if name != "weight"} | {"tokens": sums["weight"]}

    def references(self, tokenizer: Tokenizer | None, vocab_rows: int) -> np.ndarray:
        """Return the length of each token in bytes, shape (vocab_rows,). It is 0 for special tokens and padding."""
        import numpy as np

        assert tokenizer is not None, "text has a tokenizer"
        lengths = np.zeros(vocab_rows, np.float32)
        lengths[: tokenizer.vocab_size] = tokenizer.token_bytes
        return lengths

    def evaluate(self, module: Any, batch: Batch, references: Any, *, shard: Shard) -> dict[str, jax.Array]:
        """Return sums: `loss` (nats) and `weight` over all targets, `nats` and `bytes` over targets that are text.

        Special tokens and padding are not text. `references` has the length of each token in bytes.
        """
        import jax.numpy as jnp

        losses = token_losses(module, batch, shard=shard, checkpoint=lambda block: block, key=None)
        length = references[batch["targets"]] * batch["weights"]
        return {
            "loss": losses.loss_sum,
            "weight": losses.weight_sum,
            "nats": jnp.sum(losses.per_token * (length > 0)),
            "bytes": jnp.sum(length),
        }

    def evaluation(self, sums: dict[str, float]) -> dict[str, float]:
        """Return `eval_loss` (nats per target), `eval_bits_per_byte` and `eval_tokens`."""
        return {
            "eval_loss": sums["loss"] / sums["weight"],
            "eval_bits_per_byte": sums["nats"] / (math.log(2) * max(sums["bytes"], 1.0)),
            "eval_tokens": sums["weight"],
        }

    def describe(self, evaluation: dict[str, float]) -> str:
        """Return one line with the loss, the bits per byte and the number of tokens."""
        loss, bits = evaluation["eval_loss"], evaluation["eval_bits_per_byte"]
        return f"validation loss {loss:.4f}, {bits:.4f} bits per byte over {evaluation['eval_tokens']:,.0f} tokens"
