"""An outlet that stores straight from the rank, without Dask."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from ddp_results._delivery import Delivery
from ddp_results._outbox import Outbox
from ddp_results._record import Kind, Record, Source
from ddp_results.errors import SinkError
from ddp_results.sinks.base import Sink

logger = logging.getLogger("ddp_results")

_WINDOW_BYTES = 64 * 2**20
_FRAME_BYTES = 4 * 2**20


class DirectOutlet:
    """Hands records from the outbox to a `Delivery`; the sink's pace is the rank's.

    Raises:
        SinkUnavailableError: if the sink cannot be written to.
    """

    def __init__(self, open_sink: Callable[[], Sink], *, sink_timeout_s: float) -> None:
        self.source = Source.here()
        self._outbox = Outbox(_WINDOW_BYTES)
        self._moving = threading.Lock()
        self._sink = open_sink()
        self._sink.open()
        self._delivery = Delivery(
            [self._sink], sink_timeout_s=sink_timeout_s, on_change=self._acknowledge
        )
        self._delivery.start()
        self._taken = self._durable = 0

    def submit(self, records: Sequence[Record]) -> None:
        """Accept records; block while 64 MiB wait for the sink."""
        self._outbox.add(records)
        self._move()
        if not self._outbox.has_room:
            self._outbox.wait_until(lambda: self._outbox.has_room, None, on_wait=self._say_waiting)
        self._raise_failures()

    def flush(self, timeout_s: float | None) -> bool:
        """Wait until everything submitted so far is stored; False if that takes too long."""
        goal = self._outbox.add([Record(Kind.MARK, time.time(), (0,), 0)])
        self._move()
        done = self._outbox.wait_until(
            lambda: self._outbox.durable >= goal, timeout_s, on_wait=self._say_waiting
        )
        self._raise_failures()
        return done

    def close(self, timeout_s: float) -> None:
        """Store what is left and stop."""
        if not self._delivery.stop(timeout_s):
            left = self._outbox.submitted - self._outbox.durable
            logger.error("%s leaves with %d results not stored", self.source.label, left)
        self._sink.close()

    @property
    def taken(self) -> int:
        """Number of the last record that the sink has accepted."""
        return self._taken

    @taken.setter
    def taken(self, number: int) -> None:
        self._taken = number
        self._outbox.acknowledge(durable=self._durable, taken=number)
        self._move()

    @property
    def durable(self) -> int:
        """Number of the last record that is stored."""
        return self._durable

    @durable.setter
    def durable(self, number: int) -> None:
        self._durable = number

    def _acknowledge(self) -> None:
        self._outbox.acknowledge(durable=self._durable, taken=self._taken)
        for error in (self._delivery.error, *self._delivery.dead.values()):
            if error is not None:
                self._outbox.fail(error)
        self._move()

    def _move(self) -> None:
        """Pass on, in order; any thread may do it, one at a time."""
        with self._moving:
            while (batch := self._outbox.next_records(_FRAME_BYTES, 512)) is not None:
                first, records = batch
                self._delivery.put(self, list(enumerate(records, first)))

    def _raise_failures(self) -> None:
        if self._delivery.failures:
            _, path, error = self._delivery.failures.pop(0)
            raise SinkError(f"{path!r} could not be stored: {error}") from error

    def _say_waiting(self, seconds: float) -> None:
        logger.warning(
            "%s has waited %.0f s for %r%s",
            self.source.label,
            seconds,
            self._sink,
            f": {self._delivery.waiting_for}" if self._delivery.waiting_for else "",
        )
