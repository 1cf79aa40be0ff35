"""The errors of ddp_core: one root, two levels, each picklable and rebuildable from its text."""

from __future__ import annotations

import pickle
import sys
from typing import Any

__all__ = [
    "DDPCoreError",
    "GangTimeoutError",
    "JobCancelledError",
    "JobStalledError",
    "NotEnoughWorkersError",
    "NotInRankError",
    "RankFailedError",
    "RemoteTraceback",
    "RendezvousError",
    "ResultError",
    "WorkerLostError",
]


class RemoteTraceback(Exception):  # noqa: N818 - it is the text of a traceback, not an error
    """The text of a traceback from another process, as the ``__cause__`` of its exception."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""' if self.args else ""


class DDPCoreError(Exception):
    """Anything that ddp_core itself reports about a job.

    Args:
        message: What was being done, to what, what was found, what to do.
        job_id: The job.
        attempt: Which start of the job, from 0.
        rank: The rank at the root of the failure.
        host: Its host.
        worker: Address of its Dask worker.
        exit_code: Exit code of its process, when that is what was seen.
        signal: Number of the signal that ended its process.
        log: The last lines that the rank printed.
        others: One line about each failure that came later.
        results: What other ranks had returned, by rank.
        cause: The pickled original exception. It becomes ``__cause__`` where it can be unpickled.
        cause_text: Traceback of the original exception.
    """

    def __init__(
        self,
        message: str = "",
        *,
        job_id: str | None = None,
        attempt: int = 0,
        rank: int | None = None,
        host: str | None = None,
        worker: str | None = None,
        exit_code: int | None = None,
        signal: int | None = None,
        log: str = "",
        others: tuple[str, ...] = (),
        results: dict[int, Any] | None = None,
        cause: bytes | None = None,
        cause_text: str = "",
    ) -> None:
        super().__init__(message)
        self.job_id = job_id
        self.attempt = attempt
        self.rank = rank
        self.host = host
        self.worker = worker
        self.exit_code = exit_code
        self.signal = signal
        self.log = log
        self.others = tuple(others)
        self.results = dict(results or {})
        self._cause = cause
        self._cause_text = cause_text
        self._adopt_cause()

    def _adopt_cause(self) -> None:
        if (self._cause or self._cause_text) and not _inside_agent():
            self.__cause__ = _load_cause(self._cause, self._cause_text)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self),), dict(vars(self))

    def __setstate__(self, state: dict[str, Any] | None) -> None:
        # Dask pickles exceptions through tblib, which sets a cause of its own (none) on the rebuilt
        # one; state comes after that.
        for key, value in (state or {}).items():
            setattr(self, key, value)
        self._adopt_cause()


class NotEnoughWorkersError(DDPCoreError):
    """Fewer usable workers than ranks were there when ``wait_timeout_s`` ended."""


class GangTimeoutError(DDPCoreError):
    """The workers stayed busy with other work until ``start_timeout_s`` ended."""


class RendezvousError(DDPCoreError):
    """The ranks did not form a process group within ``rendezvous_timeout_s``."""


class RankFailedError(DDPCoreError):
    """A rank raised, died, or left without a result; ``__cause__`` is what it raised."""


class WorkerLostError(DDPCoreError):
    """A Dask worker that ran a rank is gone: killed, retired, restarted, or unreachable."""


class JobCancelledError(DDPCoreError):
    """The job was cancelled, or the client that owned it went away."""


class JobStalledError(DDPCoreError):
    """No rank made progress for ``stall_timeout_s``."""


class ResultError(DDPCoreError):
    """A rank returned something that cannot be pickled, or not be unpickled here."""


class NotInRankError(DDPCoreError):
    """``current_rank()`` was called in a process that is not a rank."""


def _inside_agent() -> bool:
    """Whether this thread runs one of our tasks: there the user's modules must not be imported."""
    worker = sys.modules.get("distributed.worker")
    key = getattr(getattr(worker, "thread_state", None), "key", None)
    return isinstance(key, str) and key.startswith("ddp-agent-")


def _load_cause(data: bytes | None, text: str) -> BaseException:
    """The exception that a rank raised, or its traceback's text where it cannot be rebuilt here."""
    remote = RemoteTraceback(text)
    if not data:
        return remote
    try:
        exc = pickle.loads(data)
    except Exception as why:  # noqa: BLE001 - whatever the user's class raises on unpickling
        remote.add_note(f"the exception itself cannot be unpickled here: {why!r}")
        return remote
    if not isinstance(exc, BaseException):
        return remote
    exc.__cause__ = remote if text else None
    return exc
