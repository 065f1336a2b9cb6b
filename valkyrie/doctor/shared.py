"""The folder or bucket of durable checkpoints: whether it can be written, and whether all processes see the same."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from pathlib import Path
from typing import Any

from valkyrie.checkpoint.place import in_bucket, path_of
from valkyrie.config.run import Run
from valkyrie.doctor.disks import made
from valkyrie.doctor.findings import FAILS, FINE, Finding
from valkyrie.paths import why
from valkyrie.processes.team import Team

_TEXT = "valkyrie-doctor"


def checkpoint_folder(run: Run) -> list[Finding]:
    """Return whether `checkpoint.folder` can be written, read and cleared; nothing where checkpoints lie in `runs`."""
    folder = run.config.checkpoint.folder
    if folder is None:
        return []
    began = time.perf_counter()
    try:
        with contextlib.ExitStack() as stack:
            probe = _probe(stack, folder)
            read = probe.read_text()
    except Exception as error:  # the libraries of buckets raise many kinds: no bucket, no key, no network
        remedy = "Check its name and the credentials: gcloud auth application-default login."
        if not in_bucket(folder):
            remedy = "Write elsewhere with checkpoint.folder=DIR."
        text = f"checkpoint.folder={folder} cannot be used ({why(error)})"
        return [Finding("checkpoint folder", FAILS, text, remedy)]
    if read != _TEXT:
        text = f"checkpoint.folder={folder} does not give back what was written there"
        return [Finding("checkpoint folder", FAILS, text, "Use another: checkpoint.folder=DIR.")]
    spent = time.perf_counter() - began
    text = f"checkpoint.folder={folder} can be written, read and cleared ({spent:.2f} s for one small file)"
    return [Finding("checkpoint folder", FINE, text)]


def same_folder(run: Run, team: Team) -> list[Finding]:
    """Return whether this process sees what process 0 writes where the checkpoints will lie."""
    elsewhere = run.config.checkpoint.folder
    key, folder = ("runs", run.config.runs) if elsewhere is None else ("checkpoint.folder", elsewhere)
    with contextlib.ExitStack() as stack:
        name = None
        if team.leads:
            with contextlib.suppress(Exception):  # `run_folder` and `checkpoint_folder` say so
                name = _probe(stack, folder).name
        told = team.exchange("probe", name)[0]
        sees = told is None or (path_of(folder) / told).exists()
        team.wait("probe seen")
    if told is None:
        return []
    if sees:
        return [Finding("shared folder", FINE, f"all processes see what process 0 writes to {key}={folder}")]
    remedy = "Checkpoints need a folder that all hosts share: runs=DIR or checkpoint.folder=gs://BUCKET/DIR."
    return [Finding("shared folder", FAILS, f"what process 0 writes to {key}={folder} is not seen here", remedy)]


def _probe(stack: contextlib.ExitStack, folder: str) -> Any:
    """Return the path of a small file in a folder or bucket, which goes when the stack closes."""
    path = path_of(folder)
    if isinstance(path, Path) and not in_bucket(folder):
        stack.enter_context(made(path))
    probe = path / f".doctor-{socket.gethostname()}-{os.getpid()}"
    stack.callback(lambda: probe.unlink(missing_ok=True))
    probe.write_bytes(_TEXT.encode())
    return probe
