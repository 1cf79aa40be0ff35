"""The sending half in a rank: a thread that moves records from the outbox into the channel."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from ddp_results._channel import SCHEDULER_BUDGET_BYTES, Channel
from ddp_results._outbox import SMALL_BYTES, Outbox
from ddp_results._record import Kind, Record, Source, environment_number
from ddp_results._wire import (
    Ack,
    Frame,
    Packed,
    pack_frame,
    pack_held,
    pack_source,
    unpack_held,
)
from ddp_results.errors import BackPressureError, ChannelLostError, ChannelResetError, ResultsError
from ddp_results.sinks.base import Uploader

logger = logging.getLogger("ddp_results")

FRAME_BYTES = 2**20
FRAME_RECORDS = 512
MIN_WINDOW_BYTES = 2**18
MAX_WINDOW_BYTES = 48 * 2**20
_BATCH_S = 0.02  # how long small records gather before the next frame
_POLL_S = (0.01, 0.25)  # between looks at the acknowledgement, while something is under way
_IDLE_POLL_S = (0.25, 1.0)  # and while nothing is: a client may ask for a mark
_CONNECT_TIMEOUT_S = 30.0
_LOST_TIMEOUT_S = 60.0  # the scheduler may be away for so long
_STALLED_TIMEOUT_S = 600.0  # nothing taken for so long, with a full window: give up
_SIGN_OF_LIFE_S = 2.0  # while an upload holds up the records behind it
_NO_UPLOADS_S = 600.0  # after one that has failed
_NOTHING = range(0)
_COLLECTOR_SILENT_S = 5.0  # without a sign of life, the client counts as gone


def fair_window(n_sources: int) -> int:
    """Return how many bytes one of `n_sources` may have under way."""
    share = SCHEDULER_BUDGET_BYTES // max(1, n_sources)
    return max(MIN_WINDOW_BYTES, min(MAX_WINDOW_BYTES, share))


class Sender:
    """Thread `ddp-results-sender`, with an event loop and a connection of its own.

    The constructor returns when the source is registered, so that a client which sees the task
    finished also knows of the source.

    Raises:
        ChannelLostError: if the scheduler cannot be reached.
    """

    def __init__(
        self, key: str, open_channel: Callable[[], Channel], uploader: Uploader | None = None
    ) -> None:
        self._key = key
        self._uploads = None if uploader is None else _Uploads(uploader)
        self._open_channel = open_channel
        self._source = Source.here()
        self._outbox = Outbox(MAX_WINDOW_BYTES)
        self._ready = threading.Event()
        self._closing = False
        self._stopping = False
        self._idle = False
        self._epoch = ""
        self._beat = (0.0, -1)  # when the collector last showed life, and its count of drains
        self._suspect: tuple[int, int] | None = None  # number sent, drains when it was noticed
        self._mark = 0
        self._sent_s = time.monotonic()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake = asyncio.Event()
        self._thread = threading.Thread(target=self._main, name="ddp-results-sender", daemon=True)
        self._thread.start()
        if not self._ready.wait(10.0):
            logger.warning("%s waits for the Dask scheduler to answer", self._source.label)
        if not self._ready.wait(_CONNECT_TIMEOUT_S - 5):
            self._outbox.fail(ChannelLostError(f"no connection within {_CONNECT_TIMEOUT_S:.0f} s"))
        if self._outbox.failure is not None:
            raise self._outbox.failure

    def submit(self, records: Sequence[Record]) -> None:
        """Accept records; block while the window is full.

        Raises:
            BackPressureError: if nothing has been taken for ten minutes.
            ChannelLostError: if the scheduler has gone.
        """
        box = self._outbox
        if len(records) == 1 and records[0].size_bytes <= SMALL_BYTES and box.put(records[0]):
            if self._idle:
                self._wake_up()
            return
        box.add(records, _NOTHING if self._uploads is None else self._uploads.choose(records))
        if self._idle:
            self._wake_up()
        if not box.has_room and not box.wait_until(
            lambda: box.has_room,
            None,
            stalled_s=_STALLED_TIMEOUT_S,
            on_wait=self._say_waiting,
        ):
            raise BackPressureError(
                f"{self._source.label}: nobody has taken a result for {_STALLED_TIMEOUT_S:.0f} s"
                f" and the {box.window_bytes >> 20} MiB that may wait are full;"
                " run process_results() on the client while the ranks run"
            )

    def flush(self, timeout_s: float | None) -> bool:
        """Wait until everything submitted so far is durable; False if that takes too long."""
        goal = self._outbox.submitted
        if self._outbox.durable >= goal:
            return True
        self._outbox.add([_control(Kind.MARK, 0)])  # so that a client does not wait for more
        self._wake_up()
        return self._outbox.wait_until(
            lambda: self._outbox.durable >= goal, timeout_s, on_wait=self._say_waiting
        )

    def close(self, timeout_s: float) -> None:
        """Deliver what is left and stop.

        With a client attached this waits until everything is durable; without one, until it is
        in the queue, where it waits for a client. Bounded by `timeout_s`.
        """
        if not self._outbox.retired and self._outbox.failure is None:
            deadline = time.monotonic() + timeout_s
            self._outbox.add([_control(Kind.END)])
            self._closing = True
            self._wake_up()
            self._wait_delivered(timeout_s)
            if self._outbox.durable < self._outbox.submitted and self._epoch:
                self._outbox.rewind(self._outbox.durable)  # the client may have died holding it
                self._wake_up()
                self._wait_delivered(max(1.0, deadline - time.monotonic()), only_sent=True)
        unsent = self._outbox.submitted - self._outbox.sent
        if self._outbox.failure is not None or unsent:
            logger.error(
                "%s leaves with %d of its %d results not delivered: %s",
                self._source.label,
                self._outbox.submitted - self._outbox.durable,
                self._outbox.submitted,
                self._outbox.failure or "the scheduler does not take them",
            )
        self._stopping = True
        self._wake_up()
        self._thread.join(2.0 if self._uploads is None else 10.0)  # it may have to take parts back

    def _wait_delivered(self, timeout_s: float, *, only_sent: bool = False) -> None:
        box = self._outbox

        def delivered() -> bool:
            sent = box.sent == box.submitted
            return box.durable == box.submitted or (
                sent and (only_sent or not self._collector_lives())
            )

        try:
            box.wait_until(delivered, timeout_s, tick_s=0.01)
        except ChannelLostError:
            return  # told below, with the numbers

    def _collector_lives(self) -> bool:
        return bool(self._epoch) and time.monotonic() - self._beat[0] < _COLLECTOR_SILENT_S

    def _say_waiting(self, seconds: float) -> None:
        logger.warning(
            "%s has waited %.0f s: %d results are under way and %s",
            self._source.label,
            seconds,
            self._outbox.submitted - self._outbox.durable,
            "the client's sink is slower than the ranks"
            if self._collector_lives()
            else f"no client runs process_results for {self._key!r}",
        )

    def _wake_up(self) -> None:
        self._idle = False
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake.set)

    def _main(self) -> None:
        try:
            asyncio.run(self._run())
        except Exception as error:  # noqa: BLE001 - handed to whoever submits next
            self._outbox.fail(error)
        finally:
            self._ready.set()
            if self._uploads is not None:
                self._uploads.close()

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        channel = self._open_channel()
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                await self._register(channel)
        except TimeoutError as error:
            raise ChannelLostError(f"no answer within {_CONNECT_TIMEOUT_S:.0f} s") from error
        self._ready.set()
        poll = _Pace(_POLL_S)
        lost_since: float | None = None
        while not self._stopping:
            try:
                if await self._step(channel, poll):
                    break
                lost_since = None
            except ChannelResetError:
                self._outbox.rewind(self._outbox.durable)
                await self._register(channel)
            except ChannelLostError:
                now = time.monotonic()
                if lost_since is None:
                    lost_since = now
                    logger.warning(
                        "%s has lost the Dask scheduler; trying again for %.0f s, nothing is lost",
                        self._source.label,
                        _LOST_TIMEOUT_S,
                    )
                self._outbox.rewind(self._outbox.durable)
                if now - lost_since > _LOST_TIMEOUT_S or self._stopping:
                    raise
                await asyncio.sleep(min(2.0, 0.1 + (now - lost_since) / 4))
        if self._outbox.retired:  # a client that comes later need not wait for our word
            with contextlib.suppress(ResultsError):
                await channel.write(("src", self._source.uid), b"")
        await channel.close()

    async def _register(self, channel: Channel) -> None:
        await channel.open()
        await channel.write(("src", self._source.uid), pack_source(self._source))
        n_sources = max(len(await channel.read("src") or ()), environment_number("WORLD_SIZE", 1))
        self._outbox.resize(fair_window(n_sources))
        await self._fit_budget(channel)

    async def _fit_budget(self, channel: Channel) -> None:
        """Without a client, leave no more on the scheduler than others have left room for."""
        held = unpack_held(await channel.read("held"))
        own = self._outbox.under_way_bytes
        if held.get(self._source.uid, 0) != own:
            await channel.write(("held", self._source.uid), pack_held(own))
        others = sum(size for uid, size in held.items() if uid != self._source.uid)
        room = SCHEDULER_BUDGET_BYTES - others
        self._outbox.resize(max(MIN_WINDOW_BYTES, min(self._outbox.window_bytes, room)))

    async def _step(self, channel: Channel, poll: _Pace) -> bool:
        """Send one frame or wait for something to do; return whether all is done."""
        box = self._outbox
        if self._uploads is not None:
            self._uploads.begin(box, self._wake_up)
        batch = box.next_records(FRAME_BYTES, FRAME_RECORDS)
        if batch is not None:
            first, records = batch
            frame = self._pack(first, records)
            await channel.put(frame)
            poll.hurry(_POLL_S)
            self._sent_s = time.monotonic()
        elif box.is_held_up and time.monotonic() - self._sent_s > _SIGN_OF_LIFE_S:
            await channel.put(self._pack(box.sent + 1, []))
            self._sent_s = time.monotonic()
        if poll.due:
            changed = self._apply(await channel.read("ack", self._source.uid))
            if not self._collector_lives() and box.under_way_bytes > MIN_WINDOW_BYTES:
                await self._fit_budget(channel)
            busy = box.durable < box.submitted
            poll.next(_POLL_S if busy else _IDLE_POLL_S, changed)
            if not busy and (self._closing or self._closed_by_client):
                return box.retire()
        if batch is None or sum(map(len, frame)) < FRAME_BYTES // 2:
            await self._pause(_BATCH_S if batch is not None else poll.wait_s)
        return False

    def _pack(self, first: int, records: list[Record]) -> Packed:
        """Return a frame; a record that cannot be packed is replaced, for it must not block."""
        frame = Frame(self._key, self._source, self._outbox.durable, first, records)
        try:
            return pack_frame(frame)
        except Exception:  # noqa: BLE001 - found and named below
            sound = [self._sound(record, frame) for record in records]
            return pack_frame(replace(frame, records=sound))

    def _sound(self, record: Record, frame: Frame) -> Record:
        try:
            pack_frame(replace(frame, records=[record]))
        except Exception:
            logger.exception("dropped a %s that cannot be sent: %.200r", record.kind.name, record)
            return _control(Kind.MARK, 0)
        return record

    async def _pause(self, seconds: float) -> None:
        """Let small records gather, or sleep until woken."""
        if seconds <= _BATCH_S:
            await asyncio.sleep(seconds)
            return
        self._wake.clear()
        self._idle = True
        try:
            box = self._outbox
            if box.submitted == box.sent or not box.has_room or box.is_held_up:
                async with asyncio.timeout(seconds):
                    await self._wake.wait()
        except TimeoutError:
            pass
        finally:
            self._idle = False

    _closed_by_client = False

    def _apply(self, note: bytes | None) -> bool:
        """Apply an acknowledgement; return whether something changed."""
        if not isinstance(note, bytes) or not note:
            return False
        ack = Ack.unpack(note)
        box = self._outbox
        self._closed_by_client = ack.closed
        if ack.epoch != self._epoch:
            self._epoch, self._suspect = ack.epoch, None
        if ack.drains != self._beat[1]:
            self._beat = (time.monotonic(), ack.drains)
        if ack.closed:
            self._beat = (0.0, ack.drains)
        box.resize(ack.window_bytes)
        changed = box.acknowledge(durable=ack.durable, taken=ack.taken)
        self._resend_what_was_lost(ack)
        if ack.mark > self._mark:
            self._mark = ack.mark
            box.add([_control(Kind.MARK, ack.mark)])
            changed = True
        return changed

    def _resend_what_was_lost(self, ack: Ack) -> None:
        """Send again what has been put before two complete drains and is not received."""
        box = self._outbox
        if ack.closed or box.sent <= ack.received:
            self._suspect = None
        elif self._suspect is None:
            self._suspect = (box.sent, ack.drains)
        elif ack.drains >= self._suspect[1] + 2:
            if ack.received < self._suspect[0]:
                logger.debug("resending from %d", ack.received + 1)
                box.rewind(ack.received)
            self._suspect = None


class _Uploads:
    """Large results that this process stores itself, one at a time; only their place is sent.

    The parts of such a result are held back in the outbox. When it is stored they are replaced by
    one record that says where, and by empty ones. If it cannot be stored they are let go.
    """

    def __init__(self, uploader: Uploader) -> None:
        self._uploader = uploader
        self._current: Future[Any] | None = None
        self._not_before = 0.0

    def choose(self, records: Sequence[Record]) -> range:
        """Return the indices of the parts of a result that is worth an upload."""
        for index, record in enumerate(records):
            if record.kind is Kind.PART and record.fields[2] >= self._uploader.from_bytes:
                if time.monotonic() < self._not_before:
                    break
                path = record.fields[0]
                n_parts = sum(r.kind is Kind.PART and r.fields[0] == path for r in records)
                return range(index, index + n_parts)
        return range(0)

    def begin(self, box: Outbox, wake_up: Callable[[], None]) -> None:
        """Start the next upload unless one is under way."""
        if self._current is not None and not self._current.done():
            return
        held = box.held
        if not held:
            return
        path, _, total, view, _ = held[0].fields
        try:
            self._current = self._uploader.start(path, view.obj)
        except ResultsError as error:
            self._give_up(path, error)
            box.release()
            return

        def end(stored: Future[Any]) -> None:
            self._current = None
            if stored.cancelled():
                return
            error = stored.exception()
            if error is None:
                fields = (path, total, stored.result().row())
                place = Record(Kind.UPLOAD, held[0].time_s, fields, len(path) + 100)
                box.release([place, *[_control(Kind.MARK, 0)] * (len(held) - 1)])
            else:
                self._give_up(path, error)
                box.release()
            wake_up()

        self._current.add_done_callback(end)

    def close(self) -> None:
        """Give up what is under way."""
        self._uploader.close()

    def _give_up(self, path: str, error: BaseException) -> None:
        self._not_before = time.monotonic() + _NO_UPLOADS_S
        logger.warning(
            "%s goes through Dask, it cannot be stored from here: %s; so will others for %.0f s",
            path,
            error,
            _NO_UPLOADS_S,
        )


class _Pace:
    """When to look next: soon after something happened, then ever more rarely."""

    def __init__(self, bounds: tuple[float, float]) -> None:
        self.wait_s = bounds[0]
        self._at = 0.0

    @property
    def due(self) -> bool:
        return time.monotonic() >= self._at

    def hurry(self, bounds: tuple[float, float]) -> None:
        self.wait_s = bounds[0]
        self._at = min(self._at, time.monotonic() + self.wait_s)

    def next(self, bounds: tuple[float, float], changed: bool) -> None:
        low, high = bounds
        self.wait_s = low if changed else max(low, min(high, self.wait_s * 1.5))
        self._at = time.monotonic() + self.wait_s


def _control(kind: Kind, *fields: int) -> Record:
    return Record(kind, time.time(), fields, 0)
