"""Read what ranks print at once, so that no rank ever waits, and pass it on as fast as it goes."""

from __future__ import annotations

import contextlib
import os
import selectors
import threading
import time
from collections.abc import Callable, Iterator, Mapping

from ddp_core._lines import Outgoing, Printed

_READ_BYTES = 1 << 18
# More than a pipe holds: who still prints when its rank has ended is not waited for.
_REMAINDER_BYTES = 1 << 22


class RankLogs:
    r"""Reads the outputs of an agent's ranks in a thread of its own.

    Neither this thread nor the one that sends wakes while nobody prints.

    Args:
        outputs: Readable descriptor of each rank, not blocking.
        send: Called from a thread with a batch of ``(rank, line)``; may be slow. The state of a
            progress bar ends in ``\r`` and comes every few seconds.
    """

    def __init__(
        self, outputs: Mapping[int, int], send: Callable[[list[tuple[int, str]]], object]
    ) -> None:
        self._send = send
        self._outputs = dict(outputs)
        self._printed = {rank: Printed() for rank in outputs}
        self._outgoing = Outgoing()
        self._ready = threading.Condition()
        self._reading = threading.Lock()
        self._has_read_all = False
        self._selector = selectors.DefaultSelector()
        self._awake, self._bell = os.pipe()
        self._selector.register(self._awake, selectors.EVENT_READ)
        for rank, fd in outputs.items():
            self._selector.register(fd, selectors.EVENT_READ, rank)
        self._reader = threading.Thread(target=self._read, name="ddp-logs", daemon=True)
        self._sender = threading.Thread(target=self._forward, name="ddp-logs-send", daemon=True)
        self._reader.start()
        self._sender.start()

    def tail(self, rank: int) -> str:
        """The last lines of a rank, up to this moment."""
        self._drain(rank)
        with self._reading:
            return self._printed[rank].tail()

    def n_bytes(self, rank: int) -> int:
        """How much a rank has printed."""
        return self._printed[rank].n_bytes

    def close(self, bound_s: float = 2.0) -> None:
        """Read what is left and stop, at most so long after it. The descriptors are the caller's.

        The last line of each rank is sent even where it has no end.
        """
        os.write(self._bell, b".")
        self._reader.join()
        self._sender.join(bound_s)
        os.close(self._bell)
        os.close(self._awake)

    def _read(self) -> None:
        """Read until the bell rings. The outputs that have ended before are no longer looked at."""
        while self._step():
            pass
        for rank in self._outputs:
            self._drain(rank)
            self._finish(rank)
        self._selector.close()
        with self._ready:
            self._has_read_all = True
            self._ready.notify()

    def _step(self) -> bool:
        """Wait until there is something and read once from each; False when the bell has rung."""
        ready = [key for key, _ in self._selector.select()]
        for key in ready:
            if key.data is not None and self._take(key.fd, key.data) is None:
                self._selector.unregister(key.fd)
                self._finish(key.data)
        return all(key.fd != self._awake for key in ready)

    def _drain(self, rank: int) -> None:
        """Read what a rank has printed up to now."""
        end = self._printed[rank].n_bytes + _REMAINDER_BYTES
        while self._printed[rank].n_bytes < end and self._take(self._outputs[rank], rank):
            pass

    def _take(self, fd: int, rank: int) -> bool | None:
        """Read once: whether there was something, ``None`` at the end of file."""
        with self._reading:
            try:
                data = os.read(fd, _READ_BYTES)
            except BlockingIOError:
                return False
            lines = self._printed[rank].feed(data)
            with self._changing():
                self._outgoing.add(rank, lines)
                self._outgoing.show(rank, self._printed[rank].bar())
        return True if data else None

    def _finish(self, rank: int) -> None:
        """Send the line that a rank has left without an end."""
        with self._reading:
            rest = self._printed[rank].finish()
            with self._changing():
                self._outgoing.show(rank, b"")
                if rest:
                    self._outgoing.add_last(rank, rest)

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Change what is to be sent, and wake the sender when that makes it due earlier."""
        with self._ready:
            before = self._outgoing.due_at()
            yield
            if self._outgoing.due_at() != before:
                self._ready.notify()

    def _forward(self) -> None:
        """Send batch after batch, until everything was read and sent."""
        over = False
        while not over:
            with self._ready:
                while not self._has_read_all and (left := self._left_s()) != 0:
                    self._ready.wait(left)
                over = self._has_read_all
                batch = self._outgoing.take(time.monotonic())
            if batch:
                self._send(batch)

    def _left_s(self) -> float | None:
        """Seconds until the next batch may leave; ``None``: there is none."""
        due = self._outgoing.due_at()
        return None if due is None else max(0.0, due - time.monotonic())
