"""Watch the futures of a run, or a job, without blocking."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from concurrent.futures import CancelledError
from typing import Any

logger = logging.getLogger("ddp_results")

_TELL_S = 30.0


class FutureWatch:
    """Which futures are done, and which failed first.

    Args:
        run: Dask futures, or a job that speaks for them: it has `futures`, which may change while
            it runs, a `state`, `result(timeout=…)` and a `client`, as a job of ddp-core has.

    Attributes:
        clients: the Dask client of each future, or of the job; None where there is none.

    Raises:
        TypeError: if it holds something else, or belongs to an asynchronous client.
    """

    def __init__(self, run: Any) -> None:
        found = getattr(run, "futures", run)
        futures = list(found) if isinstance(found, Iterable) else [found]
        for future in futures:
            _check(future)
        is_job = hasattr(run, "futures") and callable(getattr(run, "result", None))
        self._job = run if is_job else None
        self._pending: list[Any] = [_JobEnd(run)] if is_job else futures
        self.clients = [getattr(each, "client", None) for each in ([run] if is_job else futures)]
        self.total = len(self._pending)
        self.first_failure: BaseException | None = None

    @property
    def n_pending(self) -> int:
        """How many are still to end; a job counts as one."""
        return len(self._pending)

    @property
    def job_id(self) -> str:
        """Name of the job, as its ranks know it; empty if there is none."""
        return str(getattr(self._job, "job_id", ""))

    @property
    def words(self) -> str:
        """Say how far it is."""
        if self._job is not None:
            return f"the job is {getattr(self._job, 'state', 'running')}"
        return f"{self.n_pending} of {self.total} ranks run"

    def poll(self) -> list[BaseException]:
        """Look at all that are pending; return the new failures."""
        done = [future for future in self._pending if _is_over(future)]
        if not done:
            return []
        self._pending = [future for future in self._pending if future not in done]
        failures = [error for error in map(_failure, done) if error is not None]
        if failures and self.first_failure is None:
            self.first_failure = failures[0]
        return failures


class _JobEnd:
    """The end of a job as one future: what became of an attempt that was repeated is no matter."""

    def __init__(self, job: Any) -> None:
        self._job = job
        self._error: BaseException | None = None

    def done(self) -> bool:
        # The state is read first: an end after that is seen by the next look.
        has_ended = getattr(self._job, "state", "") in ("finished", "failed", "cancelled")
        try:
            self._job.result(timeout=_TELL_S if has_ended else 0)
        except TimeoutError as error:
            if not has_ended:
                return False
            self._error = error
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - it is the answer
            self._error = error
        return True

    def exception(self, timeout: float) -> BaseException | None:
        del timeout  # it is known
        return self._error


def _check(future: Any) -> None:
    if not callable(getattr(future, "done", None)):
        raise TypeError(
            f"futures must be Dask futures (of client.submit or ddp_core.run), not"
            f" {type(future).__name__}"
        )
    if getattr(getattr(future, "client", None), "asynchronous", False):
        raise TypeError(
            "process_results blocks, which an asynchronous Client cannot stand: call"
            " await asyncio.to_thread(handler.process_results, prefix, futures)"
        )


def _is_over(future: Any) -> bool:
    return bool(future.done()) or getattr(future, "status", "") in ("lost", "cancelled")


def _failure(future: Any) -> BaseException | None:
    """Return why a future failed, if it did; it has ended, so nothing here waits for work."""
    client = getattr(future, "client", None)
    if getattr(client, "status", "running") == "closed":
        return CancelledError(
            f"what became of {getattr(future, 'key', future)} cannot be known: its Dask client has"
            " been closed"
        )
    if getattr(future, "status", "") in ("finished", ""):
        return None if hasattr(future, "status") else _exception(future)
    try:
        future.result(timeout=10)
    except BaseException as error:  # noqa: BLE001 - CancelledError is a BaseException
        return error
    return None


def _exception(future: Any) -> BaseException | None:
    try:
        error: BaseException | None = future.exception(timeout=10)
    except BaseException as raised:  # noqa: BLE001 - cancelled
        return raised
    return error
