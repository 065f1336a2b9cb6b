"""The Tiny Recursive Model and its task against the published reference, and what a training carries and restores."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import compose_run, make_program, named
from valkyrie.axes import UNSHARDED
from valkyrie.optim import make_optimizer
from valkyrie.run import Run

GOLDEN = Path(__file__).parent / "goldens" / "trm.npz"
REFERENCE = ("model.context=9", "model.vocab_size=7", "model.embed=8", "model.heads=2", "model.head_dim=4")
REFERENCE += ("model.mlp=256", "model.length_mlp=256", "model.puzzles=4", "model.puzzle_embed=12", "batch=5")
REFERENCE += ("model.puzzle_tokens=3", "model.high_cycles=3", "model.low_cycles=6", "model.exploration=0", "mesh=1x1x1")
REFERENCE += ("partition=dp", "precision=float32", "model=trm_tiny")
VARIANTS = {"attention": ("model.layers=2",), "mlp": ("model.layers=1", "model.mixer=mlp")}
FLAT = ("optimizer.warmup_steps=0", "optimizer.final_ratio=1", "optimizer.clip_norm=null")
TINY = ("model=trm_tiny", "model.embed=32", "model.mlp=32", "model.layers=1", "model.heads=2", "batch=8", "seq=16")
TINY += ("optimizer=adam_atan2", "optimizer.warmup_steps=0", "optimizer.learning_rate=1e-2")


@lru_cache
def golden(variant: str) -> dict[str, np.ndarray]:
    """What the reference was given and answered for one variant."""
    with np.load(GOLDEN) as archive:
        return {name.removeprefix(f"{variant}."): archive[name] for name in archive if name.startswith(f"{variant}.")}


def ours(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The reference's arrays by our names, in our shapes: fused projections apart, inputs first."""
    table = {name.removeprefix("weights."): value.astype(np.float32) for name, value in weights.items()}
    heads = (2, 4)
    found = {"embedding": table["embed_tokens.embedding_weight"], "head": table["lm_head.weight"]}
    found |= {"halt.weight": table["q_head.weight"], "halt.bias": table["q_head.bias"]}
    found |= {"initial_high": table["H_init"], "initial_low": table["L_init"]}
    found |= {"puzzle_embedding": table["puzzle_emb.weights"]}
    for name, value in table.items():
        layer = f"layer_{name.split('.')[2]}." if name.startswith("L_level") else ""
        length = "length_" if ".mlp_t." in name else ""
        if "gate_up" in name:
            gate, up = np.split(value, 2)
            found |= {f"{layer}{length}gate": gate.T, f"{layer}{length}up": up.T}
        elif "down" in name:
            found[f"{layer}{length}down"] = value
        elif "qkv" in name:
            parts = zip(("query", "key", "value"), np.split(value, 3), strict=True)
            found |= {f"{layer}{part}": w.T.reshape(-1, *heads) for part, w in parts}
        elif "o_proj" in name:
            found[f"{layer}out"] = value.reshape(-1, *heads)
    return found


def reference_run(variant: str, *overrides: str) -> Run:
    """The run whose model has the shape of the reference's."""
    return compose_run(*REFERENCE, *VARIANTS[variant], *FLAT, *overrides)


def batch_of(told: dict[str, np.ndarray], step: int) -> dict[str, np.ndarray]:
    """The batch of one of the reference's steps."""
    names = {"inputs": "inputs", "labels": "labels", "puzzles": "puzzle_identifiers"}
    return {name: told[f"step_{step}.batch.{theirs}"].astype(np.int32) for name, theirs in names.items()}


@pytest.mark.parametrize("variant", VARIANTS)
def test_two_steps_are_those_of_the_reference(variant: str):
    told, run = golden(variant), reference_run(variant)
    program = make_program(run)
    weights = ours({name: value for name, value in told.items() if name.startswith("weights.")})
    leaves = [jnp.asarray(weights[name]) for name in program.parameter_names]
    parameters = jax.tree.unflatten(jax.tree.structure(program.abstract_state.parameters), leaves)
    carry = program.init(0).carry

    @jax.jit
    def step(carry: Any, batch: Any) -> Any:
        def loss(parameters: Any) -> Any:
            module, key = program.assembly.module(parameters), jax.random.key(0)
            out = program.task.loss(module, batch, carry, shard=UNSHARDED, checkpoint=lambda f: f, key=key)
            return out.objective, out

        return jax.grad(lambda p: loss(p), has_aux=True)(parameters)

    for number in (1, 2):
        gradients, out = step(carry, batch_of(told, number))
        expected = {name.removeprefix(f"step_{number}."): value for name, value in told.items()}
        carry = out.carry
        close = {"rtol": 2e-5, "atol": 2e-5}
        np.testing.assert_allclose(out.objective, expected["loss"], rtol=2e-6)
        np.testing.assert_allclose(out.sums["answer_loss"], expected["lm_loss"], rtol=2e-6)
        np.testing.assert_allclose(carry["high"], expected["z_H"], **close)
        np.testing.assert_allclose(carry["low"], expected["z_L"], **close)
        np.testing.assert_array_equal(carry["steps"], expected["steps"])
        np.testing.assert_array_equal(~carry["running"], expected["halted"])
        ours_by_norm = {name: np.linalg.norm(g) / 5 for name, g in named(gradients).items()}
        assert ours_by_norm["initial_high"] == ours_by_norm["initial_low"] == 0
        for name, norm in norms_of(expected).items():
            found = np.sqrt(sum(ours_by_norm[part] ** 2 for part in parts_of(name)))
            np.testing.assert_allclose(found, norm, rtol=5e-5, err_msg=name)
        rows = updated(gradients["puzzle_embedding"], parameters["puzzle_embedding"])
        np.testing.assert_allclose(rows, expected["table_after"], rtol=1e-6)


def norms_of(expected: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name.removeprefix("gradient."): n for name, n in expected.items() if name.startswith("gradient.")}


def parts_of(name: str) -> list[str]:
    """Our parameters that hold one of the reference's."""
    shapes = {"weight": np.zeros((24, 8)), "bias": np.zeros(2)}
    blank = {n: np.zeros(1) for n in ("H_init", "L_init", "puzzle_emb.weights", "embed_tokens.embedding_weight")}
    blank |= {n: np.zeros(1) for n in ("lm_head.weight", "q_head.weight", "q_head.bias")}
    before = set(ours(blank))
    special = {"embed_tokens.embedding_weight": "embedding", "lm_head.weight": "head", "q_head.weight": "halt.weight"}
    special |= {"q_head.bias": "halt.bias"}
    if name in special:
        return [special[name]]
    return sorted(set(ours(blank | {name: shapes["weight"]})) - before)


def updated(gradient: Any, table: Any) -> Any:
    """A table after one step of sign descent, as the golden's: rate 0.01, decay 0.5."""
    run = compose_run("model=trm_tiny", *FLAT, "optimizer.learning_rate=0.01", "optimizer.weight_decay=0.5")
    optimizer = make_optimizer(run.config.optimizer, 10, {"table": "puzzle"})
    updates, _ = optimizer.update({"table": gradient}, optimizer.init({"table": table}), {"table": table})
    return table + updates["table"]
