"""HTTP/1.1 for GET: one connection, one request at a time, and a pool of connections.

Written for small objects in large numbers, where a general client costs more processor time than
the decoding of an image. It knows what S3 sends (Content-Length, chunked, keep-alive) and takes
everything else for a fault. The protocol: RFC 9112.
"""

from __future__ import annotations

import asyncio
import io
import socket
import ssl
from typing import cast

from ._contract import FaultError

_MAX_HEAD_BYTES = 64 * 1024
_KEEP_IDLE_S = 12.0  # S3 closes idle connections after some 15 to 20 s
_SWEEP_S = 0.5
_END = b"\r\n\r\n"

Answer = tuple[int, dict[str, str], bytes]


class Connection(asyncio.Protocol):
    """One connection. `request` may be called again when the last answer is complete."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[Answer] | None = None
        self._buffer = b""
        self._body: io.BytesIO | None = None
        self._missing = 0  # bytes of the body still to come; -1 until the connection closes
        self._chunks: _Chunks | None = None
        self._status = 0
        self._headers: dict[str, str] = {}
        self._close_after = False
        self._heard = False  # anything of the present answer
        self.served = 0
        self.progress_at = 0.0
        self.idle_since = 0.0

    @property
    def usable(self) -> bool:
        """Whether another request may be sent."""
        return (
            self._transport is not None
            and not self._transport.is_closing()
            and self._waiter is None
            and not self._close_after
        )

    def request(self, head: bytes) -> asyncio.Future[Answer]:
        """Send a request without a body; the future brings status, headers and body.

        It fails with `FaultError`. Who gives up the future must `abort` the connection.
        """
        waiter = self._loop.create_future()
        if self._transport is None or self._transport.is_closing():
            waiter.set_exception(FaultError("stale", "the server had closed the connection"))
            return waiter
        self._waiter = waiter
        self._heard = False
        self.progress_at = self._loop.time()
        self._transport.write(head)
        return waiter

    def abort(self) -> None:
        """Drop the connection now."""
        if self._transport is not None:
            self._transport.abort()

    def give_up(self, cause: str, detail: str) -> None:
        """Fail the present request and drop the connection."""
        self._fail(FaultError(cause, detail))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if self._waiter is None:
            self.abort()  # nobody asked
            return
        self._heard = True
        self.progress_at = self._loop.time()
        if self._body is None:
            if self._buffer:
                data = self._buffer + data
            rest = self._read_head(data)
            if rest is None:
                return
            data = rest
        self._read_body(data)

    def _read_head(self, data: bytes) -> bytes | None:
        """Return what follows the head, or None while it is incomplete (or wrong)."""
        while True:
            end = data.find(_END)
            if end < 0:
                self._buffer = data
                if len(data) > _MAX_HEAD_BYTES:
                    self._fail(FaultError("protocol", "the head of the answer has no end"))
                return None
            lines = data[:end].decode("latin-1").split("\r\n")
            data = data[end + 4 :]
            self._buffer = b""
            start = lines[0]
            if not start.startswith("HTTP/1.") or not start[9:12].isdigit():
                self._fail(FaultError("protocol", f"no HTTP answer but {start[:40]!r}"))
                return None
            status = int(start[9:12])
            if status >= 200:
                break
        headers = {}
        for line in lines[1:]:
            name, _, value = line.partition(":")
            headers[name.lower()] = value.strip()
        self._status, self._headers = status, headers
        self._close_after = start.startswith("HTTP/1.0") or (
            headers.get("connection", "").lower() == "close"
        )
        return data if self._begin_body(status, headers) else None

    def _begin_body(self, status: int, headers: dict[str, str]) -> bool:
        self._chunks = None
        length = headers.get("content-length")
        if headers.get("transfer-encoding", "identity").lower() != "identity":
            self._chunks = _Chunks()
        elif length is not None:
            if not length.isdigit():
                self._fail(FaultError("protocol", f"Content-Length is {length[:20]!r}"))
                return False
            self._missing = int(length)
        else:
            self._missing = 0 if status in (204, 304) else -1
        self._body = io.BytesIO()
        return True

    def _read_body(self, data: bytes) -> None:
        body = self._body
        if body is None:
            return
        if self._chunks is not None:
            try:
                done = self._chunks.feed(data, body)
            except ValueError as error:
                self._fail(FaultError("protocol", f"chunked body: {error}"))
                return
            if done:
                self._finish(body)
            return
        body.write(data)
        if self._missing < 0:
            return
        self._missing -= len(data)
        if self._missing < 0:
            self._fail(FaultError("protocol", "more body than Content-Length says"))
        elif self._missing == 0:
            self._finish(body)

    def _finish(self, body: io.BytesIO) -> None:
        waiter, self._waiter, self._body = self._waiter, None, None
        self.served += 1
        if self._close_after:
            self.abort()
        if waiter is not None and not waiter.done():
            waiter.set_result((self._status, self._headers, body.getvalue()))

    def _fail(self, error: FaultError) -> None:
        waiter, self._waiter, self._body = self._waiter, None, None
        self.abort()
        if waiter is not None and not waiter.done():
            waiter.set_exception(error)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if self._waiter is None:
            return
        body = self._body
        if body is not None and self._chunks is None and self._missing < 0 and error is None:
            self._finish(body)
        elif body is not None:
            got = body.tell()
            whole = f" of {got + self._missing}" if self._chunks is None else ""
            self._fail(FaultError("truncated", f"the connection ended after {got}{whole} bytes"))
        elif self.served and not self._heard:
            self._fail(FaultError("stale", "the server had closed the idle connection"))
        else:
            reason = f" ({error})" if error else ""
            self._fail(FaultError("reset", f"the connection ended before the answer{reason}"))


class _Chunks:
    """Decoder of the chunked transfer coding (RFC 9112, section 7.1)."""

    def __init__(self) -> None:
        self._buffer = b""
        self._left = 0  # of the chunk and the line end after it
        self._last = False

    def feed(self, data: bytes, out: io.BytesIO) -> bool:
        """Write the decoded bytes to `out`; return whether that was the end."""
        data = self._buffer + data
        position = 0
        while True:
            if self._left:
                piece = data[position : position + self._left]
                out.write(piece[: max(0, self._left - 2)])  # the last two are the line end
                position += len(piece)
                self._left -= len(piece)
                if self._left:
                    break
            end = data.find(b"\r\n", position)
            if end < 0:
                break
            line, position = data[position:end], end + 2
            if self._last:
                if not line:
                    return True
                continue
            size = int(line.partition(b";")[0], 16)
            self._last = size == 0
            self._left = size + 2 if size else 0
        self._buffer = data[position:]
        return False


class Pool:
    """Connections to one host, the most recently used first. It sets no limit: its user does.

    Args:
        host: name or address.
        port: TCP port.
        tls: context, or None for plain HTTP.
        connect_timeout_s: for name, TCP and TLS together.
        stall_timeout_s: a request that receives nothing for so long fails as `stalled`.
    """

    def __init__(
        self,
        host: str,
        port: int,
        tls: ssl.SSLContext | None,
        *,
        connect_timeout_s: float,
        stall_timeout_s: float,
    ) -> None:
        self._host, self._port, self._tls = host, port, tls
        self._connect_timeout_s = connect_timeout_s
        self._stall_timeout_s = stall_timeout_s
        self._loop = asyncio.get_running_loop()
        self._idle: list[Connection] = []
        self._busy: set[Connection] = set()
        self._sweeper: asyncio.TimerHandle | None = None

    async def request(self, head: bytes) -> Answer:
        """Send on an idle connection or a new one; return status, headers, body.

        Args:
            head: the whole request.

        Raises:
            FaultError: when no whole answer comes.
        """
        connection = self._take_idle() or await self._open()
        self._busy.add(connection)
        if self._sweeper is None:
            self._sweeper = self._loop.call_later(_SWEEP_S, self._sweep)
        try:
            answer = await connection.request(head)
        except asyncio.CancelledError:
            connection.abort()
            raise
        finally:
            self._busy.discard(connection)
        if connection.usable:
            connection.idle_since = self._loop.time()
            self._idle.append(connection)
        return answer

    async def close(self) -> None:
        """Drop all connections; requests under way fail."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        for connection in [*self._idle, *self._busy]:
            connection.give_up("reset", "the client is closing")
        self._idle.clear()

    def _take_idle(self) -> Connection | None:
        oldest = self._loop.time() - _KEEP_IDLE_S
        while self._idle:
            connection = self._idle.pop()
            if connection.usable and connection.idle_since >= oldest:
                return connection
            connection.abort()
        return None

    async def _open(self) -> Connection:
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await self._loop.create_connection(
                    lambda: Connection(self._loop), self._host, self._port, ssl=self._tls
                )
        except TimeoutError as error:
            what = f"no connection to {self._host}:{self._port} in {self._connect_timeout_s:g} s"
            raise FaultError("connect", what) from error
        except ssl.SSLError as error:
            raise FaultError("tls", f"TLS with {self._host}:{self._port}: {error}") from error
        except socket.gaierror as error:
            raise FaultError("name", f"no address for {self._host!r}: {error.strerror}") from error
        except OSError as error:
            raise FaultError("connect", f"{self._host}:{self._port}: {error}") from error
        return connection

    def _sweep(self) -> None:
        """Fail the requests that hear nothing, close what is idle for long; come again."""
        now = self._loop.time()
        for connection in [*self._busy]:
            if now - connection.progress_at > self._stall_timeout_s:
                connection.give_up("stalled", f"no byte for {self._stall_timeout_s:g} s")
        while self._idle and now - self._idle[0].idle_since > _KEEP_IDLE_S:
            self._idle.pop(0).abort()
        again = bool(self._busy or self._idle)
        self._sweeper = self._loop.call_later(_SWEEP_S, self._sweep) if again else None
