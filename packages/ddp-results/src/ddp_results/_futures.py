"""Watch the futures of a run without blocking."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

logger = logging.getLogger("ddp_results")


class FutureWatch:
    """Which futures are done, and which failed first.

    Args:
        run: Dask futures, or an object that has them as `futures` (a job of ddp-core).

    Raises:
        TypeError: if it holds something else, or belongs to an asynchronous client.
    """

    def __init__(self, run: Any) -> None:
        self._job = run if hasattr(run, "futures") else None
        found = getattr(run, "futures", run)
        if not isinstance(found, Iterable):
            found = [found]
        self._pending = list(found)
        self.total = len(self._pending)
        self.first_failure: BaseException | None = None
        for future in self._pending:
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

    @property
    def n_pending(self) -> int:
        """How many futures are still to end."""
        return len(self._pending)

    def poll(self) -> list[BaseException]:
        """Look at all that are pending; return the new failures."""
        done = [future for future in self._pending if _is_over(future)]
        if not done:
            return []
        self._pending = [future for future in self._pending if future not in done]
        failures = [error for error in map(_failure, done) if error is not None]
        if failures and self.first_failure is None:
            self.first_failure = self._root_cause(failures)
        return failures

    def _root_cause(self, failures: list[BaseException]) -> BaseException:
        """Prefer what the job itself says: it has seen every rank."""
        result = getattr(self._job, "result", None)
        if callable(result):
            try:
                result()
            except BaseException as error:  # noqa: BLE001 - it is the answer
                return error
        return failures[0]


def _is_over(future: Any) -> bool:
    return bool(future.done()) or getattr(future, "status", "") in ("lost", "cancelled")


def _failure(future: Any) -> BaseException | None:
    """Return why a future failed, if it did; it has ended, so nothing here waits for work."""
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
