"""The numbered records that a process has submitted and does not yet know to be durable.

Invariants, with `submitted >= sent >= taken` and `taken >= durable` in sequence numbers:

* a record is dropped only when it is durable;
* when `add` has returned, what is submitted and not taken fits into the window, so that it can
  be put into the queue without waiting for anybody (at exit, for example);
* numbers are given in the order of `add`, and a group added together is contiguous;
* what `put` has accepted is numbered before anything that is added or sent later.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from ddp_results._record import Record

RECORD_OVERHEAD_BYTES = 64  # what an empty record costs in a frame and in memory, generously
SMALL_BYTES = 4096  # records up to this size may be put without the lock,
_MAX_FRESH = 16  # so many between two times that somebody takes it,
_SPARE_BYTES = 2**17  # and only with so much room: more than they need, for threads that race


class Retired(Exception):  # noqa: N818 - control flow between two of our modules, not an error
    """The outbox has been closed while empty: its owner has gone, use a new one."""


class Outbox:
    """Thread-safe: any thread adds, one thread takes frames and applies acknowledgements."""

    def __init__(self, window_bytes: int) -> None:
        self.window_bytes = window_bytes
        self.has_room = True  # whether what is submitted and not taken fits into the window
        self.sent = 0
        self.taken = 0
        self.durable = 0
        self.failure: BaseException | None = None
        self.last_change = time.monotonic()
        self._fresh: deque[Record] = deque()  # put, without a number yet
        self._may_put = True
        self._numbered = 0
        self._records: dict[int, tuple[Record, int]] = {}  # number -> record, bytes up to it
        self._offsets_base = 0  # bytes up to and including `durable`
        self._bytes = 0  # bytes up to and including `_numbered`
        self._taken_offset = 0  # bytes up to and including `taken`
        self._held: deque[tuple[int, int]] = deque()  # first and last number of each group
        self._retired = False
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)

    @property
    def submitted(self) -> int:
        """How many records there are; never too few."""
        return len(self._fresh) + self._numbered  # in this order: one is numbered, then removed

    def put(self, record: Record) -> bool:
        """Keep a record of at most `SMALL_BYTES` without a lock; False if `add` has to be used."""
        fresh = self._fresh
        if not self._may_put or len(fresh) >= _MAX_FRESH:
            return False
        fresh.append(record)
        return not self._retired or not self._take_back(record)

    def _take_back(self, record: Record) -> bool:
        """Undo a `put` that came after `retire` has looked; return whether it did."""
        with self._lock:
            for index, each in enumerate(self._fresh):
                if self._retired and each is record:
                    del self._fresh[index]
                    return True
            return False

    def add(self, records: Sequence[Record], hold: range = range(0)) -> int:
        """Number `records`, keep them, and return the number of the last; never blocks.

        Those at the indices `hold`, and all later ones, are not sent before `release`.

        Raises:
            Retired: if `retire` came first.
        """
        with self._lock:
            if self._retired:
                raise Retired
            if self.failure is not None:
                raise self.failure
            self._number_fresh()
            number, offset = self._numbered, self._bytes
            if hold:
                self._held.append((number + 1 + hold[0], number + 1 + hold[-1]))
            for record in records:
                number += 1
                offset += record.size_bytes + RECORD_OVERHEAD_BYTES
                self._records[number] = (record, offset)
            self._numbered, self._bytes = number, offset
            self._look_for_room()
            return number

    @property
    def held(self) -> list[Record]:
        """The oldest records that are held back."""
        with self._lock:
            if not self._held:
                return []
            first, last = self._held[0]
            return [self._records[number][0] for number in range(first, last + 1)]

    @property
    def is_held_up(self) -> bool:
        """Whether the next record to send is held back."""
        with self._lock:
            return bool(self._held) and self._held[0][0] == self.sent + 1

    def release(self, records: Sequence[Record] = ()) -> None:
        """Let the oldest records that are held back go, replaced by as many others if given."""
        with self._changed:
            first, _ = self._held.popleft()
            for number, record in enumerate(records, first):
                self._records[number] = (record, 0)
            offset = self._offset(first - 1)
            for number in range(first, self._numbered + 1):
                record, _ = self._records[number]
                offset += record.size_bytes + RECORD_OVERHEAD_BYTES
                self._records[number] = (record, offset)
            self._bytes = offset
            self._look_for_room()
            self._changed.notify_all()

    @property
    def under_way_bytes(self) -> int:
        """What has been sent and not been taken."""
        with self._lock:
            return self._offset(self.sent) - self._taken_offset

    def wait_until(
        self,
        reached: Callable[[], bool],
        timeout_s: float | None,
        *,
        stalled_s: float | None = None,
        on_wait: Callable[[float], None] | None = None,
        tick_s: float = 1.0,
    ) -> bool:
        """Block until `reached()` or an end: False after `timeout_s`, or `stalled_s` unchanged.

        Calls `on_wait(seconds)` every 10 seconds. Raises the failure of the outbox if it has one.
        """
        start = told = time.monotonic()
        with self._changed:
            while not reached():
                if self.failure is not None:
                    raise self.failure
                now = time.monotonic()
                if timeout_s is not None and now - start >= timeout_s:
                    return False
                if stalled_s is not None and now - max(start, self.last_change) >= stalled_s:
                    return False
                if on_wait is not None and now - told >= 10:
                    told = now
                    on_wait(now - start)
                left = tick_s if timeout_s is None else min(tick_s, timeout_s - (now - start))
                self._changed.wait(max(left, 0.001))
        return True

    def next_records(self, max_bytes: int, max_records: int) -> tuple[int, list[Record]] | None:
        """Return the next records to send and the number of the first, or None.

        None when all are sent, or when the window is full. At least one record when there is
        one, whatever its size.
        """
        with self._changed:
            self._number_fresh()
            limit = self._taken_offset + self.window_bytes
            first = number = self.sent + 1
            start = self._offset(self.sent)
            chosen: list[Record] = []
            end = self._held[0][0] - 1 if self._held else self._numbered
            while number <= end and len(chosen) < max_records:
                record, upto = self._records[number]
                if chosen and (upto - start > max_bytes or upto > limit):
                    break
                if not chosen and upto > limit and self.sent > self.taken:
                    return None
                chosen.append(record)
                number += 1
            self.sent = number - 1
            return (first, chosen) if chosen else None

    def acknowledge(self, *, durable: int, taken: int) -> bool:
        """Apply what the client says; return whether that was news.

        `taken` may go back, when a new client has to be told again what the last one held.
        """
        with self._changed:
            durable = min(durable, self._numbered)
            taken = max(min(taken, self._numbered), durable, self.durable)
            news = durable > self.durable or taken != self.taken
            if durable > self.durable:
                self._offsets_base = self._records[durable][1]
                for number in range(self.durable + 1, durable + 1):
                    del self._records[number]
                self.durable = durable
            self.taken = taken
            self._taken_offset = self._offset(taken)
            self._look_for_room()
            self.sent = max(self.sent, durable)
            if news:
                self.last_change = time.monotonic()
                self._changed.notify_all()
            return news

    def rewind(self, number: int) -> None:
        """Send again everything after `number`."""
        with self._changed:
            self.sent = max(self.durable, min(self.sent, number))
            self.taken = min(self.taken, self.sent)
            self._taken_offset = self._offset(self.taken)
            self._look_for_room()

    def resize(self, window_bytes: int) -> None:
        """Change the window; whoever waits for room looks again."""
        with self._changed:
            if window_bytes != self.window_bytes:
                self.window_bytes = window_bytes
                self._look_for_room()
                self._changed.notify_all()

    def fail(self, failure: BaseException) -> None:
        """Make every waiting and every later call raise `failure`."""
        with self._changed:
            self.failure = failure
            self._may_put = False
            self._changed.notify_all()

    def retire(self) -> bool:
        """Accept no more, if nothing is under way; return whether that is so now."""
        with self._changed:
            if self.durable == self.submitted:
                self._retired = True  # whoever puts from now on asks to have it back
                self._retired = not self._fresh
            return self._retired

    @property
    def retired(self) -> bool:
        """Whether `retire` has succeeded."""
        return self._retired

    def _number_fresh(self) -> None:
        while self._fresh and not self._retired:  # after that they are on their way back
            record = self._fresh[0]
            self._bytes += record.size_bytes + RECORD_OVERHEAD_BYTES
            self._numbered += 1
            self._records[self._numbered] = (record, self._bytes)
            self._fresh.popleft()
        self._look_for_room()

    def _look_for_room(self) -> None:
        left = self.window_bytes - (self._bytes - self._taken_offset)
        self.has_room = left >= 0
        self._may_put = left >= _SPARE_BYTES and self.failure is None

    def _offset(self, number: int) -> int:
        if number <= self.durable:
            return self._offsets_base
        return self._records[number][1]
