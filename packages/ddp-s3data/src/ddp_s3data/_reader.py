"""What a dataset asks its process's engine for: objects by position, in the order asked."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence

from ._cache import DiskCache
from ._contract import Reply
from ._direct import open_store
from ._engine import Engine, engine
from ._index import Index
from ._lookahead import Depth
from ._routes import identity
from ._scheduler import Opener, Scheduler, Slot
from ._stats import Counters
from .options import S3Options

_LANES_KEPT = 4
_PLAIN = 0


class _Lane:
    """What was fetched ahead for one iterator, and how far ahead to fetch."""

    def __init__(self, most: int, start: int = 1) -> None:
        self.slots: dict[int, Slot] = {}
        self.depth = Depth(most, start)
        self.ended_at = time.perf_counter()


class Reader:
    """Reads one dataset in one process. `read` may be called from several threads.

    Args:
        index: what there is.
        options: how to reach it.
        counters: where to count.
        opener: opens the bucket's store; replaced in tests.
    """

    def __init__(
        self, index: Index, options: S3Options, counters: Counters, opener: Opener = open_store
    ) -> None:
        self.pid = os.getpid()
        self._index = index
        self._counters = counters
        self._engine = engine()
        self._scheduler = scheduler_for(self._engine, index.bucket, options, opener)
        self._lanes: dict[int, _Lane] = {}
        where = options.cache_dir
        self._cache = None if where is None else DiskCache(where, options.cache_bytes)

    def read(
        self, indices: Sequence[int], ahead: Sequence[Sequence[int]] = (), lane_id: int = _PLAIN
    ) -> Iterator[tuple[int, Reply | BaseException]]:
        """Request all, then yield them in order, each as soon as it and those before are there.

        An object that cannot be had is yielded as its error. Bytes count as in flight until the
        next one is taken. What is fetched ahead is kept for the next call with the same lane.

        Args:
            indices: positions; may repeat.
            ahead: positions that will probably be asked for next, batch by batch.
            lane_id: number of the iterator to which they belong.
        """
        lane = self._lane(lane_id, len(ahead)) if lane_id != _PLAIN else _Lane(0)
        slots = self._submit(indices, ahead, lane)
        last_use = {index: place for place, index in enumerate(indices)}
        freed: list[Slot] = []
        waited = 0.0
        counters = self._counters
        try:
            for place, index in enumerate(indices):
                slot = slots[index]
                self._restore(slot)
                if not slot.done:
                    if freed:
                        self._engine.call(self._scheduler.release, freed)
                        freed = []
                    started = time.perf_counter()
                    slot.wait(self._engine)
                    waited += time.perf_counter() - started
                self._keep(slot)
                yield index, _outcome(slot)
                if last_use[index] == place:
                    slot.reply = None
                    freed.append(slots.pop(index))
                    if self._scheduler.starved:
                        self._engine.call(self._scheduler.release, freed)
                        freed = []
        finally:
            if freed:
                self._engine.call(self._scheduler.release, freed)
            if slots:
                self._engine.call(self._scheduler.drop, [*slots.values()])
            counters.wait_s += waited
            if lane_id != _PLAIN:
                now = time.perf_counter()
                lane.depth.saw(waited, now - lane.ended_at)
                lane.ended_at = now
                counters.depth = lane.depth.now

    def _submit(
        self, indices: Sequence[int], ahead: Sequence[Sequence[int]], lane: _Lane
    ) -> dict[int, Slot]:
        kept, lane.slots = lane.slots, {}
        slots: dict[int, Slot] = {}
        fresh, promoted, later = [], [], []
        for index in indices:
            if index in slots:
                continue
            slot = kept.pop(index, None)
            if slot is None:
                slot = self._slot(index, demanded=True)
                if not slot.stored:
                    fresh.append(slot)
            elif not slot.stored:
                promoted.append(slot)
            slots[index] = slot
        for depth, batch in enumerate(ahead):
            for index in batch:
                if index in lane.slots:
                    continue
                slot = kept.pop(index, None)
                if slot is None and depth < lane.depth.now:
                    slot = self._slot(index, demanded=False)
                    if not slot.stored:
                        later.append(slot)
                if slot is not None:
                    lane.slots[index] = slot
        if kept:
            self._engine.call(self._scheduler.drop, [*kept.values()])
        if fresh or promoted or later:
            self._engine.call(self._scheduler.submit, fresh, promoted, later)
        return slots

    def _slot(self, index: int, *, demanded: bool) -> Slot:
        found = self._index
        slot = Slot(
            found.key(index),
            found.address(index),
            found.size(index),
            found.etag(index),
            self._counters,
            demanded,
        )
        if self._cache is not None:
            slot.stored = self._cache.has(found.bucket, slot.key, slot.etag)
        return slot

    def _restore(self, slot: Slot) -> None:
        """Fill the slot from the disk cache if it is there; if it is no longer, ask for it."""
        if self._cache is None or not slot.stored or slot.done:
            return
        body = self._cache.get(self._index.bucket, slot.key, slot.etag)
        if body is not None:
            slot.reply = Reply(200, {"etag": f'"{slot.etag}"'}, body)
            slot.finish()
            self._counters.cached += 1
            return
        slot.stored, slot.demanded = False, True
        self._engine.call(self._scheduler.submit, [slot], [], [])

    def _keep(self, slot: Slot) -> None:
        """Write what was fetched to the disk cache, unless it is not what was listed."""
        reply = slot.reply
        if self._cache is None or slot.stored or reply is None or reply.etag != slot.etag:
            return
        self._cache.put(self._index.bucket, slot.key, slot.etag, reply.body)

    def _lane(self, lane_id: int, most: int) -> _Lane:
        lane = self._lanes.get(lane_id)
        if lane is None:
            start = next(reversed(self._lanes.values())).depth.now if self._lanes else 1
            lane = self._lanes[lane_id] = _Lane(most, start)
            while len(self._lanes) > _LANES_KEPT:
                oldest = self._lanes.pop(next(iter(self._lanes)))
                self._engine.call(self._scheduler.drop, [*oldest.slots.values()])
        lane.depth.most = max(lane.depth.most, most)
        return lane


def scheduler_for(
    home: Engine, bucket: str, options: S3Options, opener: Opener = open_store
) -> Scheduler:
    """Return the scheduler of this bucket and these options in this process."""
    held = home.held
    name = (bucket, options, opener, identity())
    found = held.get(name)
    if found is None:
        found = held.setdefault(name, Scheduler(bucket, options, opener))
    scheduler: Scheduler = found
    return scheduler


def _outcome(slot: Slot) -> Reply | BaseException:
    if slot.error is not None:
        return slot.error
    if slot.reply is None:
        return RuntimeError(f"{slot.address} is neither read nor failed")
    return slot.reply
