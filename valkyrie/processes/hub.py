"""TCP hub on process 0 that relays messages between the processes of a run."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from dataclasses import dataclass
from typing import Any, get_args

from valkyrie.records import decode, encode

_LONGEST = 64 * 2**20
"""Maximum bytes of a line: more than any configuration, less than would fill the memory."""


@dataclass(frozen=True)
class Hello:
    """The first message of a process: its index, the number of processes it expects, and its host."""

    index: int
    count: int
    host: str


@dataclass(frozen=True)
class Started:
    """All processes have met."""


@dataclass(frozen=True)
class Refused:
    """The processes cannot start together."""

    reason: str


@dataclass(frozen=True)
class Value:
    """The JSON value of one process in an exchange."""

    name: str
    value: Any


@dataclass(frozen=True)
class Values:
    """The values of all processes in an exchange, by process."""

    name: str
    values: list[Any]


@dataclass(frozen=True)
class Goodbye:
    """The last message of a process. It has a reason and an exit status if the process failed."""

    reason: str | None = None
    status: int | None = None


@dataclass(frozen=True)
class Lost:
    """A process failed or was lost. The status is None if its exit status is unknown."""

    line: str
    status: int | None


@dataclass(frozen=True)
class Heartbeat:
    """Shows that the sender is alive."""


Message = Hello | Started | Refused | Value | Values | Goodbye | Lost | Heartbeat
_MESSAGES: dict[str, type[Message]] = {message.__name__: message for message in get_args(Message)}


class Wire:
    """A connection that carries messages, one JSON line each. Several threads may send."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection, self._file, self._sending = connection, connection.makefile("rb"), threading.Lock()

    def send(self, message: Message) -> None:
        """Send a message. Raises OSError if the other side is gone."""
        line = json.dumps({"type": type(message).__name__, **encode(message)})
        with self._sending:
            self._connection.sendall(line.encode() + b"\n")

    def read(self) -> Message | None:
        """Return the next message, or None at the end of the connection.

        Raises ValueError for anything else, and TimeoutError if nothing arrives in time.
        """
        line = self._file.readline(_LONGEST)
        if not line:
            return None
        plain = json.loads(line)
        message = _MESSAGES.get(str(plain.pop("type", ""))) if isinstance(plain, dict) else None
        if message is None:
            raise ValueError("not a message of Valkyrie")
        return decode(message, plain, "message")

    def timeout(self, seconds: float | None) -> None:
        """Set how long `read` waits."""
        self._connection.settimeout(seconds)

    def close(self) -> None:
        """End the connection, also for a thread that reads from it."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._file.close()
        self._connection.close()


def parse_address(text: str) -> tuple[str, int]:
    """Return the host and port of `HOST:PORT`. Raises ValueError for anything else."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"the address of process 0 is {text}: write HOST:PORT, such as 10.0.0.2:8476.")
    return host.strip("[]"), int(port)


def free_port() -> int:
    """Return an unused port of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Hub:
    """Waits for `count` processes until a deadline, then relays their messages.

    Collects the values of an exchange until all processes have sent theirs, then sends all of them to all. A process is
    lost if its connection ends without a `Goodbye`, or if it is silent for `heartbeat_s`.
    """

    def __init__(self, address: str, count: int, deadline: float, heartbeat_s: float) -> None:
        self._count, self._deadline, self._heartbeat_s = count, deadline, heartbeat_s
        self._wires: dict[int, Wire] = {}
        self._hosts: dict[int, str] = {}
        self._exchanges: dict[str, dict[int, Any]] = {}
        self._lock = threading.Lock()
        self._readers: list[threading.Thread] = []
        self._closed = False
        self._address = address
        _, port = parse_address(address)
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

    def fail(self, index: int, reason: str, status: int | None = None) -> None:
        """Tell all processes that one has failed. Only the first failure is sent; later ones are its consequences."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._send_all(Lost(f"process {index} (on {self._hosts[index]}) ended: {reason}", status))

    def close(self) -> None:
        """Wait until all processes have left or one is lost, for at most `heartbeat_s` each."""
        for reader in self._readers:
            reader.join(self._heartbeat_s)
        self._closed = True

    def _gather(self) -> None:
        """Wait for all processes, then start relaying. After a problem, refuse those connected and those to come."""
        waiting: list[Wire] = []
        problem, arrived = None, 0
        while arrived < self._count and len(self._wires) < self._count:
            self._listening.settimeout(max(self._deadline - time.monotonic(), 0.001))
            try:
                connection, _ = self._listening.accept()
            except TimeoutError:
                problem = problem or self._missing()
                break
            wire = Wire(connection)
            wire.timeout(5.0)
            waiting.append(wire)
            with contextlib.suppress(OSError, ValueError):  # a port scanner, or a process that was killed
                if isinstance(hello := wire.read(), Hello):
                    problem, arrived = problem or self._welcome(wire, hello), arrived + 1
            if problem:
                self._refuse(waiting, problem)
        self._listening.close()
        if problem:
            self._refuse(waiting, problem)
        else:
            self._begin()

    def _refuse(self, waiting: list[Wire], problem: str) -> None:
        while waiting:
            wire = waiting.pop()
            with contextlib.suppress(OSError):
                wire.send(Refused(problem))
            wire.close()

    def _begin(self) -> None:
        self._send_all(Started())
        for index, wire in self._wires.items():
            wire.timeout(self._heartbeat_s)
            name = f"team-hear-{index}"
            self._readers.append(threading.Thread(target=self._relay, args=(index, wire), name=name, daemon=True))
        for reader in self._readers:
            reader.start()
        threading.Thread(target=self._beat, name="team-hub-beat", daemon=True).start()

    def _welcome(self, wire: Wire, hello: Hello) -> str | None:
        """Add a process. Returns the reason why it cannot be part of this run, or None."""
        index, host = hello.index, hello.host
        if hello.count != self._count:
            return f"process {index} (on {host}) counts {hello.count} processes, process 0 counts {self._count}."
        if not 0 <= index < self._count:
            return f"a process (on {host}) has index {index}; the {self._count} processes are 0 to {self._count - 1}."
        if index in self._wires:
            return f"two processes have index {index}: one on {self._hosts[index]}, one on {host}."
        self._wires[index], self._hosts[index] = wire, host
        return None

    def _missing(self) -> str:
        missing = [index for index in range(self._count) if index not in self._wires]
        named = ", ".join(map(str, missing[:16])) + (", ..." if len(missing) > 16 else "")
        return (
            f"{len(missing)} of {self._count} processes did not come to {self._address} in time: {named}. Check their "
            "output, or wait longer for slow ones with distributed.timeout_s."
        )

    def _relay(self, index: int, wire: Wire) -> None:
        """Read the messages of a process until it leaves or is lost."""
        reason = "its connection closed: it ended or was killed"
        try:
            while (message := wire.read()) is not None:
                if isinstance(message, Goodbye):
                    if message.reason is not None:
                        self.fail(index, message.reason, message.status)
                    return
                if isinstance(message, Value):
                    self._collect(index, message)
        except TimeoutError:
            reason = f"nothing was heard of it for {self._heartbeat_s:g} s"
        except (OSError, ValueError):
            pass
        finally:
            wire.close()
        self.fail(index, f"it is lost: {reason}")

    def _collect(self, index: int, message: Value) -> None:
        with self._lock:
            values = self._exchanges.setdefault(message.name, {})
            values[index] = message.value
            if len(values) < self._count:
                return
            del self._exchanges[message.name]
        self._send_all(Values(message.name, [values[i] for i in range(self._count)]))

    def _send_all(self, message: Message) -> None:
        for wire in self._wires.values():
            with contextlib.suppress(OSError):
                wire.send(message)

    def _beat(self) -> None:
        while not self._closed:
            self._send_all(Heartbeat())
            time.sleep(self._heartbeat_s / 5)
