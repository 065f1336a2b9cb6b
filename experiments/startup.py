"""Measures how long processes take to connect and agree before a run starts, compared with JAX's distributed start.

    python experiments/startup.py --processes 8

All processes import everything first and start at the same moment. Prints the seconds of the slowest process, as
medians over `--repeats` starts. If there are fewer cores than processes, all times are longer.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from valkyrie.processes.hub import free_port

ACTIVITIES = ("meet", "versions", "configuration", "jax")


def main() -> None:
    """Start the processes and print the times, or run as one of the processes."""
    parser = argparse.ArgumentParser(description="Time the start of a run of several processes.")
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--member", type=Path, help="run as one of the processes, which share this folder")
    args = parser.parse_args()
    if args.member:
        return run_process(args.member, args.processes)
    print(f"{args.processes} processes on {os.cpu_count()} cores; seconds of the slowest, medians of {args.repeats}")
    print("| | meet | compare versions | compare configuration | together | jax.distributed.initialize |")
    print("|---|---:|---:|---:|---:|---:|")
    for with_agreement in (True, False):
        starts = [start_processes(args.processes, with_agreement) for _ in range(args.repeats)]
        row = {name: statistics.median(times[name] for times in starts) for name in (*ACTIVITIES, "before_jax_s")}
        cells = [row["meet"], row["versions"], row["configuration"], row["before_jax_s"], row["jax"]]
        print(f"| {'as a run starts' if with_agreement else 'JAX alone'} | {' | '.join(f'{s:.2f}' for s in cells)} |")


def start_processes(process_count: int, with_agreement: bool) -> dict[str, float]:
    """Start the processes once, and return the seconds of each activity, as the maximum over processes.

    Keys are the `ACTIVITIES`, and `before_jax_s` for the total before JAX starts. If `with_agreement` is False, the
    processes only start JAX, and the other activities take 0 seconds.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "settings").write_text(
            json.dumps({"with_agreement": with_agreement, "address": f"127.0.0.1:{free_port()}"})
        )
        command = [sys.executable, __file__, "--processes", str(process_count), "--member", name]
        children = [
            subprocess.Popen(command, env=os.environ | {"MEMBER": str(i)}, stdout=subprocess.DEVNULL)
            for i in range(process_count)
        ]
        for child in children:
            assert child.wait() == 0
        times = [json.loads(path.read_text()) for path in folder.glob("times-*")]
    return {name: max(member_times[name] for member_times in times) for name in times[0]}


def run_process(folder: Path, process_count: int) -> None:
    """Run as one process: wait until all are ready, start, and write the time of each activity."""
    import jax

    from valkyrie.api import compose
    from valkyrie.processes.distributed import DistributedConfig, start_jax
    from valkyrie.processes.team import ConnectedTeam, ProcessInfo
    from valkyrie.train.processes import agree_on_configuration, agree_on_versions

    jax.config.update("jax_platforms", "cpu")
    settings, index = json.loads((folder / "settings").read_text()), int(os.environ["MEMBER"])
    run, process_info = compose("name=startup"), ProcessInfo(settings["address"], process_count, index)
    (folder / f"ready-{index}").touch()
    while len(list(folder.glob("ready-*"))) < process_count:
        time.sleep(0.01)
    start, times, team = time.perf_counter(), dict.fromkeys(ACTIVITIES, 0.0), None

    def record(name: str, start_of_activity: float) -> float:
        times[name] = time.perf_counter() - start_of_activity
        return time.perf_counter()

    activity_start = start
    if settings["with_agreement"]:
        team = ConnectedTeam(process_info, timeout_s=60, heartbeat_s=60)
        activity_start = record("meet", activity_start)
        agree_on_versions(team)
        activity_start = record("versions", activity_start)
        agree_on_configuration(team, run)
        activity_start = record("configuration", activity_start)
    before_jax_s = time.perf_counter() - start
    start_jax(DistributedConfig(), process_info)
    record("jax", activity_start)
    (folder / f"times-{index}").write_text(json.dumps(times | {"before_jax_s": before_jax_s}))
    if team is not None:
        team.finish()


if __name__ == "__main__":
    main()
