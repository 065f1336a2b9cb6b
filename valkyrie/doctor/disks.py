"""Checks of the files of a run: its folder, checkpoints, caches, data, the W&B key. Imports no JAX."""

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

from valkyrie.checkpoint.location import in_bucket, parse_path
from valkyrie.config.run import Run
from valkyrie.data.config import DataCheck
from valkyrie.doctor.findings import FAILS, FINE, WARNING, Answers, Examined
from valkyrie.paths import cache_problem, cache_root, disk_errors, error_reason
from valkyrie.runs.wandb_writer import WandbMode, resolve_mode
from valkyrie.train.prepare import refuse_other_data
from valkyrie.units import memory_text

CLOCK_S = 2.0
"""Clock difference in seconds, of a disk or another host, above which there is a warning."""
_KEY_LENGTH = 40
_TEXT = "valkyrie-doctor"


def state_bytes(run: Run) -> int:
    """Return the bytes of a run's saved state: parameters, optimizer moments, and the parameter average if enabled."""
    config = run.config
    number = {"float32": 4, "bfloat16": 2}
    size = 0.0
    for spec in run.model.parameters().values():
        stored = number["float32" if spec.float32 else config.precision.parameter.value]
        average = 0 if config.optimizer.ema_decay is None else number["float32"]
        size += math.prod(spec.shape) * (stored + config.optimizer.state_bytes(spec) + average)
    return int(size)


def run_folder(examined: Examined) -> Answers:
    """Check that `runs` can be written."""
    with _probe(examined.run.config.runs):
        yield FINE, f"runs={examined.run.config.runs} can be written"


def disk_clock(examined: Examined) -> Answers:
    """Compare the clock of the disk of `runs` with the clock of this host."""
    runs = examined.run.config.runs
    with contextlib.suppress(OSError), _probe(runs) as probe:  # `run_folder` reports it
        off = probe.stat().st_mtime - time.time()
        text = f"files in runs={runs} are dated {off:+.0f} s off the clock of this host"
        warning = WARNING, text, "Let both keep the time: timedatectl, chrony."
        yield warning if abs(off) > CLOCK_S else (FINE, "that of the disk of runs= is this host's")


def checkpoint_folder(examined: Examined) -> Answers:
    """Check that `checkpoint.folder` can be written, read and cleared. Skipped if checkpoints are stored in `runs`."""
    folder = examined.run.config.checkpoint.folder
    if folder is None:
        return
    began = time.perf_counter()
    try:
        with _probe(folder) as probe:
            content = probe.read_text()
    except Exception as error:  # the libraries of buckets raise many kinds: no bucket, no key, no network
        remedy = "Check its name and the credentials: gcloud auth application-default login."
        if not in_bucket(folder):
            remedy = "Write elsewhere with checkpoint.folder=DIR."
        yield FAILS, f"checkpoint.folder={folder} cannot be used ({error_reason(error)})", remedy
        return
    spent = time.perf_counter() - began
    if content == _TEXT:
        text = f"checkpoint.folder={folder} can be written, read and cleared ({spent:.2f} s for one small file)"
        yield FINE, text
    else:
        text = f"checkpoint.folder={folder} does not give back what was written there"
        yield FAILS, text, "Use another: checkpoint.folder=DIR."


def shared_folder(examined: Examined) -> Answers:
    """Check that this process sees the files that process 0 writes to the checkpoint folder."""
    team, (key, folder) = examined.team, _checkpoints(examined.run)
    with contextlib.ExitStack() as stack:
        name, sees = None, False
        if team.leads:
            with contextlib.suppress(Exception):  # `run_folder` and `checkpoint_folder` report it
                name = stack.enter_context(_probe(folder)).name
        name = team.exchange("probe", name)[0]
        with contextlib.suppress(OSError):  # the others wait below
            sees = name is not None and (parse_path(folder) / name).exists()
        team.wait("probe seen")
    if name is not None and sees:
        yield FINE, f"all processes see what process 0 writes to {key}={folder}"
    elif name is not None:
        remedy = "Checkpoints need a folder that all hosts share: runs=DIR or checkpoint.folder=gs://BUCKET/DIR."
        yield FAILS, f"what process 0 writes to {key}={folder} is not seen here", remedy


def _checkpoints(run: Run) -> tuple[str, str]:
    """Return the key that sets the checkpoint folder, and the folder."""
    folder = run.config.checkpoint.folder
    return ("runs", run.config.runs) if folder is None else ("checkpoint.folder", folder)


def disk_space(examined: Examined) -> Answers:
    """Check that the disk has room for the checkpoints."""
    config, (key, folder) = examined.run.config.checkpoint, _checkpoints(examined.run)
    keep, size = config.keep + config.keep_best, state_bytes(examined.run)
    each = f"a checkpoint is {memory_text(size)}, {keep} are kept while one is written"
    if in_bucket(folder):
        yield FINE, f"{key}={folder} is a bucket; {each}"
        return
    free, needed = _free_bytes(Path(folder)), (keep + 1) * size
    text = f"{memory_text(free)} free in {key}={folder}; {each}"
    if needed > free:
        yield FAILS, text, f"Free {memory_text(needed - free)}, or write elsewhere with {key}=DIR."
    elif needed > free / 2:
        yield WARNING, text, "That is more than half of what is free."
    else:
        yield FINE, text


def fast_disk_space(examined: Examined) -> Answers:
    """Check that this host has room for its share of the fast checkpoints. Skipped if they are disabled.

    A process stores the state on its devices: at least its share of the state, at most all of it.
    """
    fast = examined.run.config.checkpoint.fast
    if fast.every is None:
        return
    folder = Path(fast.folder or tempfile.gettempdir())
    free, most = _free_bytes(folder), (fast.keep + 1) * state_bytes(examined.run)
    least = most // examined.processes
    size = memory_text(most) if examined.processes == 1 else f"{memory_text(least)} to {memory_text(most)}"
    text = f"{memory_text(free)} free in {folder}; fast checkpoints take {size}"
    failure = FAILS, text, "Use checkpoint.fast.folder=DIR, or turn fast checkpoints off: checkpoint.fast.every=null"
    yield failure if least > free else (WARNING if most > free else FINE, text)


def _free_bytes(path: Path) -> int:
    existing = next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())
    return shutil.disk_usage(existing).free


def compile_cache(_: Examined) -> Answers:
    """Check that compiled programs can be cached for the next start."""
    folder = Path(os.environ.get("JAX_COMPILATION_CACHE_DIR") or cache_root() / "xla")
    key = "JAX_COMPILATION_CACHE_DIR=DIR" if "JAX_COMPILATION_CACHE_DIR" in os.environ else "VALKYRIE_CACHE=DIR"
    if "://" in str(folder):
        yield FINE, f"{folder}, which is not looked at"
    elif trouble := cache_problem(folder, key):
        yield WARNING, f"every start compiles anew: {trouble}"
    else:
        yield FINE, str(folder)


def data(examined: Examined) -> Answers:
    """Check that the training data exists and suffices for a batch."""
    refuse_other_data(examined.run)
    checked = _check_data(examined.run)
    yield WARNING if checked.advice else FINE, checked.text, checked.advice or ""


def same_data(examined: Examined) -> Answers:
    """Compare the prepared data of all processes. Skipped if fewer than two have prepared it."""
    content, team = None, examined.team
    with contextlib.suppress(ValueError, OSError):  # `data` reports them
        content = _check_data(examined.run).content
    contents = team.exchange("content of the data", content)
    known = {index: theirs for index, theirs in enumerate(contents) if theirs is not None}
    if len(known) < 2 or team.index not in known:
        return
    first = min(known)
    text = f"{known[team.index]}, and {known[first]} on process {first}"
    failure = FAILS, text, "Copy the files of data.paths, or the cache, from one host to the others."
    same = known[team.index] == known[first]
    yield (FINE, "on all processes that have them prepared") if same else failure


def _check_data(run: Run) -> DataCheck:
    config = run.config
    return config.data.check(run.tokenizer, config.batch, config.seq, config.steps)


def wandb_key(examined: Examined) -> Answers:
    """Check that W&B has a key if it needs one. Does not use the network."""
    wanted = examined.run.config.tracking.wandb
    mode, key = resolve_mode(wanted), os.environ.get("WANDB_API_KEY") or ""
    if mode is WandbMode.online:
        key = key or _key_in_netrc()
    if mode is WandbMode.off:
        yield FINE, "off"
    elif mode is WandbMode.offline and not key and wanted is WandbMode.auto and _key_in_netrc():
        text = "offline: `wandb login` has left a key, and WANDB_API_KEY is not set"
        yield WARNING, text, "tracking.wandb=online uses that key."
    elif mode is WandbMode.offline:
        yield FINE, "offline; `wandb sync` uploads it later, WANDB_API_KEY at once"
    elif not key:
        yield WARNING, "online, and there is no key", "Set WANDB_API_KEY, or run `wandb login`."
    elif len(key.rpartition("-")[2]) < _KEY_LENGTH:
        text = f"the key has {len(key)} signs, and W&B's have {_KEY_LENGTH} or more"
        yield WARNING, text, "Copy it again from https://wandb.ai/authorize"
    else:
        yield FINE, "online, with a key; whether the server takes it is not asked"


def _key_in_netrc() -> str:
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    with contextlib.suppress(OSError, netrc.NetrcParseError):
        login = netrc.netrc(os.environ.get("NETRC")).authenticators(host)
        return (login[2] or "") if login else ""
    return ""


@contextlib.contextmanager
def _probe(folder: str) -> Iterator[Any]:
    """Yield the path of a small file in a folder or bucket, and remove it and any created folders afterwards."""
    path = parse_path(folder)
    local = isinstance(path, Path) and not in_bucket(folder)
    missing = [place for place in (path, *path.parents) if not place.exists()] if local else []
    probe = path / f".doctor-{socket.gethostname()}-{os.getpid()}"
    try:
        with disk_errors(Path(folder)) if local else contextlib.nullcontext():
            path.mkdir(parents=True, exist_ok=True)
            probe.write_bytes(_TEXT.encode())
        yield probe
    finally:
        with contextlib.suppress(OSError):
            probe.unlink(missing_ok=True)
        for place in missing:
            with contextlib.suppress(OSError):  # another process may have written there meanwhile
                place.rmdir()
