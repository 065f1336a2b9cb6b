"""Starts the processes of a training run together, stops them together, and restarts them after a crash.

The exit statuses 0, 2 and 130 of `valkyrie-train` end the job. 75 means that the training has saved its state and can
be restarted. Any other status, or death by a signal, is a crash. 69 means that another process failed first or that a
step hung.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from valkyrie.processes.child import ChildProcess, wait_for
from valkyrie.processes.ending import (
    EXIT_DONE,
    EXIT_INTERRUPTED,
    EXIT_LOST,
    EXIT_PREEMPTED,
    EXIT_REFUSED,
    describe_status,
)
from valkyrie.processes.hub import free_port
from valkyrie.processes.interrupt import on_signals
from valkyrie.processes.team import ProcessInfo

RESTARTS_VARIABLE = "VALKYRIE_LAUNCH_RESTARTS"
"""Environment variable with the number of restarts so far, set for the processes of a training run."""

_FINAL_STATUSES = (EXIT_DONE, EXIT_REFUSED, EXIT_INTERRUPTED)
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class ProcessSpec:
    """A process to start: its command, and environment variables in addition to the launcher's."""

    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


def local_processes(command: Sequence[str], processes: int) -> list[ProcessSpec]:
    """Return the specs of `processes` processes that run `command` on this host.

    Several processes connect through a free port. A single process connects to no other.
    """
    if processes == 1:
        return [ProcessSpec(tuple(command))]
    address = f"127.0.0.1:{free_port()}"
    return [
        ProcessSpec(tuple(command), ProcessInfo(address, processes, index).environment) for index in range(processes)
    ]


@dataclass(frozen=True)
class Supervisor:
    """Runs the processes of a training run and restarts them.

    Args:
        prepare: prepares the hosts and returns the processes to start, given the number of earlier starts.
        restarts: maximum number of restarts after crashes.
        logs: folder for the output of workers.
        send_signal: sends a signal to the processes on other hosts; None to signal the local processes instead.
        clean_up: called after a failed attempt.
        is_preempted: returns whether the hosts were preempted, which does not count as a crash.
        grace_s: seconds that the other processes have to stop after a crash.
        notice_s: seconds that the processes have to save after SIGTERM or a preemption.
        min_uptime_s: exit status 75 within this many seconds of the start counts as a crash unless `is_preempted`, to
            avoid endless restarts.
    """

    prepare: Callable[[int], Sequence[ProcessSpec]]
    restarts: int
    logs: Path
    send_signal: Callable[[int], None] | None = None
    clean_up: Callable[[], None] = lambda: None
    is_preempted: Callable[[], bool] = lambda: False
    grace_s: float = 2.0
    notice_s: float = 30.0
    min_uptime_s: float = 10.0

    def run(self) -> int:
        """Run the processes until the training run ends or cannot be restarted, and return the exit status.

        The status is 0 on success and 130 after Ctrl-C. After SIGTERM or SIGHUP, it is 75 if all processes have saved
        their state and 143 if not. Otherwise, it is that of a failed process: 128 + N if signal N killed the process.
        """
        crash_count = start_count = 0
        while True:
            specs, start_time = self.prepare(start_count), time.monotonic()
            received_signals: list[int] = []
            with on_signals(received_signals.append, _SIGNALS):
                status = self._run_once(specs, start_count, received_signals)
            if status != EXIT_DONE:
                self.clean_up()
            if received_signals or status in _FINAL_STATUSES:
                return status
            has_saved = status == EXIT_PREEMPTED and time.monotonic() - start_time >= self.min_uptime_s
            has_crashed = not (has_saved or self.is_preempted())
            crash_count += has_crashed
            if crash_count > self.restarts:
                print_message(f"not restarting: the limit of --restarts {self.restarts} is reached")
                return status if status > 0 else 128 - status
            start_count += 1
            print_message(f"restarting{f' ({crash_count} of {self.restarts})' if has_crashed else ''}")

    def _run_once(self, specs: Sequence[ProcessSpec], start_count: int, received_signals: Sequence[int]) -> int:
        """Start all processes and return the status of the first one that fails, or 0. Leaves no process running."""
        processes: list[ChildProcess] = []
        try:
            for index, spec in enumerate(specs):
                log = None if index == 0 else self.logs / f"process-{index}.log"
                environment = {**spec.environment, RESTARTS_VARIABLE: str(start_count)}
                processes.append(ChildProcess(spec.command, environment, log, index=index, dies_with_parent=True))
            return self._watch(processes, received_signals)
        finally:
            for process in processes:
                process.kill()

    def _watch(self, processes: Sequence[ChildProcess], received_signals: Sequence[int]) -> int:
        while True:
            statuses = {process: process.status for process in processes}
            failed_processes = [process for process, status in statuses.items() if status not in (None, EXIT_DONE)]
            if received_signals:
                return self._stop(processes, received_signals)
            if failed_processes:
                # Peers of a killed process fail within milliseconds, so a death by signal comes before other failures.
                first_failure = min(failed_processes, key=lambda process: (statuses[process] or 0) >= 0)
                return self._report_failure(first_failure, processes, received_signals)
            if None not in statuses.values():
                return EXIT_DONE
            time.sleep(0.02)

    def _report_failure(
        self, failed_process: ChildProcess, processes: Sequence[ChildProcess], received_signals: Sequence[int]
    ) -> int:
        """Wait for the other processes after one has failed, report the failure, and return the exit status."""
        is_saving = failed_process.status in (EXIT_PREEMPTED, EXIT_INTERRUPTED)
        wait_for(processes, self.notice_s if is_saving else self.grace_s)
        if received_signals:
            return self._stop(processes, received_signals)
        if failed_process.status == EXIT_LOST:  # another process failed first, or a step hung
            failed_process = next(
                (process for process in processes if process.status not in (None, EXIT_DONE, EXIT_LOST)), failed_process
            )
        status, peers = failed_process.status, [process for process in processes if process is not failed_process]
        assert status is not None
        outcome = "was preempted and has saved" if status == EXIT_PREEMPTED else f"ended {describe_status(status)}"
        position = f", the first of {len(processes)}" if peers else ""
        running_text = _describe_running(peers)
        if len(processes) > 1 or status not in _FINAL_STATUSES:
            killing = f"; killing {running_text}" if running_text else ""
            print_message(f"process {failed_process.index} {outcome}{position}{killing}")
        if not is_saving and processes[0].status != status and (lines := failed_process.last_lines()):
            print_message(f"the last lines of {failed_process.log}:", *(f"  {line}" for line in lines))
        failed_statuses = [
            process.status for process in peers if process.status not in (None, EXIT_DONE, EXIT_PREEMPTED)
        ]
        return failed_statuses[0] or status if status == EXIT_PREEMPTED and failed_statuses else status

    def _stop(self, processes: Sequence[ChildProcess], received_signals: Sequence[int]) -> int:
        """Forward the launcher's signal to all processes, wait until they have saved, and return the exit status."""
        is_ctrl_c = received_signals[0] == signal.SIGINT
        limit_text = " (press Ctrl-C again to kill without saving)" if is_ctrl_c else f" (at most {self.notice_s:g} s)"
        running_processes = [process for process in processes if process.status is None]
        if running_processes:
            print_message(f"stopping: waiting for {_describe_running(running_processes)} to save{limit_text}")
        for send_signal in [self.send_signal] if self.send_signal else [process.send for process in running_processes]:
            send_signal(signal.SIGINT if is_ctrl_c else signal.SIGTERM)
        deadline = float("inf") if is_ctrl_c else time.monotonic() + self.notice_s
        while _describe_running(processes) and len(received_signals) == 1 and time.monotonic() < deadline:
            time.sleep(0.02)
        if still_running := _describe_running(processes):
            print_message(f"killing {still_running} without waiting longer for a save")
        statuses = {process.status for process in processes}
        if is_ctrl_c:
            return EXIT_INTERRUPTED
        if statuses == {EXIT_DONE}:
            return EXIT_DONE
        return EXIT_PREEMPTED if statuses <= {EXIT_DONE, EXIT_PREEMPTED} else 128 + signal.SIGTERM


def print_message(*lines: str) -> None:
    """Print lines to stderr, the first with the prefix `valkyrie-launch: `."""
    with contextlib.suppress(OSError):  # stderr may be closed; the training continues
        print(*(f"valkyrie-launch: {line}" for line in lines[:1]), *lines[1:], sep="\n", file=sys.stderr, flush=True)


def _describe_running(processes: Sequence[ChildProcess]) -> str:
    """Return the running processes as text, such as `processes 0, 2`, or an empty string if none runs."""
    numbers = [str(process.index) for process in processes if process.status is None]
    return f"process{'es' * (len(numbers) > 1)} {', '.join(numbers)}" if numbers else ""
