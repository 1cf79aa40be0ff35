"""Which object of a bucket is requested next: demanded ones first, within limits."""

from __future__ import annotations

import asyncio
import logging
import resource
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable

from ._contract import ObjectStore, Reply
from ._engine import Engine
from ._hedges import Hedges
from ._requests import Requests
from ._stats import Counters
from .errors import S3DataError
from .options import S3Options

_log = logging.getLogger("ddp_s3data")

_SAY_AFTER_S = 10.0
_FIRST_LIMIT = 16
_LARGE_BYTES = 1 << 20
_HALVE_EVERY_S = 1.0
_LOOK_EVERY_S = 0.05

Opener = Callable[[str, S3Options], Awaitable[ObjectStore]]

_QUEUED, _RUNNING, _DONE, _DROPPED = range(4)


class Slot:
    """One object that somebody wants: filled on the loop, awaited by one reading thread."""

    __slots__ = (
        "_waiter",
        "address",
        "counted",
        "counters",
        "demanded",
        "error",
        "etag",
        "key",
        "reply",
        "size",
        "started_s",
        "state",
        "stored",
        "tasks",
    )

    def __init__(
        self, key: str, address: str, size: int, etag: str, counters: Counters, demanded: bool
    ) -> None:
        self.key = key
        self.address = address
        self.size = size
        self.etag = etag
        self.counters = counters
        self.demanded = demanded
        self.counted = False
        self.stored = False  # in the disk cache: the reader takes it there, nobody requests it
        self.state = _QUEUED
        self.reply: Reply | None = None
        self.error: BaseException | None = None
        self.started_s = 0.0
        self.tasks: list[asyncio.Task[None]] = []
        self._waiter: threading.Lock | None = None

    @property
    def done(self) -> bool:
        """Whether `reply` or `error` is set."""
        return self.state == _DONE

    def finish(self) -> None:
        """Wake the reader. On the loop, after `reply` or `error` is set."""
        self.state = _DONE
        waiter = self._waiter
        if waiter is not None:
            waiter.release()

    def wait(self, engine: Engine) -> None:
        """Block until done; say in the log what is missing after 10 s.

        Raises:
            S3DataError: when the loop that should fill the slot is gone.
        """
        if self.state == _DONE:
            return
        waiter = threading.Lock()
        waiter.acquire()
        self._waiter = waiter  # from here on `finish` releases it; look once more
        started = time.monotonic()
        while self.state != _DONE and not waiter.acquire(timeout=_SAY_AFTER_S):
            _log.warning("reading %s since %.0f s", self.address, time.monotonic() - started)
            if not engine.alive:
                raise S3DataError(
                    f"reading {self.address}: the thread that reads has ended; "
                    "was this called at the exit of the process?",
                    address=self.address,
                )


class Scheduler:
    """Keeps at most so many requests and bytes of one bucket in flight. On the loop only.

    The number of requests grows from 16 with every success and is halved when the server asks for
    fewer ("additive increase, multiplicative decrease"). Bytes count from the request until the
    reader has let go of them. What is demanded waits only for what was demanded before it, never
    for what was fetched ahead, so that no hint can stop a reader.
    """

    def __init__(self, bucket: str, options: S3Options, open_store: Opener) -> None:
        self._bucket = bucket
        self._options = options
        self._open_store = open_store
        self._requests: Requests | None = None
        self._opening: asyncio.Task[None] | None = None
        self._demand: deque[Slot] = deque()
        self._ahead: deque[Slot] = deque()
        self._most = min(options.max_connections, _connections_possible())
        self._limit = float(min(_FIRST_LIMIT, self._most))
        self._probing = True
        self._halved_at = 0.0
        self._active = 0
        self._held_bytes = 0
        self._demanded_bytes = 0
        self._hedges = Hedges(options.hedge)
        self._watched: set[Slot] = set()
        self._timer: asyncio.TimerHandle | None = None
        self.starved = False
        """Whether something waits until a reader lets go of bytes; may be read by any thread."""

    def submit(self, demand: list[Slot], promoted: list[Slot], ahead: list[Slot]) -> None:
        """Take new slots, and slots taken earlier as ahead which are demanded now."""
        self._demand.extend(demand)
        for slot in promoted:
            if not slot.demanded:
                slot.demanded = True
                if slot.state == _QUEUED:
                    self._demand.append(slot)
                elif slot.counted:
                    self._demanded_bytes += _weight(slot)
                    if slot.state == _RUNNING and self._hedges.allowed:
                        self._watch(slot)
        self._ahead.extend(ahead)
        if self._requests is None:
            self._open()
        else:
            self._pump()

    def release(self, slots: list[Slot]) -> None:
        """Let go of the bytes of slots that have been read."""
        for slot in slots:
            if slot.counted:
                slot.counted = False
                self._held_bytes -= _weight(slot)
                if slot.demanded:
                    self._demanded_bytes -= _weight(slot)
        self._pump()

    def drop(self, slots: Iterable[Slot]) -> None:
        """Give up slots that nobody will read."""
        for slot in slots:
            if slot.state == _DONE:
                slot.counters.wasted += 1
                self.release([slot])
            elif slot.state == _RUNNING:
                slot.state = _DROPPED
                if slot.size > _LARGE_BYTES:
                    for task in slot.tasks:
                        task.cancel()
            else:
                slot.state = _DROPPED

    async def requests(self) -> Requests:
        """Return the open bucket, for requests of other kinds.

        Raises:
            S3DataError: when it cannot be opened.
        """
        if self._requests is None:
            store = await self._open_store(self._bucket, self._options)
            if self._requests is None:
                self._requests = Requests(store, self._bucket, self._options, self._slow_down)
        return self._requests

    async def close(self) -> None:
        """Drop everything and close the bucket."""
        for slot in [*self._demand, *self._ahead]:
            slot.state = _DROPPED
        requests, self._requests = self._requests, None
        if requests is not None:
            await requests.store.close()

    def _open(self) -> None:
        if self._opening is None:
            loop = asyncio.get_running_loop()
            self._opening = loop.create_task(self._open_then_pump(), name="ddp-s3data-open")

    async def _open_then_pump(self) -> None:
        try:
            async with asyncio.timeout(self._options.deadline_s):
                await self.requests()
        except BaseException as error:  # noqa: BLE001 - every waiting reader gets it
            for slot in [*self._demand, *self._ahead]:
                if slot.state == _QUEUED:
                    slot.error = error
                    slot.finish()
            self._demand.clear()
            self._ahead.clear()
        finally:
            self._opening = None
        self._pump()

    def _pump(self) -> None:
        """Start what may start now."""
        if self._requests is None:
            return
        self.starved = False
        loop = asyncio.get_running_loop()
        while self._active < int(self._limit):
            slot = self._next()
            if slot is None:
                return
            slot.state = _RUNNING
            slot.counted = True
            slot.started_s = loop.time()
            self._held_bytes += _weight(slot)
            if slot.demanded:
                self._demanded_bytes += _weight(slot)
            self._start(self._requests, slot)
            if self._hedges.allowed and slot.demanded:
                self._watch(slot)

    def _next(self) -> Slot | None:
        """Take the next slot that the byte limit admits, or none."""
        budget = self._options.inflight_bytes
        for queue, held in ((self._demand, self._demanded_bytes), (self._ahead, self._held_bytes)):
            while queue and queue[0].state != _QUEUED:
                queue.popleft()
            if not queue:
                continue
            if held and held + _weight(queue[0]) > budget:
                self.starved = True
                return None
            return queue.popleft()
        return None

    def _start(self, requests: Requests, slot: Slot) -> None:
        self._active += 1
        loop = asyncio.get_running_loop()
        fetch = self._fetch(requests, slot)
        slot.tasks.append(loop.create_task(fetch, name="ddp-s3data-get"))

    async def _fetch(self, requests: Requests, slot: Slot) -> None:
        reply: Reply | None = None
        failed: BaseException | None = None
        try:
            reply = await requests.get(slot.key, slot.size, slot.etag, slot.counters)
            self._grow()
        except BaseException as error:  # noqa: BLE001 - the reader gets it
            failed = error
        self._active -= 1
        this = asyncio.current_task()
        others = slot.tasks = [task for task in slot.tasks if task is not this]
        if slot.state == _RUNNING and (reply is not None or not others):
            slot.reply, slot.error = reply, failed
            self._watched.discard(slot)
            self._hedges.saw(asyncio.get_running_loop().time() - slot.started_s)
            for task in others:  # the slower of two
                task.cancel()
            slot.finish()
        elif slot.state == _DROPPED and not others:
            self._watched.discard(slot)
            slot.counters.wasted += 1
            self.release([slot])
        self._pump()

    def _watch(self, slot: Slot) -> None:
        """See to it that the slot is asked for a second time when it is late."""
        if slot.size <= _LARGE_BYTES:
            self._watched.add(slot)
            if self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(_LOOK_EVERY_S, self._look)

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        late = loop.time() - self._hedges.late_after_s
        for slot in [*self._watched]:
            if slot.started_s < late and self._requests is not None and self._hedges.take():
                self._watched.discard(slot)
                slot.counters.hedges += 1
                self._start(self._requests, slot)
        again = bool(self._watched)
        self._timer = loop.call_later(_LOOK_EVERY_S, self._look) if again else None

    def _grow(self) -> None:
        if self._limit < self._most:
            step = 1.0 if self._probing else 1.0 / self._limit
            self._limit = min(self._limit + step, float(self._most))

    def _slow_down(self) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._halved_at >= _HALVE_EVERY_S:
            self._halved_at = now
            self._probing = False
            self._limit = max(1.0, self._limit / 2.0)
            _log.info("s3://%s asks to slow down: %d requests at once", self._bucket, self._limit)


def _weight(slot: Slot) -> int:
    return max(slot.size, 0)


def _connections_possible() -> int:
    """Return how many connections a process may open that must also open files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 20 if soft == resource.RLIM_INFINITY else max(4, soft // 4)
