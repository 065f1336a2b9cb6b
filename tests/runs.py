"""Tiny training runs, started in this process or a subprocess, and their results."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from functools import lru_cache
from pathlib import Path
from typing import Any

import absl.logging
import jax
import numpy as np
import pytest

from valkyrie.checkpoint import CheckpointConfig, Checkpoints, latest_step
from valkyrie.cli.train import run
from valkyrie.code_eval.sandbox import sandbox_problem
from valkyrie.runs.tracking import read_metrics

jax.devices()  # the backend starts with the devices of the tests, not with those of the first run's mesh

TINY_ARGUMENTS = (
    "model=s5_tiny",
    "model.layers=1",
    "model.embed=16",
    "model.mlp=16",
    "model.s5.state_size=8",
    "model.s5.blocks=1",
    "model.loss_chunk=32",
    "batch=8",
    "seq=16",
    "data=synthetic",
    "data.documents=60",
    "data.mean_length=60",
    "data.states=8",
    "optimizer.warmup_steps=2",
    "eval_every=1000",
    "eval_batches=1",
    "log_every=1",
    "sample_tokens=0",
    "prompt=a",
    "tracking=off",
)
"""Arguments of a training run so small that it spends most of its time compiling."""
ONE_DEVICE_ARGUMENTS = ("mesh=1x1x1", "partition=dp")

# The sandbox needs Linux namespaces, which some containers forbid. The refusal that users get there is tested on every
# machine (`test_code_eval.py`).
needs_sandbox = pytest.mark.skipif(sandbox_problem() is not None, reason=f"no sandbox: {sandbox_problem()}")


def run_train(*arguments: str) -> int:
    """Run `valkyrie-train` in this process and return its exit status. Output is not captured."""
    absl.logging.get_absl_handler().python_handler.stream = sys.__stderr__  # Hydra closes any other, here pytest's own
    original_argv = sys.argv
    sys.argv = ["valkyrie-train", *arguments]
    try:
        run()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    finally:
        sys.argv = original_argv
        jax.config.update("jax_debug_nans", False)
    return 0


def start_python(*arguments: str, cwd: Path, **environment: str) -> subprocess.Popen[str]:
    """Start Python with these arguments and extra environment variables. Its output goes to pipes."""
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def start_training(*arguments: str, cwd: Path, **environment: str) -> subprocess.Popen[str]:
    """Start `valkyrie-train` in a new process with its output in pipes.

    The process does not ignore SIGHUP, even if the tests run under nohup.
    """
    original_handler = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # a process inherits what its parent ignores
    try:
        return start_python(
            "-W", "ignore::SyntaxWarning", "-m", "valkyrie.cli.train", *arguments, cwd=cwd, **environment
        )
    finally:
        signal.signal(signal.SIGHUP, original_handler)


def training_records(folder: Path) -> dict[int, dict[str, Any]]:
    """Return the training records of a run by step. For a repeated step, this is the last record."""
    return {r["step"]: r for r in read_metrics(folder / "metrics.jsonl") if "loss" in r}


def saved_arrays(folder: Path, step: int | None = None) -> dict[str, np.ndarray]:
    """Return the arrays of a checkpoint, by default the latest one, by their path in the train state.

    The additional key `data` is the position in the training data, as sorted pairs of strings (name, value). The
    run's program is not built.
    """
    import orbax.checkpoint as ocp

    step = latest_step(folder) if step is None else step
    single_device = jax.sharding.SingleDeviceSharding(jax.devices()[0])  # whatever devices it was saved from
    with closing(ocp.CheckpointManager((folder / "checkpoints").resolve())) as manager:
        args = ocp.args
        restored = manager.restore(
            step,
            args=args.Composite(
                state=args.StandardRestore(fallback_sharding=single_device),
                data=args.JsonRestore(),
                about=args.JsonRestore(),
            ),
        )
    arrays = {
        jax.tree_util.keystr(path): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_flatten_with_path(restored["state"])[0]
    }
    return arrays | {"data": np.asarray(sorted((k, str(v)) for k, v in restored["data"].items()))}


def assert_same_bits(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    """Compare two results of `saved_arrays` bit for bit."""
    assert actual.keys() == expected.keys()
    differing_paths = [path for path in actual if actual[path].tobytes() != expected[path].tobytes()]
    assert not differing_paths, differing_paths


def open_checkpoints(folder: Path, *, read_only: bool = False, **config: Any) -> Checkpoints:
    """Open the checkpoints of a run folder. `config` are fields of `CheckpointConfig`."""
    return Checkpoints(folder, CheckpointConfig(**config), read_only=read_only)


@lru_cache
def _runs_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="valkyrie-runs-", ignore_cleanup_errors=True)


@lru_cache
def trained_run(*overrides: str, steps: int = 6) -> Path:
    """Return the folder of a finished tiny run on one device. It is shared by all tests, which must not modify it."""
    runs = Path(_runs_folder().name) / f"runs-{abs(hash((overrides, steps)))}"
    status = run_train(*TINY_ARGUMENTS, *ONE_DEVICE_ARGUMENTS, f"runs={runs}", "name=run", f"steps={steps}", *overrides)
    assert status == 0
    return runs / "run"


def copy_run(folder: Path, parent: Path) -> Path:
    """Copy a run folder, for a test that modifies it."""
    return Path(shutil.copytree(folder, parent / folder.name))


def tiny_arguments(
    runs: Path, *overrides: str, layout_arguments: Sequence[str] = ONE_DEVICE_ARGUMENTS
) -> tuple[str, ...]:
    """Return the arguments of a tiny run named `run` in the folder `runs`."""
    return (*TINY_ARGUMENTS, *layout_arguments, f"runs={runs}", "name=run", *overrides)
