"""A task's line to the scheduler: calls from its thread, news through a descriptor.

This is the only module that touches the insides of a Dask worker.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import contextlib
import logging
import os
import threading
from typing import Any

from distributed import get_worker

from ddp_core._coordinator import HANDLER, POLL_S
from ddp_core._silence import STOOD_STILL_S

logger = logging.getLogger("ddp_core.agent")

# A scheduler that does not answer may only be busy: Dask waits for it, and so do we. One whose
# connection is closed is gone. An agent believes that it is alone after so many seconds of each.
CALL_S = 60.0
POLL_ANSWER_S = 15.0
ALONE_S = 10.0


class Bridge:
    """Talks to the coordinator for one agent, on the worker's own connection to the scheduler.

    ``wake_fd`` becomes readable when ``news()`` has something. The calls block the agent's thread,
    never the worker's event loop.

    Args:
        job_attempt: The attempt of the job.
        agent: Number of the agent.
    """

    def __init__(self, job_attempt: str, agent: int) -> None:
        self.worker: Any = get_worker()
        loop: Any = self.worker.loop
        self._loop: asyncio.AbstractEventLoop = loop.asyncio_loop
        self._who = {"job_attempt": job_attempt, "agent": agent}
        self._views: collections.deque[dict[str, Any]] = collections.deque()
        self._follower: Any = None
        self._failure: Exception | None = None
        self._ringing = threading.Lock()
        self.wake_fd, self._bell = os.pipe()
        os.set_blocking(self.wake_fd, False)
        os.set_blocking(self._bell, False)

    def call(self, op: str, **given: Any) -> Any:
        """One call to the coordinator, which has ``CALL_S`` to answer once the call is made.

        It is made when the worker's event loop gets to it: one that another task keeps from
        running for minutes delays the call and does not lose it.
        """
        future = asyncio.run_coroutine_threadsafe(self._call(op, CALL_S, **given), self._loop)
        try:
            while not concurrent.futures.wait([future], 1.0).done:
                if not self._loop.is_running():
                    raise TimeoutError("the worker's event loop has stopped")
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def tell(self, op: str, **given: Any) -> bool:
        """As ``call``, but a scheduler that has gone is only logged: the follower will notice."""
        try:
            self.call(op, **given)
        except (OSError, TimeoutError, RuntimeError) as exc:
            if isinstance(exc, RuntimeError) and not self.is_closing():
                raise  # of a worker that closes it is "ConnectionPool is closed"
            logger.warning(
                "%s: cannot tell the scheduler (%s): %s", self._who["job_attempt"], op, exc
            )
            return False
        return True

    def follow(self, seen: int) -> None:
        """Begin to receive news from version ``seen`` on."""
        self._follower = asyncio.run_coroutine_threadsafe(self._follow(seen), self._loop)

    def news(self) -> list[dict[str, Any]]:
        """The views of the job that have come since the last call.

        Raises:
            Exception: Nothing more will come, for a reason that nobody foresaw.
        """
        with contextlib.suppress(BlockingIOError):
            os.read(self.wake_fd, 4096)
        views = []
        while self._views:
            views.append(self._views.popleft())
        if self._failure is not None:
            raise self._failure
        return views

    def ring(self, view: dict[str, Any] | None = None) -> None:
        """Wake the agent's thread, from any other."""
        if view is not None:
            self._views.append(view)
        with self._ringing, contextlib.suppress(BlockingIOError):
            if self._bell >= 0:
                os.write(self._bell, b".")

    def is_closing(self) -> bool:
        """Whether the worker is being retired or closed."""
        return str(self.worker.status.name) not in ("running", "paused", "init")

    def close(self) -> None:
        """Stop following. What rings from now on rings in vain."""
        if self._follower is not None:
            self._follower.cancel()
        with self._ringing:
            os.close(self._bell)
            os.close(self.wake_fd)
            self._bell = -1

    async def _call(self, op: str, bound_s: float, **given: Any) -> Any:
        method = getattr(self.worker.scheduler, HANDLER)
        call = asyncio.ensure_future(method(verb=op, **self._who, **given))
        # Not wait_for, which waits without a bound for what it cancels: Dask's connections may
        # take their time, for example to greet a scheduler that is cut off.
        try:
            done, _ = await asyncio.wait({call}, timeout=bound_s)
        finally:
            call.cancel()
            call.add_done_callback(_forget)
        if not done:
            raise TimeoutError(f"no answer from the scheduler within {bound_s:g} s")
        if call.cancelled():
            raise ConnectionAbortedError("Dask has given the connection up")
        return call.result()

    async def _follow(self, seen: int) -> None:
        try:
            await self._receive(seen)
        except Exception as exc:  # noqa: BLE001 - raised by news()
            self._failure = exc
            self.ring()

    async def _receive(self, seen: int) -> None:
        loop = asyncio.get_running_loop()
        bound_s = POLL_S + POLL_ANSWER_S
        heard = reached = loop.time()
        while True:
            asked = loop.time()
            try:
                view = await self._call("poll", bound_s, seen=seen)
                heard = reached = loop.time()
            except (OSError, TimeoutError) as exc:
                now = loop.time()
                if isinstance(exc, TimeoutError):
                    reached = now
                if now - asked > bound_s + STOOD_STILL_S:
                    # This loop was blocked: the answer may have come and not been read.
                    heard = reached = now
                if now - reached > ALONE_S or now - heard > CALL_S:
                    cause = {"kind": "worker-lost", "text": f"the scheduler is gone: {exc!r}"}
                    self.ring({"state": "ended", "cause": cause, "others": []})
                    return
                await asyncio.sleep(0.5)
                continue
            if view["phase"] != seen:
                seen = view["phase"]
                self.ring(view)
            if view["state"] == "ended":
                return


def _forget(call: asyncio.Future[Any]) -> None:
    """Take what a call has come to after its time, so that asyncio does not complain."""
    if not call.cancelled():
        call.exception()
