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

_MAX_LINE_BYTES = 64 * 2**20
"""Maximum size of a message in bytes, well above that of any configuration. Bounds the memory for a bad message."""


@dataclass(frozen=True)
class Hello:
    """First message of a process: its index, the number of processes that it expects, and its host."""

    index: int
    count: int
    host: str


@dataclass(frozen=True)
class Started:
    """Sent to all processes when the last one has connected."""


@dataclass(frozen=True)
class Refused:
    """Sent instead of `Started` if the processes cannot start together. `reason` is the message for the user."""

    reason: str


@dataclass(frozen=True)
class ExchangeValue:
    """The JSON-serializable value that one process sends in the exchange `name`."""

    name: str
    value: Any


@dataclass(frozen=True)
class ExchangeResult:
    """The values of all processes in the exchange `name`, in the order of the processes."""

    name: str
    values: list[Any]


@dataclass(frozen=True)
class Goodbye:
    """Last message of a process. `reason` and `status` are None unless the process failed."""

    reason: str | None = None
    status: int | None = None


@dataclass(frozen=True)
class Lost:
    """Sent to all processes when one has failed or is lost.

    `reason` is the message for the user. `status` is the exit status of the failed process, or None if unknown.
    """

    reason: str
    status: int | None


@dataclass(frozen=True)
class Heartbeat:
    """Sent every `heartbeat_s / 5` seconds in both directions, to show that the sender is alive."""


Message = Hello | Started | Refused | ExchangeValue | ExchangeResult | Goodbye | Lost | Heartbeat
_MESSAGES: dict[str, type[Message]] = {message.__name__: message for message in get_args(Message)}


class Connection:
    """A TCP connection that carries messages as JSON lines. Several threads may send."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket, self._file, self._send_lock = sock, sock.makefile("rb"), threading.Lock()

    def send(self, message: Message) -> None:
        """Send a message. Raises OSError if the other side is gone."""
        line = json.dumps({"type": type(message).__name__, **encode(message)})
        with self._send_lock:
            self._socket.sendall(line.encode() + b"\n")

    def read(self) -> Message | None:
        """Return the next message, or None if the connection is closed.

        Raises ValueError for invalid messages, and TimeoutError if none arrives in time.
        """
        line = self._file.readline(_MAX_LINE_BYTES)
        if not line:
            return None
        fields = json.loads(line)
        message_type = _MESSAGES.get(str(fields.pop("type", ""))) if isinstance(fields, dict) else None
        if message_type is None:
            raise ValueError("the message is not from Valkyrie")
        return decode(message_type, fields, "message")

    def set_timeout(self, seconds: float | None) -> None:
        """Set the timeout of `read` and `send`, in seconds, or None to wait forever."""
        self._socket.settimeout(seconds)

    def close(self) -> None:
        """Close the connection. A thread that waits in `read` returns."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._file.close()
        self._socket.close()


def parse_address(text: str) -> tuple[str, int]:
    """Return the host and port of `HOST:PORT`. Raises ValueError for anything else."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(
            f"{text} is not an address of process 0. Set distributed.coordinator or JAX_COORDINATOR_ADDRESS to "
            "HOST:PORT, such as 10.0.0.2:8476."
        )
    return host.strip("[]"), int(port)


def free_port() -> int:
    """Return a TCP port that no program on this machine uses at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Hub:
    """Accepts the connections of `count` processes until `deadline` (`time.monotonic`), then relays their messages.

    In an exchange, it collects one value from each process, then sends all values to every process. A process counts as
    lost if its connection closes without a `Goodbye`, or if it sends nothing for `heartbeat_s` seconds.

    Raises ValueError if the port of `address` (`HOST:PORT`) cannot be opened on this machine.
    """

    def __init__(self, address: str, count: int, deadline: float, heartbeat_s: float) -> None:
        self._count, self._deadline, self._heartbeat_s = count, deadline, heartbeat_s
        self._connections: dict[int, Connection] = {}
        self._hosts: dict[int, str] = {}
        self._exchanges: dict[str, dict[int, Any]] = {}
        self._lock = threading.Lock()
        self._readers: list[threading.Thread] = []
        self._has_ended = False
        self._address = address
        _, port = parse_address(address)
        self._listener = socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if socket.has_dualstack_ipv6():
            self._listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        try:
            self._listener.bind(("", port))
            self._listener.listen(count)
        except OSError as error:
            self._listener.close()
            raise ValueError(
                f"process 0 cannot listen on port {port} ({error.strerror}). Stop the program that uses the port, or "
                "choose another address for all processes (JAX_COORDINATOR_ADDRESS or distributed.coordinator)."
            ) from None
        threading.Thread(target=self._accept_all, name="team-hub", daemon=True).start()

    def report_failure(self, index: int, reason: str, status: int | None = None) -> None:
        """Announce to all processes that process `index` ended with an error. Does nothing after an earlier failure."""
        self._report(index, f"ended: {reason}", status)

    def _report(self, index: int, event: str, status: int | None = None) -> None:
        """Send `Lost` to all processes. Only the first failure is sent, because later ones are its consequences."""
        with self._lock:
            if self._has_ended:
                return
            self._has_ended = True
        self._send_all(Lost(f"process {index} (on {self._hosts[index]}) {event}", status))

    def close(self) -> None:
        """Wait until every process has left or is lost, at most `heartbeat_s` seconds for each."""
        for reader in self._readers:
            reader.join(self._heartbeat_s)
        self._has_ended = True

    def _accept_all(self) -> None:
        """Accept all processes, then start relaying. After a problem, refuse every process, including later ones."""
        connections: list[Connection] = []
        reason, hello_count = None, 0
        while hello_count < self._count and len(self._connections) < self._count:
            self._listener.settimeout(max(self._deadline - time.monotonic(), 0.001))
            try:
                sock, _ = self._listener.accept()
            except TimeoutError:
                reason = reason or self._missing_message()
                break
            connection = Connection(sock)
            connection.set_timeout(5.0)
            connections.append(connection)
            with contextlib.suppress(OSError, ValueError):  # from a port scanner, or a process that was killed
                if isinstance(hello := connection.read(), Hello):
                    reason, hello_count = reason or self._admit(connection, hello), hello_count + 1
            if reason:
                self._refuse(connections, reason)
        self._listener.close()
        if reason:
            self._refuse(connections, reason)
        else:
            self._start_relays()

    def _refuse(self, connections: list[Connection], reason: str) -> None:
        while connections:
            connection = connections.pop()
            with contextlib.suppress(OSError):
                connection.send(Refused(reason))
            connection.close()

    def _start_relays(self) -> None:
        self._send_all(Started())
        for index, connection in self._connections.items():
            connection.set_timeout(self._heartbeat_s)
            name = f"team-hear-{index}"
            self._readers.append(threading.Thread(target=self._relay, args=(index, connection), name=name, daemon=True))
        for reader in self._readers:
            reader.start()
        threading.Thread(target=self._send_heartbeats, name="team-hub-beat", daemon=True).start()

    def _admit(self, connection: Connection, hello: Hello) -> str | None:
        """Add a process to the run, or return the reason why it cannot be added."""
        index, host = hello.index, hello.host
        if hello.count != self._count:
            return f"process {index} (on {host}) expects {hello.count} processes, but process 0 expects {self._count}."
        if not 0 <= index < self._count:
            return f"a process (on {host}) has index {index}, but indices must be 0 to {self._count - 1}."
        if index in self._connections:
            return f"two processes have index {index}: one on {self._hosts[index]}, one on {host}."
        self._connections[index], self._hosts[index] = connection, host
        return None

    def _missing_message(self) -> str:
        missing = [index for index in range(self._count) if index not in self._connections]
        indices = ", ".join(map(str, missing[:16])) + (", ..." if len(missing) > 16 else "")
        return (
            f"{len(missing)} of {self._count} processes did not connect to {self._address} in time: {indices}. Check "
            "their output, or increase distributed.timeout_s if they start slowly."
        )

    def _relay(self, index: int, connection: Connection) -> None:
        """Read the messages of a process until it leaves or is lost."""
        reason = "its connection closed, because it crashed or was killed"
        try:
            while (message := connection.read()) is not None:
                if isinstance(message, Goodbye):
                    if message.reason is not None:
                        self.report_failure(index, message.reason, message.status)
                    return
                if isinstance(message, ExchangeValue):
                    self._collect(index, message)
        except TimeoutError:
            reason = f"it sent nothing for {self._heartbeat_s:g} s"
        except (OSError, ValueError):
            pass
        finally:
            connection.close()
        self._report(index, f"is lost: {reason}")

    def _collect(self, index: int, message: ExchangeValue) -> None:
        with self._lock:
            values = self._exchanges.setdefault(message.name, {})
            values[index] = message.value
            if len(values) < self._count:
                return
            del self._exchanges[message.name]
        self._send_all(ExchangeResult(message.name, [values[i] for i in range(self._count)]))

    def _send_all(self, message: Message) -> None:
        # Process 0 comes last: after `Lost`, it ends, and this hub with it.
        for index in sorted(self._connections, reverse=True):
            with contextlib.suppress(OSError):
                self._connections[index].send(message)

    def _send_heartbeats(self) -> None:
        while not self._has_ended:
            self._send_all(Heartbeat())
            time.sleep(self._heartbeat_s / 5)
