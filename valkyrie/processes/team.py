"""The processes of one run: how they meet, compare what they are about to do, and notice when one of them is lost.

JAX's own coordination service ends a process without a word that a user could act on when another one is missing,
late or dead. So the processes meet before it starts, over one TCP connection from each to process 0, and keep that
connection: it carries small JSON values (a digest of the configuration, the name of the run folder), and its end tells
the others at once that a process died. A host that is cut off is noticed by its silence.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from valkyrie.checksums import digest
from valkyrie.processes.ending import LOST, REFUSED, end_process
from valkyrie.processes.hub import Hub, Wire, address_of

Value = TypeVar("Value")

COORDINATOR, COUNT, INDEX = "JAX_COORDINATOR_ADDRESS", "JAX_PROCESS_COUNT", "JAX_PROCESS_INDEX"
"""The variables of the environment that tell a process its place; JAX reads the first itself."""
NEWS_S = 1.0
"""Seconds that process 0 stays after a hang: once it is gone JAX ends the others, which are to look first."""
_END = "end"
"""The name of the last exchange: from here on a process may part."""


class Place(NamedTuple):
    """Where a process stands in its run: the address of process 0 as HOST:PORT, how many there are, which it is.

    `local_devices` are those of its host that are its own, by number; None means all.
    """

    coordinator: str
    count: int
    index: int
    local_devices: tuple[int, ...] | None = None

    @property
    def environment(self) -> dict[str, str]:
        """The variables that put another process into this place."""
        return {COORDINATOR: self.coordinator, COUNT: str(self.count), INDEX: str(self.index)}


class Team:
    """The processes of one run, as one of them sees them. `ALONE` is the team of a run with one process.

    Every method is called by all processes, in the same order.
    """

    def __init__(self, count: int = 1, index: int = 0) -> None:
        self.count, self.index = count, index
        self.on_hang: Callable[[str], None] = lambda line: None
        """What is done when another process ends because it hangs, with a line about it, before this one ends."""

    @property
    def leads(self) -> bool:
        """Whether this is process 0, which prints, writes the run folder, and tracks."""
        return self.index == 0

    def exchange(self, name: str, value: Any = None) -> list[Any]:
        """Return the JSON values of all processes under a name, by process; waits for the last of them."""
        return [value]

    def wait(self, name: str) -> None:
        """Return when all processes have come to the point of this name."""
        self.exchange(name)

    def of_first(self, name: str, make: Callable[[], Value]) -> Value:
        """Return what `make` returns on process 0, a JSON value; its ValueError or OSError is raised everywhere."""
        made: dict[str, Any] = {}
        if self.leads:
            try:
                made = {"value": make()}
            except (ValueError, OSError) as error:
                self.exchange(name, {"error": str(error)})
                raise
        told = self.exchange(name, made)[0]
        if "error" in told:
            raise ValueError(told["error"])
        return told["value"]

    def agree(self, what: str, values: Mapping[str, Any]) -> None:
        """Check that all processes have the same flat values; ValueError names the key, and who has which value."""
        theirs = self.exchange(f"agree on {what}", digest(values))
        if len(set(theirs)) == 1:
            return
        full = self.exchange(f"compare {what}", dict(values))
        raise ValueError(_disagreement(what, full))

    def finish(self) -> None:
        """Wait until all processes are done, and part."""

    def fail(self, status: int, reason: str) -> None:
        """Part from the others, who end too, with the reason."""


ALONE = Team()


class Connected(Team):
    """One of several processes, connected to process 0.

    `heartbeat_s`: a process that is silent for so long counts as lost. `on_loss` is called with a line about it and the
    status to end with, in a thread; by default the process ends there, for its main thread may wait for ever.
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
            with contextlib.suppress(OSError):  # process 0 may have ended: what it said is read below
                self._wire.send({"hello": place.index, "count": place.count, "host": socket.gethostname()})
            self._greeted(place, deadline)
        except ValueError:
            self._wire.close()
            raise
        self._wire.timeout(heartbeat_s)
        for work in (self._listen, self._beat):
            threading.Thread(target=work, args=(heartbeat_s,), name=f"team-{work.__name__}", daemon=True).start()

    def exchange(self, name: str, value: Any = None) -> list[Any]:
        """Return the JSON values of all processes under a name, by process; waits for the last of them."""
        self._wire.send({"say": name, "value": value})
        with self._changed:
            self._changed.wait_for(lambda: name in self._answers)  # however long they work: death is noticed
            return self._answers.pop(name)

    def finish(self) -> None:
        """Wait until all processes are done, and part."""
        self.exchange(_END)
        self._part({"bye": None})
        if self._hub is not None:
            self._hub.close()
        self._wire.close()

    def fail(self, status: int, reason: str) -> None:
        """Part from the others, who end too, with the reason."""
        self._part({"bye": reason, "status": status})
        if self._hub is not None:
            self._hub.fail(0, reason, status)
        self._wire.close()

    def _part(self, farewell: dict[str, Any]) -> None:
        self._left = True
        with contextlib.suppress(OSError):
            self._wire.send(farewell)

    def _greeted(self, place: Place, deadline: float) -> None:
        self._wire.timeout(max(deadline - time.monotonic(), 0.0) + 5.0)  # process 0 counts on its own clock
        try:
            answer = self._wire.read()
        except (OSError, ValueError) as error:
            raise ValueError(
                f"what answers at {place.coordinator} is not process 0 of this run ({type(error).__name__}). Is the "
                "port taken by another program, or process 0 of another version?"
            ) from None
        if answer is None:
            raise ValueError(f"process 0 at {place.coordinator} ended before all processes had come.")
        if "failed" in answer:
            raise ValueError(answer["failed"])

    def _listen(self, heartbeat_s: float) -> None:
        try:
            while True:
                message = self._wire.read()
                if message is None:
                    raise OSError("its connection closed")
                if "lost" in message:
                    if message["status"] == LOST and not self._left:
                        self._see_where_it_hangs(message["lost"])
                    return self._lost(message["lost"], REFUSED if message["status"] == REFUSED else LOST)
                if "all" in message:
                    self._left = self._left or message["all"] == _END
                    with self._changed:
                        self._answers[message["all"]] = message["values"]
                        self._changed.notify_all()
        except TimeoutError:
            self._lost(f"process 0 is lost: nothing was heard of it for {heartbeat_s:g} s")
        except (OSError, ValueError) as error:
            self._lost(f"process 0 is lost: {error}")

    def _beat(self, heartbeat_s: float) -> None:
        while not self._left:
            with contextlib.suppress(OSError):
                self._wire.send({})
            time.sleep(heartbeat_s / 5)

    def _lost(self, line: str, status: int = LOST) -> None:
        if not self._left:
            self.on_loss(line, status)

    def _see_where_it_hangs(self, line: str) -> None:
        self.on_hang(f"process {self.index}: {line}")
        if self._hub is not None:
            time.sleep(NEWS_S)

    def _end(self, line: str, status: int) -> None:
        with contextlib.suppress(OSError):
            print(f"valkyrie-train: process {self.index} stops: {line}", file=sys.stderr, flush=True)
        end_process(status, line)


def _connect(place: Place, deadline: float, timeout_s: float) -> Wire:
    """Return the connection to process 0, which may start later than this process."""
    host, port = address_of(place.coordinator)
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


def _disagreement(what: str, full: list[dict[str, Any]]) -> str:
    """Return which keys differ, and which processes have another value than process 0."""
    first, lines = full[0], []
    for key in sorted(set().union(*full)):
        others = [i for i, values in enumerate(full) if values.get(key) != first.get(key)]
        if others:
            named = f"process{'es' * (len(others) > 1)} {', '.join(map(str, others[:8]))}"
            lines.append(f"{key}={full[others[0]].get(key)} on {named}, {first.get(key)} on process 0")
    shown = "; ".join(lines[:5]) + (f" (and {len(lines) - 5} more)" if len(lines) > 5 else "")
    return f"the processes differ in their {what}: {shown}. Start all of them with the same."
