"""What the client knows of one source: which records have come, and which are stored."""

from __future__ import annotations

import time

from ddp_results._record import Kind, Record, Source
from ddp_results._wire import Frame


class Stream:
    """Puts the records of one source into order, once each.

    Invariant: `received >= taken >= durable`. `feed` is called by the collector's thread, `taken`
    and `durable` are set by the writer's thread.

    Attributes:
        received: every record up to this one has come.
        taken: every record up to this one has been given to the sinks.
        durable: every record up to this one is stored for good.
        end: number of the END record, or 0.
        missing: gaps that have been given up, as `(first, last)`.
        heard_s: when something last came, on the monotonic clock.
    """

    def __init__(self, source: Source, durable: int = 0) -> None:
        self.source = source
        self.received = self.taken = self.durable = durable
        self.end = 0
        self.missing: list[tuple[int, int]] = []
        self.marks: dict[int, int] = {}
        self.heard_s = time.monotonic()
        self.given_up = False
        self.is_at_rest = False  # it has said so, when all that it had was durable
        self.n_records = 0
        self.n_bytes = 0
        self.step: int | None = None
        self.values: dict[str, object] = {}
        self.sent_s = 0.0  # the source's clock when it submitted the last record
        self._parked: dict[int, Frame] = {}

    def feed(self, frame: Frame) -> list[tuple[int, Record]]:
        """Return the records that can be passed on now: new, and without a gap before them."""
        self.heard_s = time.monotonic()
        if frame.confirmed > self.received:  # an earlier client has stored these
            self.received = self.taken = self.durable = frame.confirmed
        if frame.records:
            self._parked[frame.first] = frame
        return self._unpark()

    @property
    def has_gap(self) -> bool:
        """Whether records wait for earlier ones."""
        return bool(self._parked)

    def skip_gap(self) -> list[tuple[int, Record]]:
        """Give up what is missing before the oldest parked frame, and pass on from there."""
        first = min(self._parked)
        self.missing.append((self.received + 1, first - 1))
        self.received = first - 1
        return self._unpark()

    def is_complete(self, mark: int) -> bool:
        """Whether everything that the source submitted before `mark` is stored."""
        if self.has_gap:
            return False
        if self.is_at_rest:
            return self.durable >= self.received
        goal = self.end or self.marks.get(mark, 0)
        if goal:
            return self.durable >= goal
        return self.given_up and self.durable >= self.received

    def _unpark(self) -> list[tuple[int, Record]]:
        ready: list[tuple[int, Record]] = []
        while self._parked and min(self._parked) <= self.received + 1:
            ready += self._accept(self._parked.pop(min(self._parked)))
        return ready

    def _accept(self, frame: Frame) -> list[tuple[int, Record]]:
        skip = self.received + 1 - frame.first
        new = frame.records[skip:] if skip > 0 else frame.records
        first = self.received + 1
        numbered = list(enumerate(new, first))
        self.received += len(new)
        for number, record in numbered:
            self._note(number, record)
        return numbered

    def _note(self, number: int, record: Record) -> None:
        self.sent_s = record.time_s
        if record.kind is Kind.MARK:
            self.marks[record.fields[0]] = number
        elif record.kind is Kind.END:
            self.end = number
        else:
            self.n_records += 1
            self.n_bytes += record.size_bytes
        if record.kind is Kind.METRICS:
            step, values = record.fields
            self.step = self.step if step is None else step
            self.values.update(values)
