"""Requests that do not give up at the first failure."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

from ._address import address
from ._contract import FaultError, ObjectStore, Page, RefusedError, Reply
from ._failures import failure, too_late
from ._integrity import check
from ._retry import RULES, cause_of, wait_s
from ._stats import Counters
from .options import S3Options

_log = logging.getLogger("ddp_s3data")
_T = TypeVar("_T")

_LARGE_BYTES = 1 << 20  # to be checked in a thread, for the loop not to stand still


class Requests:
    """Reads and lists in one bucket, by the retry table, each within `deadline_s`.

    Args:
        store: makes the single requests.
        bucket: its name, for errors.
        options: limits.
        slow_down: called when the server asks for fewer requests.
    """

    def __init__(
        self,
        store: ObjectStore,
        bucket: str,
        options: S3Options,
        slow_down: Callable[[], None] = lambda: None,
    ) -> None:
        self.store = store
        self._bucket = bucket
        self._options = options
        self._slow_down = slow_down
        self._loop = asyncio.get_running_loop()
        self._draw = random.Random()
        self._renewal: asyncio.Task[bool] | None = None
        self._renewals = 0  # that brought other credentials

    async def get(self, key: str, size: int, etag: str, counters: Counters) -> Reply:
        """Return the object, complete.

        Args:
            key: its key.
            size: as listed; -1 if unknown.
            etag: as listed; may be empty.
            counters: where to count.

        Raises:
            S3DataError: one of its kinds, when it cannot be had.
        """

        async def once() -> Reply:
            counters.requests += 1
            started = self._loop.time()
            reply = await self.store.get(key)
            counters.took(self._loop.time() - started)
            if not reply.body and size > 0 and (not reply.etag or reply.etag == etag):
                raise FaultError("empty", f"no body, where {size} bytes are listed")
            if self._options.checksum and not await self._check(reply):
                counters.unchecked += 1
            return reply

        reply = await self._persist(once, "reading", address(self._bucket, key), counters)
        counters.objects += 1
        counters.bytes += len(reply.body)
        if etag and reply.etag and reply.etag != etag:
            counters.changed += 1
        return reply

    async def list(self, prefix: str, *, delimiter: str = "", token: str | None = None) -> Page:
        """Return one page of the listing.

        Raises:
            S3DataError: one of its kinds, when it cannot be had.
        """

        async def once() -> Page:
            return await self.store.list(prefix, delimiter=delimiter, token=token)

        return await self._persist(once, "listing", address(self._bucket, prefix), Counters())

    async def _check(self, reply: Reply) -> bool:
        """Compare the body with its checksum; return whether it has one."""
        compare = partial(check, reply, etag_is_md5=not self._bucket.endswith("--x-s3"))
        if len(reply.body) <= _LARGE_BYTES:
            return compare()
        return await self._loop.run_in_executor(None, compare)

    async def _persist(
        self, once: Callable[[], Awaitable[_T]], doing: str, where: str, counters: Counters
    ) -> _T:
        limit_s = self._options.deadline_s
        seen: Counter[str] = Counter()
        last: FaultError | RefusedError | None = None
        attempt = 0
        try:
            async with asyncio.timeout(limit_s):
                while True:
                    attempt += 1
                    renewals = self._renewals
                    try:
                        return await once()
                    except (FaultError, RefusedError) as error:
                        last = error
                    cause = cause_of(last)
                    counters.retries[cause] += 1
                    seen[cause] += 1
                    if cause == "expired" and renewals != self._renewals:
                        continue  # it was sent with the old credentials
                    if not await self._may_repeat(last, cause, seen, attempt):
                        raise failure(
                            cause,
                            last,
                            doing=doing,
                            address=where,
                            attempts=attempt,
                            anon=self._options.anon,
                        ) from last
                    _log.debug("%s %s again: %s", doing, where, last)
        except TimeoutError as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise too_late(
                last, doing=doing, address=where, attempts=attempt, limit_s=limit_s
            ) from error

    async def _may_repeat(
        self, error: FaultError | RefusedError, cause: str, seen: Counter[str], attempt: int
    ) -> bool:
        """Do what the table says before the next attempt; return whether there is to be one."""
        rule = RULES[cause]
        if rule.action == "raise" or seen[cause] > rule.limit:
            return False
        if attempt >= self._options.max_attempts and not rule.slow_down:
            return False
        if rule.slow_down:
            self._slow_down()
        if rule.action == "refresh":
            return not self._options.anon and await self._refresh()
        if rule.action == "reroute" and isinstance(error, RefusedError):
            return await self.store.reroute(error.reply.headers.get("x-amz-bucket-region", ""))
        await asyncio.sleep(wait_s(rule, attempt, self._draw))
        return True

    async def _refresh(self) -> bool:
        """Get credentials anew, once for all requests that find theirs expired together."""
        if self._renewal is None:
            self._renewal = self._loop.create_task(self.store.refresh(), name="ddp-s3data-refresh")
            self._renewal.add_done_callback(self._renewed)
        return await asyncio.shield(self._renewal)

    def _renewed(self, task: asyncio.Task[bool]) -> None:
        self._renewal = None
        if not task.cancelled() and task.exception() is None and task.result():
            self._renewals += 1
