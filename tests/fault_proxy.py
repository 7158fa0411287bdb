"""An HTTP proxy before a real S3 server that breaks what passes through it, by seed.

It reads each request whole, so a rule sees it before the server does: it may pass it on, answer by
itself, lose the answer, or wait. Beside the rule, connections are reset with a probability per
64 KiB in either direction.
"""

import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

_CHUNK = 64 << 10


@dataclass(frozen=True)
class Request:
    method: str
    target: str
    """Path and query."""
    head: bytes
    body: bytes

    @property
    def key(self) -> str:
        """In the bucket."""
        return self.target.partition("?")[0].lstrip("/").partition("/")[2]

    @property
    def query(self) -> str:
        return self.target.partition("?")[2]

    def header(self, name: str) -> str:
        for line in self.head.decode("latin-1").split("\r\n")[1:]:
            found, _, value = line.partition(":")
            if found.lower() == name:
                return value.strip()
        return ""

    @property
    def is_part(self) -> bool:
        return self.method == "PUT" and "uploadId=" in self.query

    @property
    def is_whole_put(self) -> bool:
        return self.method == "PUT" and not self.query

    @property
    def is_complete(self) -> bool:
        return self.method == "POST" and "uploadId=" in self.query


class Reset(Exception):
    """Raised by a rule: break the connection off."""


Forward = Callable[[Request], bytes]
Rule = Callable[[Request, Forward], bytes]
"""Makes the raw answer to a request; `Forward` asks the server for it."""


def pass_on(request: Request, forward: Forward) -> bytes:
    return forward(request)


def lose_answer(request: Request, forward: Forward) -> bytes:
    forward(request)
    raise Reset


def slow_down(request: Request, forward: Forward) -> bytes:
    return answer(503, "Slow Down", b"<Error><Code>SlowDown</Code><Message>later</Message></Error>")


def cut_answer(request: Request, forward: Forward) -> bytes:
    """The second half of the body is missing, whatever the head promises."""
    head, _, body = forward(request).partition(b"\r\n\r\n")
    return head + b"\r\n\r\n" + body[: len(body) // 2]


def stall(seconds: float) -> Rule:
    def rule(request: Request, forward: Forward) -> bytes:
        time.sleep(seconds)
        return forward(request)

    return rule


def answer(status: int, reason: str, body: bytes) -> bytes:
    return (
        f"HTTP/1.1 {status} {reason}\r\nContent-Type: application/xml\r\n"
        f'Content-Length: {len(body)}\r\nETag: "x"\r\nConnection: close\r\n\r\n'
    ).encode() + body


def first(times: int, matches: Callable[[Request], bool], rule: Rule) -> Rule:
    """`rule` for the first so many requests that match, all others pass."""
    left = [times]
    lock = threading.Lock()

    def chosen(request: Request, forward: Forward) -> bytes:
        with lock:
            hit = left[0] > 0 and matches(request)
            left[0] -= hit
        return (rule if hit else pass_on)(request, forward)

    return chosen


@dataclass
class FaultProxy:
    server_port: int
    reset: float = 0.0
    """Probability per 64 KiB that passes."""
    seed: int = 0
    rule: Rule = pass_on
    resets: int = 0
    seen: list[Request] = field(default_factory=list)
    """Requests without their bodies, in the order of their arrival."""

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port = self._listener.getsockname()[1]
        self.endpoint = f"http://127.0.0.1:{self.port}"

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        client.settimeout(60)
        try:
            request = self._read_request(client)
            if request is None:
                return
            with self._lock:
                self.seen.append(Request(request.method, request.target, request.head, b""))
            data = self.rule(request, self._forward)
            for start in range(0, len(data), _CHUNK):
                self._roll()
                client.sendall(data[start : start + _CHUNK])
        except Reset:
            # Closing with this set sends RST instead of FIN.
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        except OSError:
            pass
        finally:
            client.close()

    def _read_request(self, client: socket.socket) -> Request | None:
        data = b""
        while b"\r\n\r\n" not in data:
            block = client.recv(_CHUNK)
            if not block:
                return None
            data += block
        head, _, rest = data.partition(b"\r\n\r\n")
        method, target, _ = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ")
        request = Request(method, target, head, b"")
        length = int(request.header("content-length") or 0)
        body = bytearray(rest)
        mark = 0
        while len(body) < length:
            block = client.recv(_CHUNK)
            if not block:
                return None
            body += block
            while len(body) - mark >= _CHUNK:
                mark += _CHUNK
                self._roll()
        return Request(method, target, head, bytes(body))

    def _forward(self, request: Request) -> bytes:
        lines = [
            line
            for line in request.head.split(b"\r\n")
            if not line.lower().startswith(b"connection:")
        ]
        with socket.create_connection(("127.0.0.1", self.server_port), timeout=60) as server:
            server.sendall(b"\r\n".join([*lines, b"Connection: close"]) + b"\r\n\r\n")
            server.sendall(request.body)
            received = bytearray()
            while block := server.recv(_CHUNK):
                received += block
        return bytes(received)

    def _roll(self) -> None:
        if not self.reset:
            return
        with self._lock:
            if self._random.random() >= self.reset:
                return
            self.resets += 1
        raise Reset


@contextmanager
def fault_proxy(server_port: int, **settings: object) -> Iterator[FaultProxy]:
    """A proxy that ends with the block."""
    proxy = FaultProxy(server_port, **settings)  # type: ignore[arg-type]
    thread = threading.Thread(target=proxy._accept, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        # Closing alone would leave `accept` waiting.
        proxy._listener.shutdown(socket.SHUT_RDWR)
        proxy._listener.close()
        thread.join()
