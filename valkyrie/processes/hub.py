"""What process 0 of a run runs beside its own work: it hears from every process and passes on what one of them says."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from typing import Any

_LARGEST = 64 * 2**20
"""Bytes of the longest line that is read: more than any configuration, less than what would fill a memory."""


class Wire:
    """A connection that carries JSON values, one a line; several threads may send."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection, self._file, self._sending = connection, connection.makefile("rb"), threading.Lock()

    def send(self, message: dict[str, Any]) -> None:
        """Send a value; OSError where the other side is gone."""
        with self._sending:
            self._connection.sendall(json.dumps(message).encode() + b"\n")

    def read(self) -> dict[str, Any] | None:
        """Return the next value; None at the end. ValueError for what is none, TimeoutError after a silence."""
        line = self._file.readline(_LARGEST)
        if not line:
            return None
        message = json.loads(line)
        if not isinstance(message, dict):
            raise ValueError("no message of ours")
        return message

    def timeout(self, seconds: float | None) -> None:
        """Let `read` wait for at most so many seconds."""
        self._connection.settimeout(seconds)

    def close(self) -> None:
        """End the connection, also for a thread that reads from it."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._file.close()
        self._connection.close()


def address_of(text: str) -> tuple[str, int]:
    """Return host and port of HOST:PORT; ValueError where it is none."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"the address of process 0 is {text}: write HOST:PORT, such as 10.0.0.2:8476.")
    return host.strip("[]"), int(port)


def free_port() -> int:
    """Return a port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Hub:
    """Gathers `count` processes by a deadline, then passes on what they say.

    Each value that is said under a name is kept until all processes have said theirs; then all of them are sent to
    all. A process whose connection ends without a farewell, or that is silent for `heartbeat_s`, is reported as lost.
    """

    def __init__(self, address: str, count: int, deadline: float, heartbeat_s: float) -> None:
        self._count, self._deadline, self._heartbeat_s = count, deadline, heartbeat_s
        self._wires: dict[int, Wire] = {}
        self._hosts: dict[int, str] = {}
        self._said: dict[str, dict[int, Any]] = {}
        self._lock = threading.Lock()
        self._hearing: list[threading.Thread] = []
        self._over = False
        self._address = address
        _, port = address_of(address)
        self._listening = socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET)
        self._listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if socket.has_dualstack_ipv6():
            self._listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        try:
            self._listening.bind(("", port))
            self._listening.listen(count)
        except OSError as error:
            self._listening.close()
            raise ValueError(
                f"process 0 cannot listen on port {port} ({error.strerror}). End what has it, or choose another "
                "address for all processes (JAX_COORDINATOR_ADDRESS or distributed.coordinator)."
            ) from None
        threading.Thread(target=self._gather, name="team-hub", daemon=True).start()

    def fail(self, index: int, why: str, status: int | None = None) -> None:
        """Tell all processes that one of them ended, and why; the first such news is the cause of the others."""
        with self._lock:
            if self._over:
                return
            self._over = True
        self._tell({"lost": f"process {index} (on {self._hosts[index]}) ended: {why}", "status": status})

    def close(self) -> None:
        """Wait until all processes have parted, or one is lost, for at most the time of a heartbeat."""
        for hearing in self._hearing:
            hearing.join(self._heartbeat_s)
        self._over = True

    def _gather(self) -> None:
        """Wait for all processes and answer them once all have come; with a problem at once, also who comes later."""
        waiting: list[Wire] = []
        problem, came = None, 0
        while came < self._count and len(self._wires) < self._count:
            self._listening.settimeout(max(self._deadline - time.monotonic(), 0.001))
            try:
                connection, _ = self._listening.accept()
            except TimeoutError:
                problem = problem or self._missing()
                break
            wire = Wire(connection)
            wire.timeout(5.0)
            waiting.append(wire)
            index, found = self._welcome(wire)
            problem, came = problem or found, came + (index is not None)
            if problem:
                self._refuse(waiting, problem)
        self._listening.close()
        if problem:
            self._refuse(waiting, problem)
        else:
            self._begin()

    def _refuse(self, waiting: list[Wire], problem: str) -> None:
        """Tell a problem to those who wait, and let them go."""
        while waiting:
            wire = waiting.pop()
            with contextlib.suppress(OSError):
                wire.send({"failed": problem})
            wire.close()

    def _begin(self) -> None:
        """Answer all processes, and hear them from here on."""
        self._tell({"all": "here", "values": []})
        for index, wire in self._wires.items():
            wire.timeout(self._heartbeat_s)
            name = f"team-hear-{index}"
            self._hearing.append(threading.Thread(target=self._hear, args=(index, wire), name=name, daemon=True))
        for hearing in self._hearing:
            hearing.start()
        threading.Thread(target=self._beat, name="team-hub-beat", daemon=True).start()

    def _welcome(self, wire: Wire) -> tuple[int | None, str | None]:
        """Take a process in: its index, and why it cannot be one of this run. No index: it is none of ours."""
        try:
            hello = wire.read() or {}
            index, count, host = int(hello["hello"]), int(hello["count"]), str(hello["host"])
        except (OSError, ValueError, KeyError, TypeError):
            return None, None  # a port scanner, or a process that was ended
        problem = None
        if count != self._count:
            problem = f"process {index} (on {host}) counts {count} processes, process 0 counts {self._count}."
        elif not 0 <= index < self._count:
            problem = (
                f"a process (on {host}) has index {index}; the {self._count} processes are 0 to {self._count - 1}."
            )
        elif index in self._wires:
            problem = f"two processes have index {index}: one on {self._hosts[index]}, one on {host}."
        else:
            self._wires[index], self._hosts[index] = wire, host
        return index, problem

    def _missing(self) -> str:
        missing = [index for index in range(self._count) if index not in self._wires]
        named = ", ".join(map(str, missing[:16])) + (", ..." if len(missing) > 16 else "")
        return (
            f"{len(missing)} of {self._count} processes did not come to {self._address} in time: {named}. Look at what "
            "they say; distributed.timeout_s is how long to wait for the last."
        )

    def _hear(self, index: int, wire: Wire) -> None:
        why = "its connection closed: it ended or was killed"
        try:
            while (message := wire.read()) is not None:
                if "bye" in message:
                    return None if message["bye"] is None else self.fail(index, message["bye"], message["status"])
                if "say" in message:
                    self._collect(index, message["say"], message["value"])
        except TimeoutError:
            why = f"nothing was heard of it for {self._heartbeat_s:g} s"
        except (OSError, ValueError):
            pass
        finally:
            wire.close()
        self.fail(index, f"it is lost: {why}")

    def _collect(self, index: int, name: str, value: Any) -> None:
        with self._lock:
            said = self._said.setdefault(name, {})
            said[index] = value
            if len(said) < self._count:
                return
            del self._said[name]
        self._tell({"all": name, "values": [said[i] for i in range(self._count)]})

    def _tell(self, message: dict[str, Any]) -> None:
        for wire in self._wires.values():
            with contextlib.suppress(OSError):
                wire.send(message)

    def _beat(self) -> None:
        while not self._over:
            self._tell({})
            time.sleep(self._heartbeat_s / 5)
