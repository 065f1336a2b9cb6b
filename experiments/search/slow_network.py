"""Measures every layout of four CPU processes over a slow network and compares the times with their estimates.

python experiments/search/slow_network.py            # the table, of measured_slow_network.csv
sudo python experiments/search/slow_network.py --measure [--rate 100]     # measures first: Linux, as root

Each process has a network namespace of its own, joined to the others by a bridge; what it sends is limited to so many
Mbit/s (token bucket filter). The estimate takes that rate, and products and copies timed on this machine before; of
the layouts it knows nothing.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table
from scipy.stats import spearmanr

from valkyrie.hardware import ChipConfig, Platform, TargetConfig
from valkyrie.parallel.partition import PartitionConfig
from valkyrie.paths import read_group
from valkyrie.search.estimate.rank import Estimated, rank
from valkyrie.search.estimate.space import space_of
from valkyrie.train.arguments import run_of

FILE = Path(__file__).with_name("measured_slow_network.csv")
HOSTS, NETWORK, PORT = 4, "10.77.0", 8476
LIMIT_S = 180
WORK = ("model=gpt_tiny", "precision=float32", "remat=none")
BATCHES = (16,)
"""Sequences a step, of each table."""
NO_OVERLAP = {f"hidden_{what}": 0.0 for what in ("weights", "gradients", "activations", "stages", "host")}
"""XLA's CPU programs compute nothing beside a collective."""
REACHED = {
    "products": 1.0,
    "mixing": 1.0,
    "hbm": 1.0,
    "float32_passes": 1.0,
    "gathers": 1.0,
    "sums": 1.0,
    "outside": 1.0,
}
"""The chip's figures are what was measured here, or the limit itself, so that nothing is taken off them."""


def main() -> None:
    """Measure if asked to, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--rate", type=float, default=100.0, help="Mbit/s that each process may send")
    parser.add_argument("--most", type=int, default=0, help="measure at most so many layouts; 0: all")
    asked, console = parser.parse_args(), Console(width=130, highlight=False)
    if asked.measure:
        with slow_network(asked.rate):
            rows = [
                row for batch in BATCHES for row in measured(layouts(asked.rate, batch), batch, asked.most, console)
            ]
        with FILE.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    with FILE.open() as file:
        rows = list(csv.DictReader(file))
    for batch in BATCHES:
        show(batch, [row for row in rows if row["batch"] == str(batch)], console)


def layouts(rate_mbit: float, batch: int) -> list[Estimated]:
    """Return every layout of four devices without a pipeline, the one with the shortest estimate first."""
    run = run_of(["mode=show", *WORK, f"batch={batch}"])
    target = TargetConfig(name="slow", platform=Platform.gpu, chip=chip(rate_mbit), chips=HOSTS, hosts=HOSTS)
    partitions = [p for p in read_group("partition", PartitionConfig) if not p.name.startswith("pp")]
    return list(rank(run, space_of(run, [target], partitions, (), microbatches=1)))


def chip(rate_mbit: float) -> ChipConfig:
    """Return one of the processes as a chip on a host of its own, by what products and copies take here."""
    n, count = 512, 2**24
    one, much = np.ones((n, n), np.float32), np.ones(count, np.float32)
    product = min(_seconds(lambda: one @ one) for _ in range(20))
    copy = min(_seconds(much.copy) for _ in range(10))
    return ChipConfig(
        name="process",
        platform=Platform.gpu,
        peak_tflops={"float32": 2 * n**3 / product / HOSTS / 1e12},
        hbm_gbs=8 * count / copy / HOSTS / 1e9,
        host_bounds=[1],
        switch_gbs=1.0,
        dcn_gbs_per_host=rate_mbit / 8000,
        estimate=NO_OVERLAP | REACHED,
    )


def _seconds(function: object) -> float:
    assert callable(function)
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


@contextmanager
def slow_network(rate_mbit: float) -> Iterator[None]:
    """Join namespaces vt0 to vt3 by a bridge, each sending at most so many Mbit/s; take them down at the end."""
    try:
        _run("ip link add vtbr type bridge")
        _run("ip link set vtbr up")
        for i in range(HOSTS):
            inside = f"ip netns exec vt{i} "
            _run(f"ip netns add vt{i}")
            _run(f"ip link add vh{i} type veth peer name eth0 netns vt{i}")
            _run(f"ip link set vh{i} master vtbr up")
            _run(f"{inside}ip addr add {NETWORK}.{i + 1}/24 dev eth0")
            for device in ("eth0", "lo"):
                _run(f"{inside}ip link set {device} up")
            _run(f"{inside}tc qdisc add dev eth0 root tbf rate {rate_mbit}mbit burst 64kb latency 100ms")
            hosts = Path(f"/etc/netns/vt{i}/hosts")  # gloo binds to the address of the machine's own name
            hosts.parent.mkdir(parents=True, exist_ok=True)
            hosts.write_text(f"127.0.0.1 localhost\n{NETWORK}.{i + 1} {socket.gethostname()}\n")
        yield
    finally:
        for i in range(HOSTS):
            _run(f"ip link del vh{i}", check=False)
            _run(f"ip netns del vt{i}", check=False)
            Path(f"/etc/netns/vt{i}/hosts").unlink(missing_ok=True)
        _run("ip link del vtbr", check=False)


def _run(command: str, *, check: bool = True) -> None:
    subprocess.run(command.split(), check=check, capture_output=not check)


def measured(estimates: Sequence[Estimated], batch: int, most: int, console: Console) -> list[dict[str, str]]:
    """Return each layout with its estimate and its measured median, both in seconds.

    The choice and the layout measured as the fastest are then measured again in turns, and have the median of all.
    """
    every = estimates[:: max(len(estimates) // most, 1)] if most else estimates
    seconds = {}
    for one in every:
        seconds[name(one)] = [step_s(one, batch)]
        console.print(
            f"{name(one)}: estimated {one.step_s:.3f} s, measured {seconds[name(one)][0]:.3f} s", markup=False
        )
    best = min(every, key=lambda one: seconds[name(one)][0])
    for one in [every[0], best] * 2 if best is not every[0] else []:
        seconds[name(one)].append(step_s(one, batch))
    return [
        {
            "batch": str(batch),
            "layout": name(one),
            "estimated_s": f"{one.step_s:.4f}",
            "measured_s": f"{np.median(seconds[name(one)]):.4f}",
            "times": str(len(seconds[name(one)])),
        }
        for one in every
    ]


def name(one: Estimated) -> str:
    """Return the overrides of a layout without the target, its remat and what is of the torus."""
    return " ".join(o for o in one.overrides[1:] if not o.startswith(("remat=", "mesh.placement=")))


def step_s(one: Estimated, batch: int) -> float:
    """Return the median seconds of a step of a layout, run by a process in each namespace."""
    with tempfile.TemporaryDirectory() as folder:
        shared = [
            "mode=measure",
            *WORK,
            f"batch={batch}",
            *name(one).split(),
            f"runs={folder}",
            "name=timed",
            "mode.repeats=5",
        ]
        shared += [f"distributed.coordinator={NETWORK}.1:{PORT}", f"distributed.processes={HOSTS}"]
        command = [sys.executable, "-m", "valkyrie.cli.train", *shared]
        environment = {**os.environ, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
        started = [
            subprocess.Popen(
                ["ip", "netns", "exec", f"vt{i}", *command, f"distributed.process={i}"],
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for i in range(HOSTS)
        ]
        try:
            said = [process.communicate(timeout=LIMIT_S)[1] for process in started]
        finally:
            for process in started:
                process.kill()
        if started[0].returncode:
            raise RuntimeError(f"{name(one)} was not measured:\n{said[0][-2000:]}")
        return json.loads((Path(folder) / "timed" / "measure.json").read_text())["step"]["step_s"]


def show(batch: int, rows: Sequence[dict[str, str]], console: Console) -> None:
    """Print every layout, and what the search's choice costs beside what a user may choose without it."""
    table = Table("layout", "estimated", "measured", "slower than the best")
    estimated, known = (np.array([float(row[key]) for row in rows]) for key in ("estimated_s", "measured_s"))
    for i in np.argsort(known):
        more = f"{100 * (known[i] / known.min() - 1):.0f}%"
        table.add_row(rows[i]["layout"], f"{1e3 * estimated[i]:.0f} ms", f"{1e3 * known[i]:.0f} ms", more)
    console.print(table)
    choice = int(estimated.argmin())
    regret, median = known[choice] / known.min() - 1, np.median(known) / known.min() - 1
    agreement = spearmanr(estimated, known)[0]
    console.print(
        f"batch={batch}, {len(rows)} layouts: Spearman {agreement:.3f}; the search chooses {rows[choice]['layout']}, "
        f"{100 * regret:.1f}% slower than the best measured; the median layout is {100 * median:.0f}% slower.",
        markup=False,
    )


if __name__ == "__main__":
    main()
