"""Converts a Hugging Face folder to a run folder with a checkpoint of step 0 that has only the weights."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Quote, QuotedString

from valkyrie.checkpoint import CheckpointConfig, CheckpointInfo
from valkyrie.checkpoint.contents import PARAMETERS_ONLY
from valkyrie.config.arguments import parse_run
from valkyrie.config.run import Run
from valkyrie.convert.architectures import Setting, architecture_of, settings_of
from valkyrie.convert.folder import CONFIG, Weights, copy_beside, described
from valkyrie.convert.names import DERIVED, GPT2_PREFIX, TensorSlice, tensor_slices
from valkyrie.data.tokenizer import identity_of, load_tokenizer, vocab_size_of
from valkyrie.models.stack import Stack
from valkyrie.paths import disk_errors, write_atomic
from valkyrie.problems import refuse
from valkyrie.runs.folder import key_value, run_folder, versions, write_run_files
from valkyrie.trees import override_text

THEIRS = "huggingface"
"""The sub-folder of a run folder with the original files other than the weights, for converting back."""
PREFIX = "prefix"
"""A file in that folder with the prefix of GPT-2's tensor names: `transformer.`, or nothing."""
_LONGEST = 2048
"""Default maximum of the run's `seq`, in tokens: many models support more than fits on a laptop."""


def from_folder(
    folder: Path,
    name: str | None,
    tokenizer: str | None,
    overrides: Sequence[str],
    say: Callable[[str], Any] = print,
) -> Path:
    """Convert a Hugging Face folder to a run folder, which `valkyrie-train resume=` continues on any mesh.

    `overrides` are settings of the run as for valkyrie-train. All tensors are in memory at once, in the dtype of their
    files, and up to a gigabyte of them twice. ValueError if the folder cannot be converted, the tokenizer does not fit,
    or the run folder exists.
    """
    weights = Weights(folder)
    kind, settings = architecture_of(weights.config), settings_of(weights.config)
    run = _run(folder, name, tokenizer, settings, overrides, f"{kind.family}_schema")
    assert isinstance(run.model, Stack)
    prefix = GPT2_PREFIX if kind.is_gpt2 and any(name.startswith(GPT2_PREFIX) for name in weights.shapes) else ""
    by_parameter = tensor_slices(run.model, prefix)
    wanted = {piece.name: piece.stored for parts in by_parameter.values() for piece in parts}
    tied = ("lm_head.weight",) if run.model.tie_embeddings else ()
    weights.refuse_other(wanted, (*DERIVED, *tied), kind.name)
    target = run_folder(run)
    if target.exists():
        raise ValueError(f"{target} exists already. Use another --name NAME, or delete it.")
    _refuse_other_tokenizer(run)
    say(f"{kind.name}: {described(wanted, weights.dtype(wanted))}")
    with _removed_on_failure(target):
        theirs = target / THEIRS
        with disk_errors(target):
            theirs.mkdir(parents=True)
        copied = copy_beside(folder, theirs)
        write_atomic(theirs / CONFIG, (folder / CONFIG).read_bytes())
        if kind.is_gpt2:
            write_atomic(theirs / PREFIX, prefix)
        if tokenizer is None and "tokenizer.json" in copied:
            run = _with_tokenizer(run, str((theirs / "tokenizer.json").absolute()))
        _save(run, target, weights, by_parameter, folder)
        write_run_files(run, target)
    return target


def _run(
    folder: Path,
    name: str | None,
    tokenizer: str | None,
    settings: dict[str, Setting],
    overrides: Sequence[str],
    schema: str,
) -> Run:
    """Return the run with these model settings. ValueError if they are invalid or there is no tokenizer."""
    name = name or dict(map(key_value, overrides)).get("name") or _name_for(folder.resolve().name)
    context = settings["context"]
    assert isinstance(context, int)
    beside = folder / "tokenizer.json"
    if tokenizer is None and not beside.is_file():
        raise ValueError(
            f"{folder} has no tokenizer.json. Name its tokenizer: --tokenizer gpt2, or the path of a tokenizer.json."
        )
    settings = {"tokenizer": tokenizer or str(beside), **settings}
    arguments = [f"model={schema}", f"name={_quoted(name)}", f"seq={min(context, _LONGEST)}"]
    for key, value in settings.items():
        arguments.append(f"model.{key}={_quoted(value) if isinstance(value, str) else override_text(value)}")
    run = parse_run([*arguments, *(o for o in overrides if key_value(o)[0] != "name")])
    refuse(run.model.problems())
    return run


def _name_for(folder: str) -> str:
    """Return the name of a folder, if it can name a run, else without the characters that cannot be in one."""
    if re.fullmatch(r"[\w .+@-]+", folder):
        return folder
    return re.sub(r"[^\w.+@-]+", "-", folder).strip("-") or "model"


def _quoted(text: str) -> str:
    """Return a text in the grammar of the command line, for example a path with blanks or brackets."""
    return text if re.fullmatch(r"[\w./-]+", text) else QuotedString(text, Quote.single).with_quotes()


def _with_tokenizer(run: Run, tokenizer: str) -> Run:
    model = replace(run.config.model, tokenizer=tokenizer)
    return Run(replace(run.config, model=model), model, run.arguments)


def _refuse_other_tokenizer(run: Run) -> None:
    ids, rows = vocab_size_of(run.tokenizer), run.model.vocab_size
    if ids > rows:
        raise ValueError(
            f"tokenizer={run.tokenizer} has {ids:,} ids, and config.json says vocab_size={rows}: it belongs to "
            "another model. Name the right one: --tokenizer NAME."
        )
    load_tokenizer(run.tokenizer)


@contextmanager
def _removed_on_failure(target: Path) -> Iterator[None]:
    """Delete a folder again if filling it inside this context fails."""
    try:
        yield
    except BaseException:
        shutil.rmtree(target, ignore_errors=True)
        raise


def _save(run: Run, target: Path, weights: Weights, by_parameter: dict[str, list[TensorSlice]], folder: Path) -> None:
    """Write the checkpoint of step 0."""
    from valkyrie.checkpoint.weights import WeightsTier
    from valkyrie.processes.team import ALONE
    from valkyrie.train.state import TrainState

    info = CheckpointInfo(
        parameters={},  # the save fills these in
        model=run.model.name,
        layout="converted",
        tokenizer=identity_of(run.tokenizer),
        versions=versions(),
        converted_from=str(folder.resolve()),
        holds=PARAMETERS_ONLY,
    )
    parameters: Any = {}
    for name, parts in by_parameter.items():
        *path, last = name.split(".")
        inside = parameters
        for key in path:
            inside = inside.setdefault(key, {})
        inside[last] = _array(weights, parts)
    state = TrainState(step=None, parameters=parameters, optimizer=None, ema=None, key=None)
    with closing(WeightsTier(target, CheckpointConfig(), read_only=False, team=ALONE, info=info)) as tier:
        failed = tier.save(0, state, {}) or tier.wait()
    if failed:
        raise ValueError(failed)


def _array(weights: Weights, parts: Sequence[TensorSlice]) -> Any:
    """Return a parameter as a JAX array on the host, its layers stacked, in a dtype that holds all of them."""
    import jax
    import numpy as np

    if parts[0].layer is None:
        value = parts[0].ours(weights.read(parts[0].name))
    else:
        value = np.empty((len(parts), *parts[0].shape), weights.dtype(piece.name for piece in parts))
        for i, piece in enumerate(parts):
            value[i] = piece.ours(weights.read(piece.name))
    return jax.device_put(value, jax.local_devices(backend="cpu")[0])
