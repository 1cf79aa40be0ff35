"""The receiving half on the client: from the channel into order, to the sinks, and back an ack."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from ddp_results._channel import Channel
from ddp_results._delivery import Delivery
from ddp_results._record import Source
from ddp_results._sender import fair_window
from ddp_results._stream import Stream
from ddp_results._wire import (
    Ack,
    Lease,
    Packed,
    is_dead_here,
    pack_lease,
    unpack_frame,
    unpack_lease,
    unpack_source,
)
from ddp_results.errors import (
    ChannelLostError,
    ChannelResetError,
    CollectorBusyError,
    ResultsError,
    WireError,
)

logger = logging.getLogger("ddp_results")

_PAUSES_S = (0.002, 0.05)  # between looks at the queue
_PUBLISH_S = 0.02  # at most so often an acknowledgement
_BEAT_S = 0.5  # at least so often
_REGISTRY_S = 0.5
_LEASE_S = 3.0  # a collector without a beat for so long is dead
_SILENT_S = 20.0  # a source that does not answer for so long is dead
_SILENT_HERE_S = 3.0  # or for so long, if its process id does not exist on this machine
_SILENT_GONE_S = 1.0  # or for so long, if its job has ended or runs it anew
_LOST_TIMEOUT_S = 30.0
_START_TIMEOUT_S = 60.0


class Collector:
    """Thread `ddp-results-collector`; one at a time for a key, across machines.

    Attributes:
        streams: source uid to its stream.
        error: why the collector ended before it was told to.
        n_bad_frames: what came and could not be read.
        has_sources: whether any process has ever submitted under the key.
        silent_s: a source that does not answer for so long is taken for dead.
        shown: what the page of the Dask dashboard is to show; may be replaced by any thread.
    """

    def __init__(self, key: str, open_channel: Callable[[], Channel], delivery: Delivery) -> None:
        self.streams: dict[str, Stream] = {}
        self.error: Exception | None = None
        self.n_bad_frames = 0
        self.has_sources = False
        self.silent_s = _SILENT_S
        self.shown = b""
        self._key = key
        self._open_channel = open_channel
        self._delivery = delivery
        self._epoch = f"{time.time():.3f}-{secrets.token_hex(4)}"
        self._mark = 0
        self._last_mark = 0  # of the collectors before
        self._finish_since = 0.0
        self._ended_job = ""
        self._registry_read = 0.0
        self._drains = 0
        self._published: dict[str, tuple[int, ...]] = {}
        self._published_s = 0.0
        self._beaten_s = 0.0
        self._shown = b""
        self._stopping = False
        self._attached = threading.Event()
        self._finished = threading.Event()
        self._thread = threading.Thread(
            target=self._main, name="ddp-results-collector", daemon=True
        )
        delivery.may_store = self.holds_key

    def start(self) -> None:
        """Start, and return when this is the collector of the key.

        Raises:
            CollectorBusyError: if there is another.
            ChannelLostError: if the scheduler cannot be reached.
        """
        self._thread.start()
        if not self._attached.wait(_START_TIMEOUT_S):
            raise ChannelLostError(f"the Dask scheduler does not answer for {_START_TIMEOUT_S} s")
        if self.error is not None:
            raise self.error

    def finish(self, ended_job: str = "") -> None:
        """Begin to collect what has been submitted up to now; `wait_finished` tells when done.

        Args:
            ended_job: name of a job that has ended, so that its processes are gone.
        """
        self._ended_job = ended_job
        self._finish_since = time.monotonic()
        # Numbers grow from one collector to the next, so that a source answers each once.
        self._mark = max(time.time_ns() // 1_000_000, self._last_mark + 1)

    def wait_finished(self, timeout_s: float) -> bool:
        """Wait for the end of `finish`, or for an error; return whether it came."""
        return self._finished.wait(timeout_s)

    def holds_key(self) -> bool:
        """Whether no other collector can have taken over; if one has, its data is newer."""
        if self._thread.is_alive():
            return time.monotonic() - self._beaten_s < _LEASE_S
        return not isinstance(self.error, CollectorBusyError)

    def stop(self, timeout_s: float) -> None:
        """Store what has come, confirm it, and end; a second call does nothing."""
        self._stopping = True
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _main(self) -> None:
        try:
            asyncio.run(self._run())
        except ResultsError as error:
            self.error = error
        except Exception as error:
            logger.exception("collecting results")
            self.error = error
        finally:
            self._finished.set()
            self._attached.set()

    async def _run(self) -> None:
        channel = self._open_channel()
        await channel.open()
        await self._attach(channel)
        await channel.add_page()
        self._attached.set()
        pause, lost_since = _PAUSES_S[0], 0.0
        while not self._stopping:
            try:
                got = await self._cycle(channel)
            except ChannelResetError:
                continue  # the ranks will resend what is not durable
            except ChannelLostError:
                now = time.monotonic()
                if not lost_since:
                    lost_since = now
                    logger.warning(
                        "the Dask scheduler does not answer; trying again for %.0f s",
                        _LOST_TIMEOUT_S,
                    )
                if now - lost_since > _LOST_TIMEOUT_S:
                    raise
                await asyncio.sleep(0.5)
                continue
            lost_since = 0.0
            if self._mark and not got and self._all_complete():
                self._finished.set()
            pause = _PAUSES_S[0] if got else min(_PAUSES_S[1], pause * 1.5)
            await asyncio.sleep(pause)
        await self._detach(channel)

    async def _cycle(self, channel: Channel) -> int:
        frames = list(await channel.drain())
        self._drains += 1
        for data in frames:
            self._feed(data)
        frame_count = len(frames)
        frames.clear()
        now = time.monotonic()
        if now - self._registry_read >= _REGISTRY_S or self._registry_read < self._finish_since:
            await self._read_registry(channel)
            self._registry_read = now
        await self._publish(channel)
        await self._show(channel)
        return frame_count

    def _feed(self, data: Packed) -> None:
        try:
            frame = unpack_frame(data)
        except WireError as error:
            self.n_bad_frames += 1
            logger.error("ignored what came through the queue of %r: %s", self._key, error)
            return
        stream = self.streams.get(frame.source.uid)
        if stream is None:
            stream = self.streams[frame.source.uid] = Stream(frame.source, frame.confirmed)
        self._pass_on(stream, stream.feed(frame))

    def _pass_on(self, stream: Stream, records: list[Any]) -> None:
        if records:
            self._delivery.put(stream, records)

    def _all_complete(self) -> bool:
        now = time.monotonic()
        complete = self._registry_read >= self._finish_since
        attempts = self._attempts()
        for stream in self.streams.values():
            if stream.is_complete(self._mark):
                continue
            complete = False
            quiet_since = max(stream.heard_s, self._finish_since)
            patience = self._patience(stream.source, attempts)
            if now - quiet_since < patience or stream.taken < stream.received:
                continue
            if stream.durable < stream.received:
                self._delivery.abandon(stream)
            elif stream.has_gap:
                self._pass_on(stream, stream.skip_gap())
            else:
                stream.given_up = True
        return complete and self._delivery.is_idle

    def _attempts(self) -> dict[str, int]:
        """Return the last attempt of each job: it began when the processes of others were gone."""
        attempts: dict[str, int] = {}
        for stream in self.streams.values():
            job, attempt = stream.source.job, stream.source.attempt
            attempts[job] = max(attempt, attempts.get(job, 0))
        return attempts

    def _patience(self, source: Source, attempts: dict[str, int]) -> float:
        """Return for how many seconds a source may be silent before it is taken for dead."""
        if source.job and (source.job == self._ended_job or source.attempt < attempts[source.job]):
            return _SILENT_GONE_S
        return _SILENT_HERE_S if is_dead_here(source) else self.silent_s

    async def _attach(self, channel: Channel) -> None:
        await self._wait_for_lease(channel)
        notes = await channel.read("ack") or {}
        acks = {uid: Ack.unpack(note) for uid, note in notes.items() if note}
        self._last_mark = max((ack.mark for ack in acks.values()), default=0)
        for uid, note in (await self._registered(channel)).items():
            if note:
                durable = acks[uid].durable if uid in acks else 0
                self.streams[uid] = Stream(unpack_source(note), durable)
        await channel.write(("held",), {})  # what the sources may hold is told by acks from now on
        await self._cycle(channel)

    async def _wait_for_lease(self, channel: Channel) -> None:
        first = unpack_lease(await channel.read("collector"))
        if first is not None and not is_dead_here(first):
            deadline = time.monotonic() + _LEASE_S
            while time.monotonic() < deadline:
                await asyncio.sleep(0.1)
                lease = unpack_lease(await channel.read("collector"))
                if lease is None:
                    break
                if lease != first:
                    raise CollectorBusyError(
                        f"process_results for {self._key!r} runs already, on {lease.host} in"
                        f" process {lease.pid}; use another key, or stop that one"
                    )
        await self._beat(channel)

    async def _beat(self, channel: Channel) -> None:
        lease = Lease(self._epoch, socket.gethostname(), os.getpid(), self._drains)
        began_s = time.monotonic()
        await channel.write(("collector",), pack_lease(lease))
        self._beaten_s = began_s

    async def _registered(self, channel: Channel) -> dict[str, bytes]:
        """Return what is known of each source; nothing of one that needs no more attention."""
        notes: dict[str, bytes] = await channel.read("src") or {}
        self.has_sources = self.has_sources or bool(notes)
        return notes

    async def _read_registry(self, channel: Channel) -> None:
        for uid, note in (await self._registered(channel)).items():
            if note and uid not in self.streams:
                self.streams[uid] = Stream(unpack_source(note))
            elif not note and uid in self.streams:
                self.streams[uid].is_at_rest = True

    async def _publish(self, channel: Channel, *, closed: bool = False) -> None:
        now = time.monotonic()
        late = now - self._published_s
        if late < _PUBLISH_S and not closed:
            return
        window = fair_window(sum(not stream.end for stream in self.streams.values()))
        notes = {
            uid: Ack(
                self._epoch,
                stream.durable,
                stream.taken,
                stream.received,
                self._drains,
                window,
                self._mark,
                closed,
            )
            for uid, stream in self.streams.items()
        }
        state: dict[str, tuple[int, ...]] = {
            uid: (a.durable, a.taken, a.received, a.mark) for uid, a in notes.items()
        }
        if state == self._published and late < _BEAT_S and not closed and not self._suspicious():
            return
        note = await channel.read("collector")
        lease = unpack_lease(note)
        # Nobody holds it because the one that took over has ended already, or, without any note,
        # because the scheduler is new or the cluster was restarted.
        if lease.epoch != self._epoch if lease else note is not None and not self.holds_key():
            by = "another" if lease is None else f"{lease.host}, process {lease.pid},"
            raise CollectorBusyError(
                f"process_results for {self._key!r} was taken over by {by} because this one had"
                f" shown no life for {_LEASE_S:.0f} s; what is stored there counts"
            )
        await channel.write(("ack",), {uid: ack.pack() for uid, ack in notes.items()})
        await self._beat(channel)
        self._published, self._published_s = state, now

    async def _show(self, channel: Channel) -> None:
        if self.shown is not self._shown:
            self._shown = self.shown
            await channel.write(("shown",), self._shown)

    def _suspicious(self) -> bool:
        """Whether a source must learn soon how often the queue was emptied, to resend."""
        return any(stream.has_gap for stream in self.streams.values())

    async def _detach(self, channel: Channel) -> None:
        """Confirm what could be stored, and leave the key to the next collector."""
        storing = asyncio.ensure_future(asyncio.to_thread(self._delivery.stop, 30.0))
        while not (await asyncio.wait({storing}, timeout=_BEAT_S))[0]:
            await self._publish(channel)
        if not storing.result():
            logger.warning("not all that has come could be stored; the ranks keep it")
        await self._publish(channel, closed=True)
        await self._show(channel)
        for uid, stream in self.streams.items():
            if (stream.end and stream.durable >= stream.end) or stream.given_up:
                await channel.write(("src", uid), b"")
        await channel.write(("collector",), b"")
        await channel.close()
