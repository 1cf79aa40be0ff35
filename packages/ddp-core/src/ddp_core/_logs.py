"""What ranks print: read at once, so that no rank ever waits, kept in part, passed on in lines."""

from __future__ import annotations

import contextlib
import os
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping

# A rank may print faster than lines can travel. What exceeds this in one period is counted and
# dropped; the last lines of each rank are always kept.
BATCH_BYTES = 32_768
PERIOD_S = 0.2
TAIL_LINES = 40
LINE_BYTES = 2_000
_READ_BYTES = 1 << 18


class RankLogs:
    """Reads the outputs of an agent's ranks in a thread of its own.

    Args:
        outputs: Readable descriptor of each rank.
        send: Called from the thread with a batch of ``(rank, line)``; may be slow.
    """

    def __init__(
        self, outputs: Mapping[int, int], send: Callable[[list[tuple[int, str]]], object]
    ) -> None:
        self._send = send
        self._tails: dict[int, deque[bytes]] = {r: deque(maxlen=TAIL_LINES) for r in outputs}
        self._counts = dict.fromkeys(outputs, 0)
        self._parts = dict.fromkeys(outputs, b"")
        self._batch: list[tuple[int, str]] = []
        self._bytes = 0
        self._dropped = 0
        self._outputs = dict(outputs)
        self._ready = threading.Condition()
        self._reading = threading.Lock()
        self._closing = False
        self._selector = selectors.DefaultSelector()
        for rank, fd in outputs.items():
            self._selector.register(fd, selectors.EVENT_READ, rank)
        self._reader = threading.Thread(target=self._read, name="ddp-logs", daemon=True)
        self._sender = threading.Thread(target=self._forward, name="ddp-logs-send", daemon=True)
        self._reader.start()
        self._sender.start()

    def tail(self, rank: int) -> str:
        """The last lines of a rank, up to this moment."""
        with self._reading, contextlib.suppress(KeyError):
            while self._take(self._outputs[rank], rank):
                pass
        lines = [*self._tails.get(rank, ()), self._parts.get(rank, b"")]
        return b"\n".join(line for line in lines if line).decode(errors="replace")

    def n_lines(self, rank: int) -> int:
        """How many lines a rank has printed."""
        return self._counts.get(rank, 0)

    def close(self, bound_s: float = 2.0) -> None:
        """Read what is left and stop. The descriptors are the caller's."""
        with self._ready:
            self._closing = True
            self._ready.notify()
        self._reader.join(bound_s)
        self._sender.join(bound_s)
        self._selector.close()

    def _read(self) -> None:
        while self._selector.get_map() and not (self._closing and not self._step(0)):
            self._step(0.1)

    def _step(self, wait_s: float) -> bool:
        """Read each output that has something; False when none had."""
        ready = self._selector.select(wait_s)
        for key, _ in ready:
            with self._reading:
                if self._take(key.fd, key.data) is None:
                    self._selector.unregister(key.fd)
        return bool(ready)

    def _take(self, fd: int, rank: int) -> bool | None:
        """Read once: whether there was something, ``None`` at the end of file."""
        try:
            data = os.read(fd, _READ_BYTES)
        except BlockingIOError:
            return False
        *lines, rest = (self._parts[rank] + data).split(b"\n")
        self._parts[rank] = rest[-LINE_BYTES:]
        self._keep(rank, lines)
        return True if data else None

    def _keep(self, rank: int, lines: list[bytes]) -> None:
        self._counts[rank] += len(lines)
        self._tails[rank].extend(line[:LINE_BYTES] for line in lines)
        with self._ready:
            for line in lines:
                if self._bytes > BATCH_BYTES:
                    self._dropped += 1
                    continue
                text = line[:LINE_BYTES].decode(errors="replace")
                self._batch.append((rank, text))
                self._bytes += len(text) + 8

    def _forward(self) -> None:
        while True:
            with self._ready:
                if not self._closing:
                    self._ready.wait(PERIOD_S)
                closing = self._closing and not self._reader.is_alive()
                batch, self._batch, self._bytes = self._batch, [], 0
                dropped, self._dropped = self._dropped, 0
            if dropped:
                batch.append((batch[-1][0] if batch else 0, f"[... {dropped} lines not sent ...]"))
            if batch:
                self._send(batch)
            if closing:
                return
            if self._closing:
                time.sleep(0.01)
