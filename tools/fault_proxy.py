"""A proxy in front of an S3 server that is slow, breaks off, lies or refuses on command.

>>> with S3Server() as s3, FaultProxy(s3.endpoint_url) as proxy:
...     os.environ["AWS_ENDPOINT_URL"] = proxy.endpoint_url
...     proxy.plan = latency(seed=1)                       # every request, with a tail
...     proxy.script([Fault(status=503), Fault(reset_after_bytes=100)], path="/b/k.png")
...     proxy.requests                                     # what came, in order

The signature of a request covers the host that the client used, and the server checks it against
the `Host` header, which passes through unchanged: signed requests work.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self, cast
from urllib.parse import urlsplit

__all__ = ["Fault", "FaultProxy", "Request", "latency"]

_START_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Request:
    """What the proxy saw of one request."""

    method: str
    target: str
    """Path and query, as sent."""
    headers: dict[str, str]
    """Names in lower case."""
    connection: int
    """Number of the client's connection, counted from 0."""
    on_connection: int
    """How many requests came on this connection before."""
    at_s: float = field(default_factory=time.monotonic)

    @property
    def path(self) -> str:
        """The target without its query."""
        return self.target.partition("?")[0]


@dataclass(frozen=True)
class Fault:
    """What is done to one request. The default does nothing; parts may be combined.

    Args:
        delay_s: wait before the request goes on.
        status: answer so, without asking the server.
        code: the S3 error code of that answer.
        headers: further headers of that answer.
        empty: answer `200` with no body.
        hang_up: close the connection without an answer, as a stale keep-alive does.
        reset_after_bytes: pass so many bytes of the body, then reset the connection.
        truncate_after_bytes: pass so many bytes of the body, then close in good order.
        stall_after_bytes: pass so many bytes of the body, then nothing more, ever.
        bytes_per_s: pass the body not faster than this.
        corrupt_byte_at: flip one bit of the body's byte at this position.
    """

    delay_s: float = 0.0
    status: int | None = None
    code: str = "SlowDown"
    headers: tuple[tuple[str, str], ...] = ()
    empty: bool = False
    hang_up: bool = False
    reset_after_bytes: int | None = None
    truncate_after_bytes: int | None = None
    stall_after_bytes: int | None = None
    bytes_per_s: float | None = None
    corrupt_byte_at: int | None = None

    @property
    def cuts_body(self) -> bool:
        """Whether the body of the server's answer is watched."""
        limits = (self.reset_after_bytes, self.truncate_after_bytes, self.stall_after_bytes)
        others = (self.bytes_per_s, self.corrupt_byte_at)
        return any(each is not None for each in (*limits, *others))

    @property
    def answer(self) -> bytes | None:
        """The whole answer that the proxy gives itself, or None."""
        if self.empty:
            return b'HTTP/1.1 200 OK\r\nContent-Length: 0\r\nETag: ""\r\n\r\n'
        if self.status is None:
            return None
        body = (
            '<?xml version="1.0" encoding="UTF-8"?>'
            f"<Error><Code>{self.code}</Code><Message>made by the fault proxy</Message>"
            "<RequestId>FAULTPROXY</RequestId></Error>"
        ).encode()
        head = [
            f"HTTP/1.1 {self.status} Fault",
            f"Content-Length: {len(body)}",
            "Content-Type: application/xml",
            "x-amz-request-id: FAULTPROXY",
            *(f"{name}: {value}" for name, value in self.headers),
        ]
        return "\r\n".join(head).encode() + b"\r\n\r\n" + body


_NONE = Fault()
Plan = Callable[[Request], "Fault | None"]


def latency(
    *,
    usual_s: float = 0.040,
    slow_s: float = 0.100,
    straggler_s: float = 0.480,
    slow_share: float = 0.09,
    straggler_share: float = 0.01,
    seed: int | None = None,
) -> Plan:
    """Return a plan with the latency of an S3 region: mostly usual, some slow, few very slow."""
    draw = random.Random(seed)

    def plan(_: Request) -> Fault:
        chance = draw.random()
        if chance < straggler_share:
            return Fault(delay_s=straggler_s)
        return Fault(delay_s=slow_s if chance < straggler_share + slow_share else usual_s)

    return plan


class FaultProxy:
    """A proxy on a free port of 127.0.0.1, running in a thread of its own.

    Entering starts it, leaving closes all its connections and ends the thread. `plan`, `script`
    and `requests` may be used from any thread.

    Args:
        upstream: address of the server, `http://host:port`.
        certificate: paths of a certificate chain and its key: the proxy then speaks TLS to its
            clients (and plain HTTP to the server).
        record: keep every request in `requests`; a benchmark switches this off.
        port: to listen on, for a proxy that takes the place of another; a free one by default.
    """

    def __init__(
        self,
        upstream: str,
        *,
        certificate: tuple[str, str] | None = None,
        record: bool = True,
        port: int = 0,
    ) -> None:
        parts = urlsplit(upstream)
        self._upstream = (parts.hostname or "127.0.0.1", parts.port or 80)
        self._certificate = certificate
        self._record = record
        self._port = port
        self.plan: Plan | None = None
        self.requests: list[Request] = []
        self.endpoint_url = ""
        self.open_connections = 0
        self.connections = 0
        self.most_connections = 0
        self._script: list[tuple[Callable[[Request], bool], Fault]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._fronts: set[_Front] = set()
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        ready = threading.Event()
        failure: list[BaseException] = []
        self._thread = threading.Thread(
            target=self._run, args=(ready, failure), name="ddp-fault-proxy", daemon=True
        )
        self._thread.start()
        if not ready.wait(_START_TIMEOUT_S) or failure:
            raise RuntimeError(f"the fault proxy did not start: {failure}")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the proxy; open connections are reset. A second call does nothing."""
        if self._loop is None or self._thread is None:
            return
        loop, self._loop = self._loop, None
        loop.call_soon_threadsafe(loop.stop)
        self._thread.join(_START_TIMEOUT_S)

    def script(
        self,
        faults: Iterable[Fault | None],
        *,
        path: str | None = None,
        when: Callable[[Request], bool] | None = None,
    ) -> None:
        """Do these to the next requests that match, one each in this order; they go before `plan`.

        Args:
            faults: one for each request; None lets a request pass untouched.
            path: only requests whose path ends with this.
            when: only requests for which this is true.
        """

        def matches(request: Request) -> bool:
            wanted = path is None or request.path.endswith(path)
            return wanted and (when is None or when(request))

        with self._lock:
            self._script += [(matches, fault or _NONE) for fault in faults]

    def forget(self) -> None:
        """Drop the plan, what is left of the script, and the record of requests."""
        with self._lock:
            self.plan = None
            self._script.clear()
            self.requests.clear()

    def drop_connections(self) -> None:
        """Close every open client connection now, as a server does with idle ones."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._drop)

    def _drop(self) -> None:
        for front in [*self._fronts]:
            front.close()

    def _decide(self, request: Request) -> Fault:
        with self._lock:
            if self._record:
                self.requests.append(request)
            for position, (matches, fault) in enumerate(self._script):
                if matches(request):
                    del self._script[position]
                    return fault
        plan = self.plan
        return (plan(request) if plan else None) or _NONE

    def _run(self, ready: threading.Event, failure: list[BaseException]) -> None:
        loop = _new_loop()
        asyncio.set_event_loop(loop)
        try:
            server = loop.run_until_complete(self._listen(loop))
        except BaseException as error:  # noqa: BLE001 - handed to the thread that started us
            failure.append(error)
            ready.set()
            return
        self._loop = loop
        ready.set()
        loop.run_forever()
        server.close()
        for front in [*self._fronts]:
            front.reset()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()

    async def _listen(self, loop: asyncio.AbstractEventLoop) -> asyncio.Server:
        context = None
        if self._certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*self._certificate)
        server = await loop.create_server(
            lambda: _Front(self, loop), "127.0.0.1", self._port, ssl=context, backlog=1024
        )
        port = server.sockets[0].getsockname()[1]
        self.endpoint_url = f"{'https' if context else 'http'}://127.0.0.1:{port}"
        return server


class _Front(asyncio.Protocol):
    """One connection of a client: reads a request, decides, forwards, lets the answer through."""

    def __init__(self, proxy: FaultProxy, loop: asyncio.AbstractEventLoop) -> None:
        self._proxy = proxy
        self._loop = loop
        self._buffer = bytearray()
        self._back: asyncio.Transport | None = None
        self._number = -1
        self._count = 0
        self._fault = _NONE
        self._head = b""  # of the answer, while it is incomplete; None once the body runs
        self._passed = -1  # bytes of the body so far; -1 while the head is incomplete
        self._stalled = False
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        proxy = self._proxy
        self._number = proxy.connections
        proxy.connections += 1
        proxy.open_connections += 1
        proxy.most_connections = max(proxy.most_connections, proxy.open_connections)
        proxy._fronts.add(self)

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002
        self._proxy.open_connections -= 1
        self._proxy._fronts.discard(self)
        self.transport = None
        if self._back is not None:
            self._back.abort()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        head = bytes(self._buffer[:end])
        lines = head.decode("latin-1").split("\r\n")
        headers = {
            name.lower(): value.strip()
            for name, _, value in (ln.partition(":") for ln in lines[1:])
        }
        if headers.get("expect", "").lower() == "100-continue" and self.transport is not None:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            del self._buffer[:end]
            kept = [line for line in lines if not line.lower().startswith("expect:")]
            self._buffer[:0] = "\r\n".join(kept).encode("latin-1")
            end = self._buffer.find(b"\r\n\r\n")
        length = end + 4 + int(headers.get("content-length", 0))
        if len(self._buffer) < length:
            return
        raw = bytes(self._buffer[:length])
        del self._buffer[:length]
        method, target, _ = lines[0].split(" ", 2)
        request = Request(method, target, headers, self._number, self._count)
        self._count += 1
        fault = self._proxy._decide(request)
        if fault.delay_s > 0:
            self._loop.call_later(fault.delay_s, self._go, raw, fault)
        else:
            self._go(raw, fault)

    def _go(self, raw: bytes, fault: Fault) -> None:
        if self.transport is None:
            return
        self._fault, self._head, self._passed, self._stalled = fault, b"", -1, False
        answer = fault.answer
        if fault.hang_up:
            self.close()
        elif answer is not None:
            self.transport.write(answer)
        elif self._back is not None:
            self._back.write(raw)
        else:
            task = self._loop.create_task(self._connect(raw), name="ddp-fault-proxy-connect")
            task.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def _connect(self, raw: bytes) -> None:
        try:
            back, _ = await self._loop.create_connection(
                lambda: _Back(self), *self._proxy._upstream
            )
        except OSError:
            self.close()
            return
        if self.transport is None:
            back.abort()
            return
        self._back = back
        back.write(raw)

    def answered(self, data: bytes) -> None:
        """Pass on what the server sent, as far as the fault allows."""
        if self.transport is None or self._stalled:
            return
        if not self._fault.cuts_body:
            self.transport.write(data)
            return
        if self._passed < 0:
            self._head += data
            end = self._head.find(b"\r\n\r\n")
            if end < 0:
                return
            self.transport.write(self._head[: end + 4])
            data, self._passed = self._head[end + 4 :], 0
        self._pass_body(data)

    def _pass_body(self, data: bytes) -> None:
        fault = self._fault
        limits = (fault.reset_after_bytes, fault.truncate_after_bytes, fault.stall_after_bytes)
        limit = min((each for each in limits if each is not None), default=None)
        if limit is not None and self._passed + len(data) >= limit:
            data = data[: limit - self._passed]
        data = _corrupted(data, fault.corrupt_byte_at, self._passed)
        self._passed += len(data)
        if fault.bytes_per_s and self._back is not None and data:
            self._back.pause_reading()
            self._loop.call_later(len(data) / fault.bytes_per_s, self._pass_late, data)
        elif self.transport is not None and data:
            self.transport.write(data)
        if limit is not None and self._passed >= limit:
            self._stalled = True
            if fault.reset_after_bytes is not None:
                self._loop.call_later(0.01, self.reset)  # lets the bytes before it arrive
            elif fault.truncate_after_bytes is not None:
                self.close()

    def _pass_late(self, data: bytes) -> None:
        if self.transport is not None:
            self.transport.write(data)
        if self._back is not None and not self._back.is_closing():
            with contextlib.suppress(RuntimeError):
                self._back.resume_reading()

    def close(self) -> None:
        """Close in good order (FIN), after what is written has gone out."""
        if self.transport is not None:
            self.transport.close()

    def reset(self) -> None:
        """Close with a reset (RST)."""
        if self.transport is None:
            return
        sock = self.transport.get_extra_info("socket")
        if sock is not None:
            linger = struct.pack("ii", 1, 0)
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.transport.abort()


class _Back(asyncio.Protocol):
    """The connection to the server that belongs to one client connection."""

    def __init__(self, front: _Front) -> None:
        self._front = front

    def data_received(self, data: bytes) -> None:
        self._front.answered(data)

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002
        if not self._front._stalled:
            self._front.close()


def _corrupted(data: bytes, position: int | None, passed: int) -> bytes:
    """Return this part of a body, after `passed` bytes, with a bit flipped at `position`."""
    place = -1 if position is None else position - passed
    if not 0 <= place < len(data):
        return data
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return cast("asyncio.AbstractEventLoop", uvloop.new_event_loop())
