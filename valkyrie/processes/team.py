"""The processes of a run: they connect, compare their settings, and detect the loss of a process.

If a process is missing, late or dead, JAX's coordination service ends the others without a useful message. Therefore
each process opens a TCP connection to process 0 before JAX starts and keeps it open. The connection carries small JSON
values, such as a digest of the configuration or the name of the run folder. If it closes, a process has died. If it is
silent, a host is unreachable.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from valkyrie.checksums import digest
from valkyrie.processes.ending import EXIT_LOST, EXIT_REFUSED, OUT_OF_MEMORY, end_process
from valkyrie.processes.hub import (
    Connection,
    ExchangeResult,
    ExchangeValue,
    Goodbye,
    Heartbeat,
    Hello,
    Hub,
    Lost,
    Refused,
    parse_address,
)

T = TypeVar("T")

COORDINATOR_VARIABLE, COUNT_VARIABLE, INDEX_VARIABLE = (
    "JAX_COORDINATOR_ADDRESS",
    "JAX_PROCESS_COUNT",
    "JAX_PROCESS_INDEX",
)
"""Environment variables with the address of process 0, the number of processes and the index of this process.

JAX reads the first one itself.
"""
HANG_REPORT_S = 1.0
"""Seconds that process 0 waits before it exits after a hang, so that the other processes can print their stacks.

JAX ends them when process 0 exits.
"""
_FINAL_EXCHANGE = "end"
"""Name of the last exchange. After it, a closed connection is not a failure."""


class ProcessInfo(NamedTuple):
    """How a process connects to the other processes of its run.

    Args:
        coordinator: address of process 0, as `HOST:PORT`.
        count: number of processes.
        index: index of this process, from 0.
        local_devices: indices of the host's devices that this process uses, or None for all.
    """

    coordinator: str
    count: int
    index: int
    local_devices: tuple[int, ...] | None = None

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that pass the address, count and index to a child process."""
        return {
            COORDINATOR_VARIABLE: self.coordinator,
            COUNT_VARIABLE: str(self.count),
            INDEX_VARIABLE: str(self.index),
        }


class Team:
    """The processes of a run, as seen from one of them. This base class is a team of one process, `ALONE`.

    All processes call the same methods in the same order.
    """

    def __init__(self, count: int = 1, index: int = 0) -> None:
        self.count, self.index = count, index
        self.on_hang: Callable[[str], None] = lambda line: None
        """Called with a message if another process hangs, before this process ends."""

    @property
    def is_leader(self) -> bool:
        """Whether this is process 0, which prints, writes the run folder and reports to trackers."""
        return self.index == 0

    def exchange(self, name: str, value: Any = None) -> list[Any]:
        """Send a JSON-serializable value. Returns the values of all processes under this name, in process order."""
        return [value]

    def wait(self, name: str) -> None:
        """Wait until all processes have called `wait` with the same name."""
        self.exchange(name)

    def broadcast_from_leader(self, name: str, make: Callable[[], T]) -> T:
        """Call `make` on process 0 and return its JSON-serializable result on all processes.

        If `make` raises ValueError or OSError, the other processes raise ValueError with the same message.
        """
        value, error = None, None
        if self.is_leader:
            try:
                value = make()
            except (ValueError, OSError) as caught:
                self.exchange(name, [None, str(caught)])
                raise
        value, error = self.exchange(name, [value, error])[0]
        if error is not None:
            raise ValueError(error)
        return value

    def agree(self, label: str, values: Mapping[str, object]) -> None:
        """Raise ValueError if `values` differ between processes. `label` names the values in the error message."""
        digests = self.exchange(f"agree on {label}", digest(values))
        if len(set(digests)) > 1:
            raise ValueError(_describe_disagreement(label, self.exchange(f"compare {label}", values)))

    def finish(self) -> None:
        """Wait until all processes are done, then leave."""

    def fail(self, status: int, reason: str) -> None:
        """Leave after an error. The other processes end too and print the reason.

        `status` is the exit status of this process.
        """


ALONE = Team()


class ConnectedTeam(Team):
    """The team of a run with several processes, each connected to process 0.

    Args:
        process_info: how this process connects.
        timeout_s: seconds to wait until all processes have connected.
        heartbeat_s: seconds without a message after which a process counts as lost.
        on_loss: called in a thread with a message and an exit status if a process is lost. The default ends this
            process, because its main thread may wait forever in a collective.

    Raises:
        ValueError: Process 0 cannot open its port, does not respond in time, or refuses to start because processes are
            late or inconsistent.
    """

    def __init__(
        self,
        process_info: ProcessInfo,
        *,
        timeout_s: float,
        heartbeat_s: float,
        on_loss: Callable[[str, int], None] | None = None,
    ) -> None:
        super().__init__(process_info.count, process_info.index)
        self.process_info = process_info
        self.on_loss = on_loss or self._end_process
        self._values_received = threading.Condition()
        self._exchanged_values: dict[str, list[Any]] = {}
        self._has_left, self._heartbeat_s = False, heartbeat_s
        deadline = time.monotonic() + timeout_s
        self._hub = (
            Hub(process_info.coordinator, process_info.count, deadline, heartbeat_s)
            if process_info.index == 0
            else None
        )
        self._connection = _connect(process_info, deadline, timeout_s)
        try:
            with contextlib.suppress(OSError):  # process 0 may have ended: its answer is read below
                self._connection.send(Hello(process_info.index, process_info.count, socket.gethostname()))
            self._await_start(process_info, deadline)
        except ValueError:
            self._connection.close()
            raise
        self._connection.set_timeout(heartbeat_s)
        self._listener, sender = (
            threading.Thread(target=work, args=(heartbeat_s,), name=f"team-{work.__name__}", daemon=True)
            for work in (self._listen, self._send_heartbeats)
        )
        self._listener.start()
        sender.start()

    def exchange(self, name: str, value: Any = None) -> list[Any]:
        """Send a JSON-serializable value. Returns the values of all processes under this name, in process order."""
        try:
            self._connection.send(ExchangeValue(name, value))
        except OSError as error:
            # `_listen` may not have read yet why process 0 ended, and with which status.
            self._listener.join(self._heartbeat_s)
            if self._listener.is_alive():
                self._report_loss(f"process 0 is lost: {error.strerror or error}")
            raise
        with self._values_received:
            # Waits without a timeout, because `_listen` detects a loss.
            self._values_received.wait_for(lambda: name in self._exchanged_values)
            return self._exchanged_values.pop(name)

    def finish(self) -> None:
        """Wait until all processes are done, then leave."""
        self.exchange(_FINAL_EXCHANGE)
        self._leave(Goodbye())
        if self._hub is not None:
            self._hub.close()
        self._connection.close()

    def fail(self, status: int, reason: str) -> None:
        """Leave after an error. The other processes end too and print the reason.

        `status` is the exit status of this process.
        """
        if self._hub is None:
            self._leave(Goodbye(reason, status))
        else:  # not through the hub's thread, which may not have told all processes when this one ends
            self._has_left = True
            self._hub.report_failure(0, reason, status)
        self._connection.close()

    def _leave(self, goodbye: Goodbye) -> None:
        self._has_left = True
        with contextlib.suppress(OSError):
            self._connection.send(goodbye)

    def _await_start(self, process_info: ProcessInfo, deadline: float) -> None:
        self._connection.set_timeout(max(deadline - time.monotonic(), 0.0) + 5.0)  # process 0 has its own deadline
        try:
            answer = self._connection.read()
        except (OSError, ValueError) as error:
            raise ValueError(
                f"the program at {process_info.coordinator} is not process 0 of this run ({type(error).__name__}). "
                "Check whether another program uses the port, or whether process 0 runs another version of Valkyrie."
            ) from None
        if answer is None:
            raise ValueError(f"process 0 at {process_info.coordinator} ended before all processes were connected.")
        if isinstance(answer, Refused):
            raise ValueError(answer.reason)

    def _listen(self, heartbeat_s: float) -> None:
        try:
            while (message := self._connection.read()) is not None:
                if isinstance(message, Lost):
                    if message.status == EXIT_LOST and not self._has_left:
                        self.on_hang(f"process {self.index}: {message.reason}")
                        if self._hub is not None:
                            time.sleep(HANG_REPORT_S)
                    status = message.status
                    return self._report_loss(
                        message.reason, status if status in (EXIT_REFUSED, OUT_OF_MEMORY) else EXIT_LOST
                    )
                if isinstance(message, ExchangeResult):
                    self._has_left = self._has_left or message.name == _FINAL_EXCHANGE
                    with self._values_received:
                        self._exchanged_values[message.name] = message.values
                        self._values_received.notify_all()
            raise OSError("its connection closed")
        except TimeoutError:
            self._report_loss(f"process 0 is lost: it sent nothing for {heartbeat_s:g} s")
        except (OSError, ValueError) as error:
            self._report_loss(f"process 0 is lost: {error}")

    def _send_heartbeats(self, heartbeat_s: float) -> None:
        while not self._has_left:
            with contextlib.suppress(OSError):
                self._connection.send(Heartbeat())
            time.sleep(heartbeat_s / 5)

    def _report_loss(self, line: str, status: int = EXIT_LOST) -> None:
        if not self._has_left:
            self.on_loss(line, status)

    def _end_process(self, line: str, status: int) -> None:
        with contextlib.suppress(OSError):
            print(f"valkyrie-train: process {self.index} stops: {line}", file=sys.stderr, flush=True)
        end_process(status, line)


def _connect(process_info: ProcessInfo, deadline: float, timeout_s: float) -> Connection:
    """Connect to process 0, which may start later than this process. Raises ValueError after `deadline`.

    `timeout_s` is the time limit that the message names.
    """
    host, port = parse_address(process_info.coordinator)
    while True:
        try:
            return Connection(socket.create_connection((host, port), timeout=max(deadline - time.monotonic(), 0.1)))
        except OSError as error:
            if time.monotonic() > deadline:
                raise ValueError(
                    f"process 0 did not respond at {process_info.coordinator} within {timeout_s:g} s "
                    f"({error.strerror or error}). Start it, or correct the address (JAX_COORDINATOR_ADDRESS or "
                    "distributed.coordinator)."
                ) from None
            time.sleep(0.05)


def _describe_disagreement(label: str, values_by_process: Sequence[Mapping[str, object]]) -> str:
    """Return a message with the keys that differ, their values, and the processes that differ from process 0."""
    first, lines = values_by_process[0], []
    for key in sorted(set().union(*values_by_process)):
        differing_processes = [i for i, values in enumerate(values_by_process) if values.get(key) != first.get(key)]
        if differing_processes:
            names = f"process{'es' * (len(differing_processes) > 1)} {', '.join(map(str, differing_processes[:8]))}"
            lines.append(
                f"{key}={first.get(key)} on process 0, but {key}={values_by_process[differing_processes[0]].get(key)} "
                f"on {names}"
            )
    shown = "; ".join(lines[:5]) + (f" (and {len(lines) - 5} more)" if len(lines) > 5 else "")
    return f"the processes differ in their {label}: {shown}. Start all processes with the same {label}."
