"""The processes of a run: they connect, compare their settings, and detect the loss of a process.

If a process is missing, late or dead, JAX's own coordination service ends the others without a useful message.
Therefore each process connects to process 0 by TCP before JAX starts, and keeps the connection. It carries small JSON
values (a digest of the configuration, the name of the run folder). If it closes, a process died; if it is silent, a
host is unreachable.
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
from valkyrie.processes.ending import DOES_NOT_FIT, LOST, REFUSED, end_process
from valkyrie.processes.hub import (
    Goodbye,
    Heartbeat,
    Hello,
    Hub,
    Lost,
    Refused,
    Value,
    Values,
    Wire,
    parse_address,
)

T = TypeVar("T")

COORDINATOR, COUNT, INDEX = "JAX_COORDINATOR_ADDRESS", "JAX_PROCESS_COUNT", "JAX_PROCESS_INDEX"
"""Environment variables with the place of a process. JAX reads the first one itself."""
NEWS_S = 1.0
"""Seconds that process 0 waits after a hang, so that the others can print their stacks. JAX ends them when it exits."""
_END = "end"
"""Name of the last exchange, after which a process may leave."""


class Place(NamedTuple):
    """The place of a process in its run.

    Args:
        coordinator: the address of process 0 as `HOST:PORT`.
        count: number of processes.
        index: number of this process, from 0.
        local_devices: numbers of the host's devices that belong to this process, or None for all.
    """

    coordinator: str
    count: int
    index: int
    local_devices: tuple[int, ...] | None = None

    @property
    def environment(self) -> dict[str, str]:
        """The variables that give another process this place."""
        return {COORDINATOR: self.coordinator, COUNT: str(self.count), INDEX: str(self.index)}


class Team:
    """The processes of a run, seen from one of them. `ALONE` is the team of a run with one process.

    All processes call the same methods in the same order.
    """

    def __init__(self, count: int = 1, index: int = 0) -> None:
        self.count, self.index = count, index
        self.on_hang: Callable[[str], None] = lambda line: None
        """Called with a message if another process hangs, before this one ends."""

    @property
    def leads(self) -> bool:
        """Whether this is process 0, which prints, writes the run folder and reports to trackers."""
        return self.index == 0

    def exchange(self, name: str, value: Any = None) -> list[Any]:
        """Send a JSON value under a name. Waits for those of all processes and returns them by process."""
        return [value]

    def wait(self, name: str) -> None:
        """Wait until all processes have called this with the same name."""
        self.exchange(name)

    def broadcast_from_leader(self, name: str, make: Callable[[], T]) -> T:
        """Return the JSON value that `make` returns on process 0. Its ValueError or OSError is raised everywhere."""
        value, error = None, None
        if self.leads:
            try:
                value = make()
            except (ValueError, OSError) as caught:
                self.exchange(name, [None, str(caught)])
                raise
        value, error = self.exchange(name, [value, error])[0]
        if error is not None:
            raise ValueError(error)
        return value

    def agree(self, what: str, values: Mapping[str, object]) -> None:
        """Check that all processes have the same flat values. The ValueError names the keys, values and processes."""
        digests = self.exchange(f"agree on {what}", digest(values))
        if len(set(digests)) > 1:
            raise ValueError(_disagreement(what, self.exchange(f"compare {what}", values)))

    def finish(self) -> None:
        """Wait until all processes are done, then leave."""

    def fail(self, status: int, reason: str) -> None:
        """Leave after an error. The other processes end too and print the reason."""


ALONE = Team()


class Connected(Team):
    """One of several processes, connected to process 0.

    Args:
        place: the place of this process.
        timeout_s: seconds to wait for all processes.
        heartbeat_s: a process that is silent for this many seconds is lost.
        on_loss: called in a thread with a message and the exit status if a process is lost. By default it ends this
            process, because the main thread may wait forever.
    """

    def __init__(
        self, place: Place, *, timeout_s: float, heartbeat_s: float, on_loss: Callable[[str, int], None] | None = None
    ) -> None:
        super().__init__(place.count, place.index)
        self.place = place
        self.on_loss = on_loss or self._end
        self._changed = threading.Condition()
        self._answers: dict[str, list[Any]] = {}
        self._left = False
        deadline = time.monotonic() + timeout_s
        self._hub = Hub(place.coordinator, place.count, deadline, heartbeat_s) if place.index == 0 else None
        self._wire = _connect(place, deadline, timeout_s)
        try:
            with contextlib.suppress(OSError):  # process 0 may have ended: its answer is read below
                self._wire.send(Hello(place.index, place.count, socket.gethostname()))
            self._await_start(place, deadline)
        except ValueError:
            self._wire.close()
            raise
        self._wire.timeout(heartbeat_s)
        for work in (self._listen, self._beat):
            threading.Thread(target=work, args=(heartbeat_s,), name=f"team-{work.__name__}", daemon=True).start()

    def exchange(self, name: str, value: Any = None) -> list[Any]:
        """Send a JSON value under a name. Waits for those of all processes and returns them by process."""
        self._wire.send(Value(name, value))
        with self._changed:
            self._changed.wait_for(lambda: name in self._answers)  # no time limit: `_listen` detects a loss
            return self._answers.pop(name)

    def finish(self) -> None:
        """Wait until all processes are done, then leave."""
        self.exchange(_END)
        self._leave(Goodbye())
        if self._hub is not None:
            self._hub.close()
        self._wire.close()

    def fail(self, status: int, reason: str) -> None:
        """Leave after an error. The other processes end too and print the reason."""
        self._leave(Goodbye(reason, status))
        if self._hub is not None:
            self._hub.fail(0, reason, status)
        self._wire.close()

    def _leave(self, goodbye: Goodbye) -> None:
        self._left = True
        with contextlib.suppress(OSError):
            self._wire.send(goodbye)

    def _await_start(self, place: Place, deadline: float) -> None:
        self._wire.timeout(max(deadline - time.monotonic(), 0.0) + 5.0)  # process 0 has its own deadline
        try:
            answer = self._wire.read()
        except (OSError, ValueError) as error:
            raise ValueError(
                f"what answers at {place.coordinator} is not process 0 of this run ({type(error).__name__}). Is the "
                "port taken by another program, or process 0 of another version?"
            ) from None
        if answer is None:
            raise ValueError(f"process 0 at {place.coordinator} ended before all processes had come.")
        if isinstance(answer, Refused):
            raise ValueError(answer.reason)

    def _listen(self, heartbeat_s: float) -> None:
        try:
            while (message := self._wire.read()) is not None:
                if isinstance(message, Lost):
                    if message.status == LOST and not self._left:
                        self.on_hang(f"process {self.index}: {message.line}")
                        if self._hub is not None:
                            time.sleep(NEWS_S)
                    status = message.status
                    return self._lost(message.line, status if status in (REFUSED, DOES_NOT_FIT) else LOST)
                if isinstance(message, Values):
                    self._left = self._left or message.name == _END
                    with self._changed:
                        self._answers[message.name] = message.values
                        self._changed.notify_all()
            raise OSError("its connection closed")
        except TimeoutError:
            self._lost(f"process 0 is lost: nothing was heard of it for {heartbeat_s:g} s")
        except (OSError, ValueError) as error:
            self._lost(f"process 0 is lost: {error}")

    def _beat(self, heartbeat_s: float) -> None:
        while not self._left:
            with contextlib.suppress(OSError):
                self._wire.send(Heartbeat())
            time.sleep(heartbeat_s / 5)

    def _lost(self, line: str, status: int = LOST) -> None:
        if not self._left:
            self.on_loss(line, status)

    def _end(self, line: str, status: int) -> None:
        with contextlib.suppress(OSError):
            print(f"valkyrie-train: process {self.index} stops: {line}", file=sys.stderr, flush=True)
        end_process(status, line)


def _connect(place: Place, deadline: float, timeout_s: float) -> Wire:
    """Return the connection to process 0, which may start later than this process."""
    host, port = parse_address(place.coordinator)
    while True:
        try:
            connection = socket.create_connection((host, port), timeout=max(deadline - time.monotonic(), 0.1))
            return Wire(connection)
        except OSError as error:
            if time.monotonic() > deadline:
                raise ValueError(
                    f"process 0 does not answer at {place.coordinator} ({error.strerror or error}; tried for "
                    f"{timeout_s:g} s). Start it too, or correct the address (JAX_COORDINATOR_ADDRESS or "
                    "distributed.coordinator)."
                ) from None
            time.sleep(0.05)


def _disagreement(what: str, by_process: Sequence[Mapping[str, object]]) -> str:
    """Return the message with the keys that differ, and the processes with another value than process 0."""
    first, lines = by_process[0], []
    for key in sorted(set().union(*by_process)):
        others = [i for i, values in enumerate(by_process) if values.get(key) != first.get(key)]
        if others:
            named = f"process{'es' * (len(others) > 1)} {', '.join(map(str, others[:8]))}"
            lines.append(f"{key}={by_process[others[0]].get(key)} on {named}, {first.get(key)} on process 0")
    shown = "; ".join(lines[:5]) + (f" (and {len(lines) - 5} more)" if len(lines) > 5 else "")
    return f"the processes differ in their {what}: {shown}. Start all of them with the same."
