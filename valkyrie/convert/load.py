"""Converts a Hugging Face folder to a run folder with a checkpoint of step 0 that contains only weights."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Quote, QuotedString

from valkyrie.checkpoint import CheckpointConfig, CheckpointInfo
from valkyrie.checkpoint.contents import PARAMETERS_ONLY
from valkyrie.config.arguments import parse_run
from valkyrie.config.run import Run
from valkyrie.convert.architectures import find_architecture
from valkyrie.convert.folder import CONFIG_FILE, Weights, copy_other_files, describe_tensors
from valkyrie.convert.names import DERIVED_SUFFIXES, GPT2_PREFIX, TensorSlice, tensor_slices
from valkyrie.convert.settings import Setting, model_settings
from valkyrie.data.tokenizer import load_tokenizer, read_vocab_size, tokenizer_identity
from valkyrie.models.stack import Stack
from valkyrie.paths import disk_errors, write_atomic
from valkyrie.problems import Problem, raise_problems
from valkyrie.processes.locks import WRITER_FILE, write_lock
from valkyrie.runs.folder import choose_run_folder, package_versions, split_override, write_run_files
from valkyrie.trees import override_text

ORIGINALS_FOLDER = "huggingface"
"""Subfolder of a run folder with the original files except the weights, used to convert back."""
PREFIX_FILE = "prefix"
"""File in `ORIGINALS_FOLDER` with the prefix of GPT-2's tensor names: `transformer.`, or empty."""
_UNEMBEDDING = "lm_head.weight"
"""Tensor of the output matrix. Folders of models with tied embeddings may have it as a copy of the embedding."""
_ADJUSTABLE_SETTINGS = ("name", "context", "attention.rope_theta")
"""Model settings that overrides may change, because they affect neither the tensors nor the architecture.

A model without rotary embeddings (GPT-2) has a fixed `context`: the length of its table of learned positions.
"""
_LAYOUT_GROUPS = ("mesh", "partition", "target")
_MAX_SEQ = 2048
"""Upper limit of the default `seq`, in tokens. Many models support longer contexts than fit on a laptop."""


def import_folder(
    folder: Path,
    name: str | None,
    tokenizer: str | None,
    overrides: Sequence[str],
    say: Callable[[str], Any] = print,
) -> Path:
    """Convert a Hugging Face folder to a run folder, which `valkyrie-train resume=` continues on any mesh.

    Returns the path of the run folder.

    Needs memory for all tensors in the dtype of their files (bfloat16 for MXFP4), plus copies of the largest one.
    Raises ValueError if the folder cannot be converted, the tokenizer does not match, or the run folder exists.

    Args:
        folder: The Hugging Face folder.
        name: Name of the run, or None to use the override of `name`, else the name of `folder`.
        tokenizer: Name or file of the tokenizer, or None for `tokenizer.json` in `folder`.
        overrides: Settings of the run, as for valkyrie-train.
        say: Called with a progress message.
    """
    weights = Weights(folder)
    architecture, settings = find_architecture(weights.config), model_settings(weights.config)
    run = _make_run(folder, name, tokenizer, settings, overrides, f"{architecture.family}_schema")
    assert isinstance(run.model, Stack)
    has_prefix = architecture.is_gpt2 and any(name.startswith(GPT2_PREFIX) for name in weights.shapes)
    prefix = GPT2_PREFIX if has_prefix else ""
    slices_by_parameter = tensor_slices(run.model, architecture.top_level_tensors, architecture.layer_tensors, prefix)
    tensor_shapes = {
        tensor_slice.name: tensor_slice.tensor_shape
        for slices in slices_by_parameter.values()
        for tensor_slice in slices
    }
    ignored_copies = (_UNEMBEDDING,) if run.model.tie_embeddings else ()
    # Modules that predict more than the next token (DeepSeek-V3) are stored as further layers.
    ignored_layers = range(run.model.layers, run.model.layers + (weights.config.get("num_nextn_predict_layers") or 0))
    ignored_prefixes = tuple(f"model.layers.{number}." for number in ignored_layers)
    weights.check_tensors(tensor_shapes, (*DERIVED_SUFFIXES, *ignored_copies), architecture.name, ignored_prefixes)
    if run.model.tie_embeddings:
        _check_tied_embeddings(weights, slices_by_parameter["embedding"][0].name)
    run_folder = choose_run_folder(run)
    if run_folder.exists():
        raise ValueError(f"{run_folder} already exists. Use another --name NAME, or delete the folder.")
    _check_tokenizer(run)
    if (seq := run.config.seq) > (context := run.model.context):
        say(
            f"note: seq={seq}: the weights were trained for at most {context} positions. Use seq={context}, or "
            f"model.context={seq} if the run will be trained on longer texts."
        )
    dtypes = {name: weights.dtype([name]) for name in tensor_shapes}
    say(f"{architecture.name}: {describe_tensors(tensor_shapes, dtypes)}")
    with _new_folder(run_folder) as originals_folder:
        copied_names = copy_other_files(folder, originals_folder)
        write_atomic(originals_folder / CONFIG_FILE, (folder / CONFIG_FILE).read_bytes())
        if architecture.is_gpt2:
            write_atomic(originals_folder / PREFIX_FILE, prefix)
        if tokenizer is None and "tokenizer.json" in copied_names:
            run = _with_tokenizer(run, str((originals_folder / "tokenizer.json").absolute()))
        _save_checkpoint(run, run_folder, weights, slices_by_parameter, folder)
        write_run_files(run, run_folder)
    return run_folder


def _check_tied_embeddings(weights: Weights, embedding: str) -> None:
    """Raise ValueError if the folder of a model with tied embeddings has an output matrix unlike the embedding."""
    import numpy as np

    if _UNEMBEDDING in weights.shapes and not np.array_equal(weights.read(_UNEMBEDDING), weights.read(embedding)):
        raise ValueError(
            f"{weights.folder}: {_UNEMBEDDING} differs from {embedding}, but {CONFIG_FILE} ties them. Set "
            f"tie_word_embeddings to false in {CONFIG_FILE} to use both."
        )


def _make_run(
    folder: Path,
    name: str | None,
    tokenizer: str | None,
    settings: dict[str, Setting],
    overrides: Sequence[str],
    schema: str,
) -> Run:
    """Return a run with these model settings.

    Raises ValueError if they or the overrides are invalid, or if there is no tokenizer.
    """
    _refuse_overrides(overrides, settings)
    typed_name = dict(map(split_override, overrides)).get("name")
    if name and typed_name:
        raise ValueError(f"name={typed_name}: --name {name} already names the run. Leave one of them out.")
    name = name or typed_name or _run_name(folder.resolve().name)
    context = settings["context"]
    assert isinstance(context, int)
    tokenizer_file = folder / "tokenizer.json"
    if tokenizer is None and not tokenizer_file.is_file():
        example = "bytes" if settings["vocab_size"] == read_vocab_size("bytes") else "gpt2"
        raise ValueError(
            f"{folder} has no tokenizer.json. Set --tokenizer to a name such as {example}, or to the path of a "
            "tokenizer.json."
        )
    settings = {"tokenizer": tokenizer or str(tokenizer_file), **settings}
    arguments = [f"model={schema}", f"name={_quote(name)}", f"seq={min(context, _MAX_SEQ)}"]
    for key, value in settings.items():
        arguments.append(f"model.{key}={_quote(value) if isinstance(value, str) else override_text(value)}")
    run = parse_run([o for o in overrides if split_override(o)[0] != "name"], derived_arguments=arguments)
    groups = {_group(split_override(override)[0]) for override in overrides}
    problems = [problem for problem in run.problems() if _prevents_conversion(problem, groups)]
    raise_problems(run.model.problems() or list(map(_without_model_sizes, problems)))
    return run


def _refuse_overrides(overrides: Sequence[str], settings: Mapping[str, Setting]) -> None:
    """Raise ValueError if an override sets `mode`, `resume`, `model`, or a model setting from `config.json`.

    `settings` are the model settings from `config.json`. Overrides may still set those in `_ADJUSTABLE_SETTINGS`.
    """
    adjustable_keys = _ADJUSTABLE_SETTINGS if "attention.rope_theta" in settings else ("name",)
    fixed_keys = {f"model.{key}" for key in settings if key not in adjustable_keys}
    for override in overrides:
        key = split_override(override)[0]
        if key == "model" or key in fixed_keys:
            raise ValueError(f"{override}: the architecture comes from {CONFIG_FILE}. Leave it out.")
        if key in ("mode", "resume"):
            raise ValueError(f"{override}: from-hf only writes a new run. Leave it out.")


def _prevents_conversion(problem: Problem, groups: Set[str]) -> bool:
    """Return whether a problem prevents the conversion.

    A problem of the layout is ignored unless an override sets the mesh, partition, target or the group of the problem's
    key, because the default layout is chosen for this machine and may suit no run of the model. `groups` are the config
    groups and top-level keys that the overrides set.
    """
    group = _group(problem.key or "")
    concerns_layout = bool(problem.mesh_axes) or group in _LAYOUT_GROUPS
    return not concerns_layout or not groups.isdisjoint({group, *_LAYOUT_GROUPS})


def _group(key: str) -> str:
    return key.partition(".")[0]


def _without_model_sizes(problem: Problem) -> Problem:
    """Remove suggested values of model settings from a problem, because the weights determine model sizes."""
    is_model_size = problem.nearest is not None and (problem.key or "").startswith("model.")
    text = problem.text and re.sub(r", or model\.context=\d+", "", problem.text)
    return replace(problem, text=text, nearest=() if is_model_size else problem.nearest)


def _run_name(folder: str) -> str:
    """Convert a folder name to a valid run name."""
    if re.fullmatch(r"[\w .+@-]+", folder):
        return folder
    return re.sub(r"[^\w.+@-]+", "-", folder).strip("-") or "model"


def _quote(text: str) -> str:
    """Quote a text for Hydra's command line if needed, for example a path with spaces or brackets."""
    return text if re.fullmatch(r"[\w./-]+", text, re.ASCII) else QuotedString(text, Quote.single).with_quotes()


def _with_tokenizer(run: Run, tokenizer: str) -> Run:
    model = replace(run.config.model, tokenizer=tokenizer)
    return Run(replace(run.config, model=model), model, run.arguments)


def _check_tokenizer(run: Run) -> None:
    id_count, row_count = read_vocab_size(run.tokenizer), run.model.vocab_size
    if id_count > row_count:
        raise ValueError(
            f"tokenizer={run.tokenizer} has {id_count:,} ids, but config.json has vocab_size={row_count}, so it "
            "belongs to another model. Set --tokenizer to the tokenizer of this model."
        )
    load_tokenizer(run.tokenizer)


@contextmanager
def _new_folder(run_folder: Path) -> Iterator[Path]:
    """Create a run folder, and yield the path of its `ORIGINALS_FOLDER`, which stays locked inside this context.

    Deletes the run folder if an exception is raised inside this context. Raises DiskError if the run folder already
    exists or cannot be created.
    """
    with disk_errors(run_folder):
        run_folder.mkdir(parents=True)  # outside of `try`: another process may have created it just now
    originals_folder = run_folder / ORIGINALS_FOLDER
    try:
        with ExitStack() as stack:
            with disk_errors(run_folder):
                stack.enter_context(write_lock(originals_folder))  # makes `choose_run_folder` say that it is in use
            yield originals_folder
            (originals_folder / WRITER_FILE).unlink()
    except BaseException:
        shutil.rmtree(run_folder, ignore_errors=True)
        raise


def _save_checkpoint(
    run: Run, run_folder: Path, weights: Weights, slices_by_parameter: dict[str, list[TensorSlice]], folder: Path
) -> None:
    """Write the weights as the checkpoint of step 0 in `run_folder`. Raises ValueError if it cannot be written."""
    from valkyrie.checkpoint.weights import WeightsTier
    from valkyrie.processes.team import ALONE
    from valkyrie.train.state import TrainState

    info = CheckpointInfo(
        parameters={},  # the save fills these in
        model=run.model.name,
        layout="converted",
        tokenizer=tokenizer_identity(run.tokenizer),
        versions=package_versions(),
        converted_from=str(folder.resolve()),
        holds=PARAMETERS_ONLY,
    )
    parameters: Any = {}
    for name, slices in slices_by_parameter.items():
        *path, leaf_key = name.split(".")
        node = parameters
        for key in path:
            node = node.setdefault(key, {})
        node[leaf_key] = _load_parameter(weights, slices)
    state = TrainState(step=None, parameters=parameters, optimizer=None, ema=None, key=None)
    with closing(WeightsTier(run_folder, CheckpointConfig(), read_only=False, team=ALONE, info=info)) as tier:
        error = tier.save(0, state, {}) or tier.wait()
    if error:
        raise ValueError(error)


def _load_parameter(weights: Weights, slices: Sequence[TensorSlice]) -> Any:
    """Return a parameter as a JAX array on the host, with its layers and experts stacked.

    Its dtype is the smallest that represents all its tensors exactly.
    """
    import jax
    import numpy as np

    leading_sizes = tuple(last + 1 for last in slices[-1].index)
    value = np.empty((*leading_sizes, *slices[0].shape), weights.dtype(tensor_slice.name for tensor_slice in slices))
    for tensor_slice in slices:
        value[tensor_slice.index] = tensor_slice.from_tensor(weights.read(tensor_slice.name))
    return jax.device_put(value, jax.local_devices(backend="cpu")[0])
