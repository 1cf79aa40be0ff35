"""What ranks print, cut into lines, and what of it waits to be sent. Pure: no threads, no clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

TAIL_LINES = 40
LINE_BYTES = 2_000
# A rank may print faster than lines can travel. What exceeds this in one period is counted and
# dropped; the last lines of each rank are always kept.
BATCH_BYTES = 32_768
PERIOD_S = 0.2
BAR_PERIOD_S = 5.0


class Printed:
    """What one rank has printed: the last lines of it, and the line that is not yet finished.

    Attributes:
        n_bytes: How much it has printed.
    """

    def __init__(self) -> None:
        self.n_bytes = 0
        self._tail: deque[bytes] = deque(maxlen=TAIL_LINES)
        self._part = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Take what was read; returns the lines that are now finished, not yet shortened."""
        self.n_bytes += len(data)
        *lines, part = (self._part + data).split(b"\n")
        # Of a progress bar the end is new; of an endless line the beginning says what it is.
        self._part = part[-LINE_BYTES:] if b"\r" in part else part[:LINE_BYTES]
        self._tail.extend(seen(line) for line in lines[-TAIL_LINES:])
        return lines

    def bar(self) -> bytes:
        r"""The state of a progress bar: an unfinished line that was begun again with ``\r``."""
        return seen(self._part) if b"\r" in self._part else b""

    def finish(self) -> bytes:
        r"""End the last line, which had no ``\n``; returns it."""
        rest, self._part = seen(self._part), b""
        if rest:
            self._tail.append(rest)
        return rest

    def tail(self) -> str:
        """The last lines, the unfinished one included."""
        lines = (*self._tail, seen(self._part))
        return b"\n".join(line for line in lines if line).decode(errors="replace")


def seen(line: bytes) -> bytes:
    r"""What a terminal would show of a line: what follows its last ``\r``, shortened."""
    return line.rstrip(b"\r").rpartition(b"\r")[2][:LINE_BYTES]


class Outgoing:
    """What waits to be sent: lines up to a limit, and the newest state of each progress bar.

    All times are given by the caller.
    """

    def __init__(self) -> None:
        self._lines: list[tuple[int, str]] = []
        self._bytes = 0
        self._dropped = 0
        self._sent_at = float("-inf")
        self._bars: dict[int, bytes] = {}
        self._bars_sent_at: dict[int, float] = {}

    def add(self, rank: int, lines: Iterable[bytes]) -> None:
        """Put lines of a rank in, as many as there is room for."""
        for line in lines:
            if self._bytes > BATCH_BYTES:
                self._dropped += 1
                continue
            text = seen(line).decode(errors="replace")
            self._lines.append((rank, text))
            self._bytes += len(text) + 8

    def add_last(self, rank: int, line: bytes) -> None:
        """Put the last line of a rank in, for which there is always room."""
        self._lines.append((rank, line.decode(errors="replace")))

    def show(self, rank: int, bar: bytes) -> None:
        """Set the state of a rank's progress bar; empty when it has none any more."""
        if bar:
            self._bars[rank] = bar
        else:
            self._bars.pop(rank, None)

    def due_at(self) -> float | None:
        """When the next batch may leave; ``None`` while there is nothing to send."""
        due = [self._bars_sent_at.get(r, float("-inf")) + BAR_PERIOD_S for r in self._bars]
        if self._lines:
            due.append(self._sent_at + PERIOD_S)
        return min(due, default=None)

    def take(self, now: float) -> list[tuple[int, str]]:
        r"""The batch that may leave; a bar's text ends in ``\r``."""
        batch, self._lines, self._bytes = self._lines, [], 0
        if self._dropped:
            batch.append((batch[-1][0], f"[... {self._dropped} lines not sent ...]"))
        self._dropped, self._sent_at = 0, now
        for rank in list(self._bars):
            if now >= self._bars_sent_at.get(rank, float("-inf")) + BAR_PERIOD_S:
                batch.append((rank, self._bars.pop(rank).decode(errors="replace") + "\r"))
                self._bars_sent_at[rank] = now
        return batch
