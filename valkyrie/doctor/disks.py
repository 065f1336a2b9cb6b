"""Checks of a run's folders, checkpoints, caches, data and W&B key. Does not import JAX."""

from __future__ import annotations

import contextlib
import math
import netrc
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from valkyrie.checkpoint.contents import (
    newest_undamaged_step,
    read_data_position,
    read_info,
    refuse_other_model,
)
from valkyrie.checkpoint.location import all_steps_in, checkpoint_root, in_bucket, parse_path
from valkyrie.config.run import Run
from valkyrie.data.batches import OTHER_DATA
from valkyrie.data.config import DataCheck
from valkyrie.doctor.findings import FAILURE, OK, WARNING, CheckContext, CheckResults
from valkyrie.paths import cache_problem, cache_root, disk_errors, error_reason
from valkyrie.runs.folder import choose_run_folder
from valkyrie.runs.wandb_writer import WandbMode, resolve_mode
from valkyrie.train.prepare import refuse_changed_tokenizer, refuse_unsuitable_data
from valkyrie.units import count_text, memory_text

MAX_CLOCK_DIFFERENCE_S = 2.0
"""Clock difference to a disk or another host, in seconds, above which there is a warning."""
_MIN_KEY_LENGTH = 40
"""Minimum length of a W&B key."""
_PROBE_TEXT = "valkyrie-doctor"


def state_bytes(run: Run) -> int:
    """Return the bytes of a run's state: parameters, optimizer moments, and the parameter average if enabled.

    Counts every array once, regardless of how many devices have a copy.
    """
    config = run.config
    itemsize = {"float32": 4, "bfloat16": 2}
    size = 0.0
    for spec in run.model.parameters().values():
        parameter_bytes = itemsize["float32" if spec.float32 else config.precision.parameter.value]
        average_bytes = 0 if config.optimizer.ema_decay is None else itemsize["float32"]
        size += math.prod(spec.shape) * (parameter_bytes + config.optimizer.state_bytes(spec) + average_bytes)
    return int(size)


def check_run_folder(context: CheckContext) -> CheckResults:
    """Check that the folder `runs` is writable."""
    with _probe(context.run.config.runs):
        yield OK, f"runs={context.run.config.runs} is writable"


def check_mounted_disk(context: CheckContext) -> CheckResults:
    """Warn if the checkpoint folder of several hosts is missing and would be created on the local disk of this host.

    Then the shared disk is probably not mounted. Skipped on a single host.
    """
    target, (key, folder) = context.run.config.target, _checkpoint_location(context.run)
    if target.hosts * target.slices == 1 or in_bucket(folder):
        return
    path = parse_path(folder)
    missing_folder = min((parent for parent in (path, *path.parents) if not parent.exists()), default=None)
    if missing_folder is not None and next(filter(os.path.ismount, missing_folder.parents)) == Path("/"):
        yield (
            WARNING,
            f"{key}={folder}: {missing_folder} does not exist, and would be created on the local disk of this host",
            f"Mount the disk that all hosts share, or set {key}=DIR to a folder on it.",
        )


def check_disk_clock(context: CheckContext) -> CheckResults:
    """Compare the clock of the disk of `runs` with the clock of this host. Skipped if `runs` is not writable."""
    runs = context.run.config.runs
    with contextlib.suppress(OSError), _probe(runs) as probe:  # `check_run_folder` reports the error
        difference = probe.stat().st_mtime - time.time()
        text = f"timestamps of files in runs={runs} differ by {difference:+.0f} s from the clock of this host"
        warning = WARNING, text, "Synchronize both clocks, for example with timedatectl or chrony."
        yield (
            warning
            if abs(difference) > MAX_CLOCK_DIFFERENCE_S
            else (OK, f"the clocks of this host and of the disk of {runs} agree")
        )


def check_checkpoint_folder(context: CheckContext) -> CheckResults:
    """Check that files in `checkpoint.folder` can be written, read and deleted. Skipped if it is not set."""
    folder = context.run.config.checkpoint.folder
    if folder is None:
        return
    start = time.perf_counter()
    try:
        with _probe(folder) as probe:
            content = probe.read_text()
    except Exception as error:  # bucket libraries raise many types for a missing bucket, key or network
        login = "log in: gcloud auth application-default login" if folder.startswith("gs:") else "the AWS credentials"
        remedy = f"Check its name and {login}"
        if not in_bucket(folder):
            remedy = "Use another folder: checkpoint.folder=DIR."
        yield FAILURE, f"checkpoint.folder={folder} cannot be used ({error_reason(error)})", remedy
        return
    seconds = time.perf_counter() - start
    if content == _PROBE_TEXT:
        yield OK, f"checkpoint.folder={folder} is readable and writable ({seconds:.2f} s for one small file)"
    else:
        text = f"a file written to checkpoint.folder={folder} was read back with different content"
        yield FAILURE, text, "Use another folder: checkpoint.folder=DIR."


def check_shared_folder(context: CheckContext) -> CheckResults:
    """Check that a file that process 0 writes to the checkpoint folder exists for this process.

    Skipped if process 0 cannot write there.
    """
    team, (key, folder) = context.team, _checkpoint_location(context.run)
    with contextlib.ExitStack() as stack:
        name, is_visible = None, False
        if team.is_leader:
            with contextlib.suppress(Exception):  # `check_run_folder` and `check_checkpoint_folder` report the error
                name = stack.enter_context(_probe(folder)).name
        name = team.exchange("probe", name)[0]
        with contextlib.suppress(OSError):  # must reach `wait` below, where the other processes wait
            is_visible = name is not None and (parse_path(folder) / name).exists()
        team.wait("probe seen")
    if name is not None and is_visible:
        yield OK, f"all processes can read files that process 0 writes to {key}={folder}"
    elif name is not None:
        remedy = "Use a folder that all hosts share: runs=DIR or checkpoint.folder=gs://BUCKET/DIR."
        yield FAILURE, f"files that process 0 writes to {key}={folder} are missing on this host", remedy


def _checkpoint_location(run: Run) -> tuple[str, str]:
    """Return the key that sets the checkpoint folder, and the folder."""
    folder = run.config.checkpoint.folder
    return ("runs", run.config.runs) if folder is None else ("checkpoint.folder", folder)


def check_resumed_checkpoint(context: CheckContext) -> CheckResults:
    """Check the files, the model, the tokenizer and, if it is prepared, the data of the checkpoint to resume from.

    Only process 0 runs this check. It is skipped if neither `resume` nor `name` is set, because such a run is new.
    A damaged checkpoint is a warning if an older one is undamaged, or if the run may have fast checkpoints.
    """
    config = context.run.config
    if not context.team.is_leader or (config.resume is None and config.name is None):
        return
    folder = choose_run_folder(context.run)
    root = checkpoint_root(folder)
    steps = all_steps_in(root)
    step, damage_messages = newest_undamaged_step(root, steps)
    remedy = (
        f"To start over, delete {folder}, or use another name=."
        if step is None
        else f"The run would resume from step {step}."
    )
    severity = FAILURE if step is None and config.checkpoint.fast.every is None else WARNING
    for message in damage_messages:
        yield severity, message, remedy
    if step is not None:
        shapes = {name: spec.shape for name, spec in context.run.model.parameters().items()}
        path = root / str(step)
        info = read_info(path)
        refuse_changed_tokenizer(context.run, path)
        refuse_other_model(path, info.parameters, shapes)
        content = _prepared_content(context.run)
        if content and not read_data_position(path).get("content", content).startswith(content):
            yield FAILURE, OTHER_DATA, ""
            return
        files_text = (
            "; the bucket verifies its files itself, so they were not checked"
            if in_bucket(root)
            else " and is undamaged"
        )
        yield OK, f"the checkpoint at step {step} in {root} fits the model{files_text}"


def check_disk_space(context: CheckContext) -> CheckResults:
    """Check that the disk has space for the `keep + keep_best` stored checkpoints and the one being written.

    Warns if they would take more than half of the free space. Does not check buckets.
    """
    config, (key, folder) = context.run.config.checkpoint, _checkpoint_location(context.run)
    stored_count, size = config.keep + config.keep_best, state_bytes(context.run)
    needs_text = f"{stored_count + 1} checkpoints of {memory_text(size)} are stored at once"
    if in_bucket(folder):
        yield OK, f"{key}={folder} is a bucket; {needs_text}"
        return
    free_bytes, needed_bytes = _free_bytes(folder), (stored_count + 1) * size
    text = f"{memory_text(free_bytes)} free in {key}={folder}; {needs_text}"
    if needed_bytes > free_bytes:
        yield FAILURE, text, f"Free another {memory_text(needed_bytes - free_bytes)}, or use another folder: {key}=DIR."
    elif needed_bytes > free_bytes / 2:
        yield WARNING, text, "Checkpoints will take more than half of the free space."
    else:
        yield OK, text


def check_fast_disk_space(context: CheckContext) -> CheckResults:
    """Check that this host has space for its fast checkpoints. Skipped if they are disabled.

    Each process writes the part of the state that its devices hold: from an equal share up to the whole state if it is
    replicated. Fails if there is no space for `keep + 1` equal shares, and warns if there is none for `keep + 1` whole
    states.
    """
    fast_config = context.run.config.checkpoint.fast
    if fast_config.every is None:
        return
    folder = fast_config.folder or tempfile.gettempdir()
    free_bytes, max_needed_bytes = _free_bytes(folder), (fast_config.keep + 1) * state_bytes(context.run)
    min_needed_bytes = max_needed_bytes // context.process_count
    size = (
        memory_text(max_needed_bytes)
        if context.process_count == 1
        else f"{memory_text(min_needed_bytes)} to {memory_text(max_needed_bytes)}"
    )
    text = f"{memory_text(free_bytes)} free in {folder}; fast checkpoints need {size}"
    failure = FAILURE, text, "Set checkpoint.fast.folder=DIR, or disable fast checkpoints: checkpoint.fast.every=null"
    yield failure if min_needed_bytes > free_bytes else (WARNING if max_needed_bytes > free_bytes else OK, text)


def _free_bytes(folder: str) -> int:
    path = Path(parse_path(folder))
    existing_folder = next(parent for parent in (path, *path.parents) if parent.exists())
    return shutil.disk_usage(existing_folder).free


def check_compile_cache(_: CheckContext) -> CheckResults:
    """Check that compiled programs can be cached, so that later starts do not compile again."""
    folder = Path(os.environ.get("JAX_COMPILATION_CACHE_DIR") or cache_root() / "xla")
    key = "JAX_COMPILATION_CACHE_DIR=DIR" if "JAX_COMPILATION_CACHE_DIR" in os.environ else "VALKYRIE_CACHE=DIR"
    if "://" in str(folder):
        yield OK, f"{folder} (remote, not checked)"
    elif trouble := cache_problem(folder, key):
        yield WARNING, f"compiled programs cannot be cached, so every start compiles again: {trouble}"
    else:
        yield OK, str(folder)


def check_data(context: CheckContext) -> CheckResults:
    """Check that the data suits the task and the model, exists, and is enough for a training batch.

    Data that is not prepared yet is checked only as far as possible without preparing it.
    """
    refuse_unsuitable_data(context.run)
    result = _data_check(context.run)
    yield WARNING if result.advice else OK, result.text, result.advice or ""


def check_same_data(context: CheckContext) -> CheckResults:
    """Compare the prepared data of all processes. Skipped unless this process and another one have prepared it."""
    team = context.team
    by_process = team.exchange("content of the data", _prepared_content(context.run))
    hashes = {index: content for index, content in enumerate(by_process) if content is not None}
    if len(hashes) < 2 or team.index not in hashes:
        return
    first_process = min(hashes)
    text = (
        f"the prepared data has hash {hashes[team.index]} here, but {hashes[first_process]} on process {first_process}"
    )
    remedy = "Copy the files of data.paths, or the prepared data in data.cache_dir, from one host to the others."
    failure = FAILURE, text, remedy
    is_equal = hashes[team.index] == hashes[first_process]
    yield (OK, "equal on all processes that have prepared it") if is_equal else failure


def _data_check(run: Run) -> DataCheck:
    config = run.config
    return config.data.check(run.tokenizer, config.batch, config.seq, config.steps)


def _prepared_content(run: Run) -> str | None:
    """Return the beginning of the hash of the prepared data, or None if it is not prepared or cannot be used."""
    with contextlib.suppress(ValueError, OSError):  # `check_data` reports them
        return _data_check(run).content
    return None


def check_wandb_key(context: CheckContext) -> CheckResults:
    """Check that W&B has a key if it needs one. Does not use the network."""
    setting = context.run.config.tracking.wandb
    mode, key = resolve_mode(setting), os.environ.get("WANDB_API_KEY") or ""
    if mode is WandbMode.online:
        key = key or _key_in_netrc()
    if mode is WandbMode.off:
        yield OK, "off"
    elif mode is WandbMode.offline and not key and setting is WandbMode.auto and _key_in_netrc():
        text = "offline, because WANDB_API_KEY is not set; `wandb login` has stored a key"
        yield WARNING, text, "Set tracking.wandb=online to use that key."
    elif mode is WandbMode.offline:
        yield OK, "offline: upload the run later with `wandb sync`, or set WANDB_API_KEY to upload it during training"
    elif not key:
        yield WARNING, "online, but there is no key", "Set WANDB_API_KEY, or run `wandb login`."
    elif (length := len(key.rpartition("-")[2])) < _MIN_KEY_LENGTH:
        suffix = " after its last dash" if "-" in key else ""  # self-hosted servers put a prefix such as local- first
        text = f"the W&B key has {count_text(length, 'character')}{suffix}, but needs at least {_MIN_KEY_LENGTH}"
        yield WARNING, text, "Set WANDB_API_KEY to the key from https://wandb.ai/authorize"
    else:
        yield OK, "online, with a key (not verified with the server)"


def _key_in_netrc() -> str:
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    with contextlib.suppress(OSError, netrc.NetrcParseError):
        login = netrc.netrc(os.environ.get("NETRC")).authenticators(host)
        return (login[2] or "") if login else ""
    return ""


@contextlib.contextmanager
def _probe(folder: str) -> Iterator[Any]:
    """Yield the path of a small file in a folder or bucket, then delete the file and the folders created for it."""
    path = parse_path(folder)
    is_local = isinstance(path, Path) and not in_bucket(folder)
    missing_folders = [parent for parent in (path, *path.parents) if not parent.exists()] if is_local else []
    probe = path / f".doctor-{socket.gethostname()}-{os.getpid()}"
    try:
        with disk_errors(Path(folder)) if is_local else contextlib.nullcontext():
            path.mkdir(parents=True, exist_ok=True)
            probe.write_bytes(_PROBE_TEXT.encode())
        yield probe
    finally:
        with contextlib.suppress(OSError):
            probe.unlink(missing_ok=True)
        for parent in missing_folders:
            with contextlib.suppress(OSError):  # another process may have written there
                parent.rmdir()
