"""Compares measured step times of four CPU processes on a slow network with their estimates.

    python experiments/search/slow_network.py            # print the table from measured_slow_network.csv
    sudo python experiments/search/slow_network.py --measure [--rate 100]     # measure first: needs Linux and root

`--measure` measures every layout without a pipeline, or about N of them with `--most N`. Each process has a separate
network namespace, connected to the others by a bridge. Its sending rate is limited to `--rate` Mbit/s (token bucket
filter). The namespaces have no names on the machine and end with this process. The estimate uses only the figures that
`mode=figures` measures on this network first, which are stored in slow_network_figures.json. It does not use
measurements of layouts.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table
from scipy.stats import spearmanr

from valkyrie.config.arguments import parse_run
from valkyrie.config.modes import FIGURES_FILE, MEASURE_FILE
from valkyrie.hardware.target import ChipConfig, TargetConfig
from valkyrie.parallel.partition import shipped_partitions
from valkyrie.search.estimate.rank import EstimatedLayout, rank
from valkyrie.search.estimate.space import enumerate_layouts
from valkyrie.search.measure.figures_file import describe_figures, read_figures

MEASURED_FILE = Path(__file__).with_name("measured_slow_network.csv")
STORED_FIGURES_FILE = Path(__file__).with_name("slow_network_figures.json")
HOSTS, NETWORK_PREFIX, PORT = 4, "10.77.0", 8476
TIME_LIMIT_S = 180
WORK_OVERRIDES = ("model=gpt_tiny", "precision=float32", "remat=none")
BATCHES = (16,)
"""Sequences per step. One table is printed for each."""
_NAMESPACE_COMMAND = 'mount --bind "$0" /etc/hosts && echo ready && exec cat'
"""Shell command that mounts the file $0 over /etc/hosts, then keeps the namespace alive until its stdin is closed."""


@dataclass(frozen=True)
class Network:
    """A separate network and mount namespace, which exists until its process ends."""

    process: subprocess.Popen[str]

    def command_inside(self, command: str) -> list[str]:
        """Return the argument list that runs `command` in this network. Splits `command` at spaces, ignoring quotes."""
        return ["nsenter", "--target", str(self.process.pid), "--net", "--mount", *command.split()]

    def run(self, command: str) -> None:
        """Run a command in this network. Raises CalledProcessError if it fails."""
        subprocess.run(self.command_inside(command), check=True)


def main() -> None:
    """Measure with `--measure`, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--rate", type=float, default=100.0, help="Mbit/s that each process may send")
    parser.add_argument("--most", type=int, default=0, help="measure at most so many layouts; 0: all")
    args, console = parser.parse_args(), Console(width=130, highlight=False)
    if args.measure:
        with slow_network(args.rate) as networks:
            figures = measure_figures(networks, STORED_FIGURES_FILE)
            console.print(describe_figures(figures), soft_wrap=True)
            rows = [
                row
                for batch in BATCHES
                for row in measure_layouts(networks, estimate_layouts(figures, batch), batch, args.most, console)
            ]
        with MEASURED_FILE.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    for batch in BATCHES:
        print_table(batch, read_measured(batch), console)


def read_measured(batch: int) -> list[tuple[str, float, float]]:
    """Return (name, estimate, measured median) for each measured layout. Both times are seconds per step."""
    estimates = {
        layout_name(layout): layout.step_s for layout in estimate_layouts(read_figures(STORED_FIGURES_FILE), batch)
    }
    with MEASURED_FILE.open() as file:
        rows = [row for row in csv.DictReader(file) if row["batch"] == str(batch)]
    return [(row["layout"], estimates[row["layout"]], float(row["measured_s"])) for row in rows]


def estimate_layouts(figures: ChipConfig, batch: int) -> list[EstimatedLayout]:
    """Return the layouts that are legal on `HOSTS` devices, without pipelines, ordered from the shortest estimate.

    The estimates are computed from `figures`, the measured speeds of the devices and the network.
    """
    run = parse_run(["mode=show", *WORK_OVERRIDES, f"batch={batch}"])
    target = TargetConfig(f"cpu{HOSTS}", "cpu", figures, chips=HOSTS, hosts=HOSTS)
    partitions = [p for p in shipped_partitions(run.arrays.axes) if not p.name.startswith("pp")]
    return list(rank(run, enumerate_layouts(run, [target], partitions, (), microbatches=1)))


@contextmanager
def slow_network(rate_mbit: float) -> Iterator[list[Network]]:
    """Yield `HOSTS` networks connected by a bridge. Each can send at most `rate_mbit` Mbit/s.

    The machine's own network and files do not change. On exit, the networks and the bridge are removed. Raises
    RuntimeError if a network cannot be created (see `create_network`), and CalledProcessError if its setup fails.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        bridge = stack.enter_context(create_network(Path("/etc/hosts")))
        bridge.run("ip link add bridge type bridge")
        bridge.run("ip link set bridge up")
        networks = []
        for i in range(HOSTS):
            hosts_file = folder / str(i)  # gloo binds to the address of the machine's host name
            hosts_file.write_text(f"127.0.0.1 localhost\n{NETWORK_PREFIX}.{i + 1} {socket.gethostname()}\n")
            network = stack.enter_context(create_network(hosts_file))
            bridge.run(f"ip link add host{i} type veth peer name eth0 netns {network.process.pid}")
            bridge.run(f"ip link set host{i} master bridge up")
            network.run(f"ip addr add {NETWORK_PREFIX}.{i + 1}/24 dev eth0")
            for device in ("eth0", "lo"):
                network.run(f"ip link set {device} up")
            network.run(f"tc qdisc add dev eth0 root tbf rate {rate_mbit}mbit burst 64kb latency 100ms")
            networks.append(network)
        yield networks


@contextmanager
def create_network(hosts_file: Path) -> Iterator[Network]:
    """Yield a network that is not connected to any other. Its processes read the file `hosts_file` as /etc/hosts.

    Raises RuntimeError if the network cannot be created, for example without root.
    """
    command = ["unshare", "--net", "--mount", "sh", "-c", _NAMESPACE_COMMAND, str(hosts_file)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise RuntimeError("no network of our own can be made: this takes root, on Linux.")
        yield Network(process)  # on exit, Popen closes its stdin, which ends the process


def unavailable_reason() -> str | None:
    """Return the reason that no slow network can be created on this machine, or None if it can."""
    if missing := [tool for tool in ("unshare", "nsenter", "ip", "tc") if not shutil.which(tool)]:
        return f"{missing[0]} is not installed"
    try:
        with slow_network(100.0):
            return None
    except (RuntimeError, subprocess.CalledProcessError) as error:
        return str(error)


def measure_figures(networks: Sequence[Network], file: Path) -> ChipConfig:
    """Measure the speeds of the devices and the network with `mode=figures`. Store them in `file` and return them."""
    with tempfile.TemporaryDirectory() as folder:
        run_together(
            networks, ["mode=figures", f"target=cpu{HOSTS}", f"mesh={HOSTS}x1x1", *WORK_OVERRIDES, f"runs={folder}"]
        )
        shutil.copyfile(Path(folder) / "timed" / FIGURES_FILE, file)
    return read_figures(file)


def measure_layouts(
    networks: Sequence[Network], estimates: Sequence[EstimatedLayout], batch: int, max_layouts: int, console: Console
) -> list[dict[str, str]]:
    """Measure layouts, and return the rows of the CSV file.

    `measured_s` is the median of a layout's measurements in seconds, and `times` is their number. The layout with the
    shortest estimate and the one measured as the fastest are measured twice more in alternation, unless they are the
    same layout.

    Args:
        networks: Networks to run in, one process in each.
        estimates: Layouts to measure, the shortest estimate first.
        batch: Sequences per step.
        max_layouts: Approximate number of layouts to measure, evenly spaced over `estimates`, or 0 for all.
        console: Where to print the result of each layout.
    """
    chosen_layouts = estimates[:: max(len(estimates) // max_layouts, 1)] if max_layouts else estimates
    seconds_by_layout = {}
    for layout in chosen_layouts:
        step_s = measure_step_s(networks, layout, batch)
        seconds_by_layout[layout_name(layout)] = [step_s]
        console.print(f"{layout_name(layout)}: estimated {layout.step_s:.3f} s, measured {step_s:.3f} s", markup=False)
    best = min(chosen_layouts, key=lambda layout: seconds_by_layout[layout_name(layout)][0])
    for layout in [chosen_layouts[0], best] * 2 if best is not chosen_layouts[0] else []:
        seconds_by_layout[layout_name(layout)].append(measure_step_s(networks, layout, batch))
    return [
        {
            "batch": str(batch),
            "layout": layout_name(layout),
            "measured_s": f"{np.median(seconds_by_layout[layout_name(layout)]):.4f}",
            "times": str(len(seconds_by_layout[layout_name(layout)])),
        }
        for layout in chosen_layouts
    ]


def layout_name(layout: EstimatedLayout) -> str:
    """Return the overrides of a layout in one line, without target, remat and placement."""
    return " ".join(o for o in layout.candidate.overrides[1:] if not o.startswith(("remat=", "mesh.placement=")))


def measure_step_s(networks: Sequence[Network], layout: EstimatedLayout, batch: int) -> float:
    """Return the median seconds per step of a layout, run by a process in each network."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = [
            "mode=measure",
            "mode.repeats=5",
            *WORK_OVERRIDES,
            f"batch={batch}",
            *layout_name(layout).split(),
            f"runs={folder}",
        ]
        run_together(networks, arguments)
        return json.loads((Path(folder) / "timed" / MEASURE_FILE).read_text())["step"]["step_s"]


def run_together(networks: Sequence[Network], arguments: Sequence[str]) -> None:
    """Run `valkyrie-train` with these arguments in all networks, as the processes of one run.

    Raises RuntimeError with the end of a failed process's stderr. If waiting for a process takes longer than
    `TIME_LIMIT_S`, kills all processes and raises TimeoutExpired.
    """
    shared = [*arguments, "name=timed", f"distributed.coordinator={NETWORK_PREFIX}.1:{PORT}"]
    command = " ".join([sys.executable, "-m", "valkyrie.cli.train", *shared, f"distributed.processes={len(networks)}"])
    environment = {**os.environ, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    processes = [
        subprocess.Popen(
            network.command_inside(f"{command} distributed.process={i}"),
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i, network in enumerate(networks)
    ]
    try:
        errors = [process.communicate(timeout=TIME_LIMIT_S)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
            if process.stderr is not None:
                process.stderr.close()
    if failed := [error for process, error in zip(processes, errors, strict=True) if process.returncode]:
        raise RuntimeError(f"{' '.join(arguments)} failed:\n{failed[0][-2000:]}")


def print_table(batch: int, rows: Sequence[tuple[str, float, float]], console: Console) -> None:
    """Print all layouts, and by how much the search's choice and the median layout are slower than the fastest one."""
    table = Table("layout", "estimated", "measured", "slower than the best")
    names, estimated, measured = [row[0] for row in rows], *np.array([row[1:] for row in rows]).T
    for i in np.argsort(measured):
        slowdown = f"{100 * (measured[i] / measured.min() - 1):.0f}%"
        table.add_row(names[i], f"{1e3 * estimated[i]:.0f} ms", f"{1e3 * measured[i]:.0f} ms", slowdown)
    console.print(table)
    choice = int(estimated.argmin())
    regret, median = measured[choice] / measured.min() - 1, np.median(measured) / measured.min() - 1
    agreement = spearmanr(estimated, measured)[0]
    console.print(
        f"batch={batch}, {len(rows)} layouts: Spearman {agreement:.3f}; the search chooses {names[choice]}, "
        f"{100 * regret:.1f}% slower than the best measured; the median layout is {100 * median:.0f}% slower.",
        markup=False,
    )


if __name__ == "__main__":
    main()
