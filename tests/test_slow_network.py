"""Tests of estimates against measured steps of four processes on a slow network (experiments/search)."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

SEARCH = Path(__file__).parents[1] / "experiments" / "search"
sys.path.insert(0, str(SEARCH))
slow_network = import_module("slow_network")  # a script, found by the line above


@pytest.fixture
def networks_possible() -> None:
    """Skip the test on machines that cannot create network namespaces, which needs Linux, root, `ip` and `tc`.

    Tests of stored measurements do not use this fixture and run everywhere.
    """
    # Only network namespaces of the kernel limit the speed of real connections between processes.
    if reason := slow_network.unavailable_reason():
        pytest.skip(f"cannot create a slow network: {reason}")


@pytest.mark.parametrize("batch", slow_network.BATCHES)
def test_estimates_rank_the_measured_layouts_correctly(batch: int) -> None:
    from scipy.stats import spearmanr  # takes 1 s, in every collection if imported above

    _, estimated, measured = (np.array(column) for column in zip(*slow_network.read_measured(batch), strict=True))
    assert len(measured) >= 10 and measured.max() > 3 * measured.min(), "layouts differ"
    assert measured[estimated.argmin()] <= 1.05 * measured.min()
    agreement: Any = spearmanr(estimated, measured)
    assert agreement.statistic > 0.95


def test_layouts_of_the_slow_network_are_all_legal_ones() -> None:
    entries = slow_network.estimate_layouts(slow_network.read_figures(slow_network.STORED_FIGURES_FILE), 16)
    assert len({slow_network.layout_name(entry) for entry in entries}) == len(entries) > 10
    partitions = {entry.group.candidates.partition.name for entry in entries}
    assert partitions >= {"dp", "fsdp", "1d_tp", "2d_tp", "sp", "fsdp_tp", "data_model_fsdp", "2d_tp_fsdp"}


def describe_machine() -> str:
    """Return this machine's network links and namespaces as text, to check that a test leaves them unchanged."""
    links = subprocess.run(["ip", "-brief", "link"], capture_output=True, text=True, check=True).stdout
    return links + subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout


def run_in_network(network: Any, command: str) -> str:
    return subprocess.run(network.command_inside(command), capture_output=True, text=True, check=True).stdout


@pytest.mark.usefixtures("networks_possible")
def test_two_slow_networks_are_separate_and_leave_nothing_behind() -> None:
    before = describe_machine()
    with slow_network.slow_network(100.0) as first, slow_network.slow_network(50.0) as other:
        assert describe_machine() == before
        limits = [run_in_network(networks[0], "tc qdisc show dev eth0") for networks in (first, other)]
        assert "rate 100Mbit" in limits[0] and "rate 50Mbit" in limits[1]
        assert "10.77.0.2 " in run_in_network(first[1], "cat /etc/hosts")
    assert describe_machine() == before
    assert all(network.process.poll() is not None for network in (*first, *other))


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.usefixtures("networks_possible")
def test_the_estimates_choice_is_fastest_on_this_machine(tmp_path: Path) -> None:
    with slow_network.slow_network(100.0) as networks:
        figures = slow_network.measure_figures(networks, tmp_path / "figures.json")
        rows = slow_network.measure_layouts(
            networks, slow_network.estimate_layouts(figures, 16), 16, 4, Console(quiet=True)
        )
    measured = np.array([float(row["measured_s"]) for row in rows])
    assert len(rows) >= 4 and measured.max() > 2 * measured.min()
    assert measured[0] <= 1.05 * measured.min()
