"""Results straight from the ranks to S3."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from concurrent.futures import Future, wait
from typing import Any

from ddp_results._direct import DirectOutlet
from ddp_results._futures import FutureWatch
from ddp_results._outlet import Outlet, outlets
from ddp_results._submitting import SubmittingHandler
from ddp_results.errors import ResultsError, SinkError
from ddp_results.handler import SINK_TIMEOUT_S, wait_for_futures
from ddp_results.sinks.base import Sink
from ddp_results.sinks.s3 import S3Sink

logger = logging.getLogger("ddp_results")

_TELL_S = 10.0
_MAX_PROBLEMS = 10


class S3ResultsHandler(SubmittingHandler):
    """The calls of `DaskResultsHandler`, but each rank writes to S3 itself.

    No client is needed while the ranks run, no data passes through the scheduler. `flush` and the
    end of the process wait until everything is stored.

    Args:
        address: `s3://bucket/prefix`.
        sink_timeout_s: how long S3 may be out of reach.
        **options: `endpoint_url`, `region`, `profile`, `anon`, `requester_pays`, `addressing`.

    Raises:
        SinkUnavailableError: by the first submission of a process, if the bucket does not exist
            or may not be written to.
    """

    def __init__(
        self, address: str, *, sink_timeout_s: float = SINK_TIMEOUT_S, **options: Any
    ) -> None:
        self._sink = S3Sink(address, **options)
        self._sink_timeout_s = sink_timeout_s
        self._outlet_key = f"direct/{address}/{sorted(options.items())!r}"

    def process_results(
        self, prefix: Any = None, futures: Any = (), raise_errors: bool = True
    ) -> None:
        """Wait for the futures, and until what their workers have submitted is stored.

        Code written for `DaskResultsHandler` works unchanged. A rank that is a process of its own,
        as with ddp-core, stores everything before it ends.

        Args:
            prefix: not used: results are where the handler's address says.
            futures: as for `DaskResultsHandler`.
            raise_errors: whether the first failure of a rank is raised, or logged.

        Raises:
            TypeError: if the futures are none, or given as the prefix.
            SinkError: something could not be stored.
            BaseException: what a rank raised.
        """
        if prefix is not None and not isinstance(prefix, str | os.PathLike | Sink):
            raise TypeError(
                f"the first argument is the prefix, not {type(prefix).__name__}; give the futures"
                " as the second one: process_results(None, futures)"
            )
        watch = FutureWatch(futures)
        wait_for_futures(watch, raise_errors)
        failure = watch.first_failure if raise_errors else None
        problems = [
            problem
            for client in {id(each): each for each in watch.clients}.values()
            if getattr(client, "status", "") == "running"
            for problem in self._flush_workers(client)
        ]
        first = failure or next(iter(problems), None)
        if first is not None:
            for problem in problems:
                if problem is not first:
                    first.add_note(f"ddp-results: {problem}")
            raise first

    def _flush_workers(self, client: Any) -> list[BaseException]:
        """Have the processes of Dask's workers store what they hold; return what went wrong."""
        ended: Future[dict[str, Any]] = Future()

        def flush() -> None:
            try:
                ended.set_result(
                    client.run(
                        _flush_here, self._outlet_key, self._sink_timeout_s, on_error="return"
                    )
                )
            except Exception as error:  # noqa: BLE001 - raised by result()
                ended.set_exception(error)

        threading.Thread(target=flush, name="ddp-results-flush", daemon=True).start()
        start = time.monotonic()
        while not wait([ended], _TELL_S).done:
            waited = time.monotonic() - start
            logger.warning("waiting for workers to store results in %r (%.0f s)", self, waited)
        problems: list[BaseException] = []
        for address, found in ended.result().items():
            if isinstance(found, OSError) and not isinstance(found, SinkError):
                logger.warning(
                    "%s has gone: what it had not flushed, if anything, is lost", address
                )
            elif isinstance(found, BaseException):
                problems.append(found)
            else:
                problems += found
        return problems

    def __repr__(self) -> str:
        return f"S3ResultsHandler('s3://{self._sink.bucket}/{self._sink.prefix}')"

    def _create_outlet(self) -> Outlet:
        address = f"s3://{self._sink.bucket}/{self._sink.prefix}"
        options = self._sink.options
        return DirectOutlet(lambda: S3Sink(address, options), sink_timeout_s=self._sink_timeout_s)


async def _flush_here(key: str, timeout_s: float) -> list[BaseException]:
    """Flush the outlet of this process, if it has one; return what could not be stored."""
    outlet = outlets.get(key)
    return [] if outlet is None else await asyncio.to_thread(_flush, outlet, timeout_s)


def _flush(outlet: Outlet, timeout_s: float) -> list[BaseException]:
    problems: list[BaseException] = []
    for _ in range(_MAX_PROBLEMS):  # each try tells of one
        try:
            if not outlet.flush(timeout_s):
                problems.append(SinkError(f"not everything is stored after {timeout_s:.0f} s"))
            break
        except ResultsError as error:
            problems.append(error)
            if error is problems[0] and len(problems) > 1:  # the outlet has ended with it
                return problems[:1]
    return problems
