"""Estimates against measured steps of four processes over a network that is really slow (experiments/search)."""

from __future__ import annotations

import csv
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

SEARCH = Path(__file__).parents[1] / "experiments" / "search"
sys.path.insert(0, str(SEARCH))
slow_network = import_module("slow_network")  # a script, found by the line above


def trouble() -> str | None:
    """Return why no network can be made here; None where it can."""
    if not shutil.which("ip") or not shutil.which("tc"):
        return "iproute2 is not installed"
    tried = subprocess.run(["ip", "netns", "add", "vttry"], capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "del", "vttry"], capture_output=True, check=False)
    return tried.stderr.strip() or None


# Kept, because only root may make namespaces and limit what they send, on Linux and in few containers. The rows that
# were measured are tested everywhere.
needs_namespaces = pytest.mark.skipif(trouble() is not None, reason=f"no network of our own: {trouble()}")


@pytest.mark.parametrize("batch", slow_network.BATCHES)
def test_the_choice_is_the_fastest_that_was_measured(batch: int) -> None:
    with slow_network.FILE.open() as file:
        rows = [row for row in csv.DictReader(file) if row["batch"] == str(batch)]
    estimated, known = (np.array([float(row[key]) for row in rows]) for key in ("estimated_s", "measured_s"))
    assert len(rows) >= 10 and known.max() > 3 * known.min(), "layouts differ"
    assert known[estimated.argmin()] <= 1.05 * known.min()


def test_layouts_of_the_slow_network_are_all_that_are_legal() -> None:
    found = slow_network.layouts(100.0, 16)
    assert len({slow_network.name(one) for one in found}) == len(found) > 10
    partitions = {one.group.candidates.partition.name for one in found}
    assert partitions >= {"dp", "fsdp", "1d_tp", "2d_tp", "sp", "fsdp_tp", "data_model_fsdp", "2d_tp_fsdp"}
    assert [one.step_s for one in found] == sorted(one.step_s for one in found)


@pytest.mark.slow
@pytest.mark.timeout(600)
@needs_namespaces
def test_the_choice_is_the_fastest_here_too() -> None:
    with slow_network.slow_network(100.0):
        rows = slow_network.measured(slow_network.layouts(100.0, 16), 16, 4, Console(quiet=True))
    known = np.array([float(row["measured_s"]) for row in rows])
    assert len(rows) >= 4 and known.max() > 2 * known.min()
    assert known[0] <= 1.05 * known.min()
