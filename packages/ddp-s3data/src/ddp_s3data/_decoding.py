"""Samples made of objects: by whoever asks, or in threads, in the same order."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any, TypeVar

from ._contract import Reply

_T = TypeVar("_T")
_AHEAD_BYTES = 16 << 20  # taken from the reader for threads: they count no longer as in flight

Found = Iterable[tuple[int, Reply | BaseException]]
Made = Generator[tuple[int, Callable[[], _T]], None, None]


def made(found: Found, make: Callable[[int, Reply], _T], threads: int) -> Made[_T]:
    """Yield for each position what returns its sample, or raises its error, when called.

    Without threads `make` runs in that call. With threads it has begun before: several run at
    once, and no more than twice as many as there are threads are taken from `found` ahead of the
    caller. Closing the iterator waits for those that run.

    Args:
        found: positions with what was read.
        make: makes a sample of a position and its object.
        threads: how many; 0 or 1 for none.
    """
    if threads > 1:
        yield from _in_threads(found, make, threads)
        return
    for place, reply in found:
        yield place, _attempt(reply, partial(make, place))


def _in_threads(found: Found, make: Callable[[int, Reply], _T], threads: int) -> Made[_T]:
    pool = _pool(threads)
    pending: deque[tuple[int, int, Future[_T]]] = deque()
    held = 0
    try:
        for place, reply in found:
            while pending and (len(pending) >= 2 * threads or held > _AHEAD_BYTES):
                first, size, future = pending.popleft()
                yield first, future.result
                held -= size
            size = len(reply.body) if isinstance(reply, Reply) else 0
            pending.append((place, size, pool.submit(_attempt(reply, partial(make, place)))))
            held += size
        while pending:
            first, _, future = pending.popleft()
            yield first, future.result
    finally:
        wait([future for *_, future in pending if not future.cancel()])


def _attempt(reply: Reply | BaseException, make: Callable[[Reply], _T]) -> Callable[[], _T]:
    if isinstance(reply, BaseException):
        return partial(_fail, reply)
    return partial(make, reply)


def _fail(error: BaseException) -> Any:
    raise error


_POOLS: dict[tuple[int, int], ThreadPoolExecutor] = {}


def _pool(threads: int) -> ThreadPoolExecutor:
    """Return this process's threads; those of a parent do not live here."""
    name = (os.getpid(), threads)
    found = _POOLS.get(name)
    if found is None:
        made = ThreadPoolExecutor(threads, thread_name_prefix="ddp-s3data-decode")
        found = _POOLS.setdefault(name, made)
    return found
