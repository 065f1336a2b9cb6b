"""What a run writes and reads: its folder, checkpoints, compiled programs, data, the key of W&B. Imports no JAX."""

from __future__ import annotations

import contextlib
import netrc
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlparse

from valkyrie.checkpoint.place import in_bucket
from valkyrie.config.run import Run
from valkyrie.data.config import DataCheck
from valkyrie.doctor.findings import FAILS, FINE, WARNING, Finding
from valkyrie.doctor.size import state_bytes
from valkyrie.paths import DiskError, cache_root, cache_trouble, writing
from valkyrie.processes.team import Team
from valkyrie.runs.wandb_writer import WandbMode, resolve
from valkyrie.train.prepare import refuse_other_data
from valkyrie.units import memory

CLOCK_S = 2.0
"""By so many seconds may the clock of a disk, or of another host, be off without a word."""
_KEY_LENGTH = 40


def run_folder(run: Run) -> list[Finding]:
    """Return whether `runs` can be written, and whether its disk's clock is this host's."""
    runs = Path(run.config.runs)
    try:
        with made(runs), writing(runs), tempfile.NamedTemporaryFile(dir=runs, prefix=".doctor-") as probe:
            before = time.time()
            probe.write(b"x")
            probe.flush()
            off = os.fstat(probe.fileno()).st_mtime - before
    except DiskError as error:
        return [Finding("run folder", FAILS, str(error))]
    findings = [Finding("run folder", FINE, f"runs={runs} can be written")]
    if abs(off) > CLOCK_S:
        text = f"files in runs={runs} are dated {off:+.0f} s off the clock of this host"
        return [*findings, Finding("clock", WARNING, text, "Let both keep the time: timedatectl, chrony.")]
    return [*findings, Finding("clock", FINE, "that of the disk of runs= is this host's")]


def disk_space(run: Run, free: int | None = None) -> Finding:
    """Return whether the disk of the checkpoints has room for them; `free` bytes are asked of it if None."""
    config = run.config.checkpoint
    key, folder = ("runs", run.config.runs) if config.folder is None else ("checkpoint.folder", config.folder)
    keep, size = config.keep + config.keep_best, state_bytes(run)
    each = f"a checkpoint is {memory(size)}, {keep} are kept while one is written"
    if in_bucket(folder):
        return Finding("disk space", FINE, f"{key}={folder} is a bucket; {each}")
    free = shutil.disk_usage(_existing(Path(folder))).free if free is None else free
    needed = (keep + 1) * size
    text = f"{memory(free)} free in {key}={folder}; {each}"
    if needed > free:
        return Finding("disk space", FAILS, text, f"Free {memory(needed - free)}, or write elsewhere with {key}=DIR.")
    if needed > free / 2:
        return Finding("disk space", WARNING, text, "That is more than half of what is free.")
    return Finding("disk space", FINE, text)


def fast_disk_space(run: Run, processes: int, free: int | None = None) -> list[Finding]:
    """Return whether this host has room for its part of the fast checkpoints; nothing where there are none.

    A process keeps what its devices hold: its share of the state at least, all of it at most. `free` bytes are asked
    of the disk if None.
    """
    fast, size = run.config.checkpoint.fast, state_bytes(run)
    if fast.every is None:
        return []
    folder = Path(fast.folder or tempfile.gettempdir())
    free = shutil.disk_usage(_existing(folder)).free if free is None else free
    most = (fast.keep + 1) * size
    least = most // processes
    of = memory(most) if processes == 1 else f"{memory(least)} to {memory(most)}"
    text = f"{memory(free)} free in {folder}; fast checkpoints take {of}"
    if least > free:
        remedy = "Use checkpoint.fast.folder=DIR, or do without: checkpoint.fast.every=null"
        return [Finding("fast disk space", FAILS, text, remedy)]
    return [Finding("fast disk space", WARNING if most > free else FINE, text)]


def compile_cache() -> Finding:
    """Return whether compiled programs can be kept for the next start."""
    folder = Path(os.environ.get("JAX_COMPILATION_CACHE_DIR") or cache_root() / "xla")
    if "://" in str(folder):
        return Finding("compile cache", FINE, f"{folder}, which is not looked at")
    key = "JAX_COMPILATION_CACHE_DIR=DIR" if "JAX_COMPILATION_CACHE_DIR" in os.environ else "VALKYRIE_CACHE=DIR"
    if trouble := cache_trouble(folder, key):
        return Finding("compile cache", WARNING, f"every start compiles anew: {trouble}")
    return Finding("compile cache", FINE, str(folder))


def data(run: Run) -> Finding:
    """Check that the training data is there, and is enough for a batch."""
    try:
        refuse_other_data(run)
        found = _check_data(run)
    except (ValueError, OSError) as error:
        return Finding("data", FAILS, str(error))
    return Finding("data", WARNING if found.advice else FINE, found.text, found.advice or "")


def _check_data(run: Run) -> DataCheck:
    config = run.config
    return config.data.check(run.tokenizer, config.batch, config.seq, config.steps)


def same_data(run: Run, team: Team) -> list[Finding]:
    """Compare the prepared data of all processes; no finding if fewer than two have it."""
    content = None
    with contextlib.suppress(ValueError, OSError):  # `data` reports them
        content = _check_data(run).content
    contents = team.exchange("content of the data", content)
    known = {index: found for index, found in enumerate(contents) if found is not None}
    if len(known) < 2 or team.index not in known:
        return []
    first = min(known)
    if known[team.index] == known[first]:
        return [Finding("same data", FINE, "on all processes that have them prepared")]
    text = f"{known[team.index]}, and {known[first]} on process {first}"
    return [
        Finding("same data", FAILS, text, "Copy the files of data.paths, or the cache, from one host to the others.")
    ]


def tracking(run: Run) -> Finding:
    """Return whether W&B has a key where it wants one; the network is not asked."""
    wanted = run.config.tracking.wandb
    mode, key = resolve(wanted), os.environ.get("WANDB_API_KEY") or ""
    if mode is WandbMode.off:
        return Finding("W&B", FINE, "off")
    if mode is WandbMode.offline:
        if not key and wanted is WandbMode.auto and _key_in_netrc():
            text = "offline: `wandb login` has left a key, and WANDB_API_KEY is not set"
            return Finding("W&B", WARNING, text, "tracking.wandb=online uses that key.")
        return Finding("W&B", FINE, "offline; `wandb sync` uploads it later, WANDB_API_KEY at once")
    key = key or _key_in_netrc()
    if not key:
        return Finding("W&B", WARNING, "online, and there is no key", "Set WANDB_API_KEY, or run `wandb login`.")
    if len(key.rpartition("-")[2]) < _KEY_LENGTH:
        text = f"the key has {len(key)} signs, and W&B's have {_KEY_LENGTH} or more"
        return Finding("W&B", WARNING, text, "Copy it again from https://wandb.ai/authorize")
    return Finding("W&B", FINE, "online, with a key; whether the server takes it is not asked")


def _key_in_netrc() -> str:
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    with contextlib.suppress(OSError, netrc.NetrcParseError):
        found = netrc.netrc(os.environ.get("NETRC")).authenticators(host)
        return (found[2] or "") if found else ""
    return ""


@contextlib.contextmanager
def made(folder: Path) -> Iterator[None]:
    """Have a folder inside; what of it was not there before is gone afterwards."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        yield
    finally:
        for path in missing:
            with contextlib.suppress(OSError):  # another process may have written there meanwhile
                path.rmdir()


def _existing(path: Path) -> Path:
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())
