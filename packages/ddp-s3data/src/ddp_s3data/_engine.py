"""One event loop in a daemon thread for each process that reads."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, cast

_log = logging.getLogger("ddp_s3data")
_T = TypeVar("_T")

_SAY_AFTER_S = 10.0
_END_S = 2.0


class Engine:
    """The loop, its thread, and what lives on the loop. Made by `engine()` only."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.held: dict[Any, Any] = {}
        """What belongs to the loop, by any key, each with `async close()`, called at the end."""
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    @property
    def alive(self) -> bool:
        """Whether the thread runs, or has not been needed yet."""
        return self._thread is None or self._thread.is_alive()

    def loop(self) -> asyncio.AbstractEventLoop:
        """Return the running loop, started at the first call."""
        with self._lock:
            if self._loop is None:
                loop = _new_loop()
                ready = threading.Event()
                self._thread = threading.Thread(
                    target=_run, args=(loop, ready), name="ddp-s3data-loop", daemon=True
                )
                self._thread.start()
                ready.wait(30.0)
                atexit.register(self._end)
                self._loop = loop
            return self._loop

    def call(self, what: Callable[..., object], *args: object) -> None:
        """Call on the loop, soon; return at once. From any thread."""
        self.loop().call_soon_threadsafe(what, *args)

    def run(self, coroutine: Coroutine[Any, Any, _T], doing: str) -> _T:
        """Run on the loop and return the result. It blocks; Ctrl-C cancels the coroutine.

        Args:
            coroutine: sets its own deadline.
            doing: said in the log when it takes more than 10 s.
        """
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop())
        started = time.monotonic()
        try:
            while True:
                try:
                    return future.result(_SAY_AFTER_S)
                except concurrent.futures.TimeoutError:
                    if future.done():
                        raise
                    _log.warning("%s since %.0f s", doing, time.monotonic() - started)
                    if not self.alive:
                        raise RuntimeError(f"{doing}: the thread of the event loop ended") from None
        except BaseException:
            future.cancel()
            raise

    def _end(self) -> None:
        """Stop the loop at the end of the process that started it."""
        if os.getpid() != self.pid or self._loop is None or self._thread is None:
            return
        if self._thread.is_alive():
            closing = asyncio.run_coroutine_threadsafe(self._close_held(), self._loop)
            with contextlib.suppress(Exception):
                closing.result(_END_S)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_END_S)

    async def _close_held(self) -> None:
        for thing in [*self.held.values()]:
            await thing.close()


def engine() -> Engine:
    """Return the engine of this process.

    After fork this is a new one. The parent's engine stays referenced and untouched: to close or
    collect an event loop inherited through fork takes descriptors out of the epoll set that the
    parent still uses, and its loop stops waking.
    """
    pid = os.getpid()
    found = _ENGINES.get(pid)
    if found is None:
        found = _ENGINES.setdefault(pid, Engine())
    elif not found.alive:
        keep_inherited(found)
        found = _ENGINES[pid] = Engine()
    return found


def keep_inherited(thing: object) -> None:
    """Keep something of another process's loop from ever being collected in this one."""
    _INHERITED.append(thing)


_ENGINES: dict[int, Engine] = {}
_INHERITED: list[object] = []


def _run(loop: asyncio.AbstractEventLoop, ready: threading.Event) -> None:
    asyncio.set_event_loop(loop)
    executor = concurrent.futures.ThreadPoolExecutor(4, thread_name_prefix="ddp-s3data-names")
    loop.set_default_executor(executor)  # for host names and files, by a name of ours
    loop.call_soon(ready.set)
    loop.run_forever()
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.wait(tasks, timeout=1.0))


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return cast("asyncio.AbstractEventLoop", uvloop.new_event_loop())
