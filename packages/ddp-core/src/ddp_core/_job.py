"""The job as its owner holds it, and the jobs that a client has."""

from __future__ import annotations

import asyncio
import concurrent.futures
import html
import logging
import threading
import time
import weakref
from dataclasses import replace
from typing import Any

from distributed import Client, Future

from ddp_core._attempt import Attempt, JobSpec
from ddp_core._ranks import Rank
from ddp_core.errors import DDPCoreError, JobCancelledError

logger = logging.getLogger("ddp_core")

_SHOWN_RANKS = 64


class Job:
    """One function on all its ranks, made by ``launch``. Its methods may be called from any thread.

    The job does not need to be kept: it runs to its end, or until its client goes away. ``jobs``
    finds it again.

    Attributes:
        job_id: Names the job in logs and in ``TORCHELASTIC_RUN_ID``.
        name: The function's name, or the one from the options.
    """

    def __init__(self, client: Client, spec: JobSpec) -> None:
        self.job_id = spec.job_id
        self.name = spec.name
        self._client = client
        self._loop: Any = client.loop
        self._spec = spec
        self._began = time.monotonic()
        self._ended_at: float | None = None
        self._end_state = ""
        self._cancelled = False
        self._attempt = Attempt(client, spec)
        self._outcome: concurrent.futures.Future[list[Any]] = concurrent.futures.Future()
        with _lock:
            _known.add(self)

    @classmethod
    def finished(cls, client: Client, spec: JobSpec, value: Any) -> Job:
        """A job that has already run in this process."""
        job = cls(client, spec)
        job._end("finished")
        job._outcome.set_result([value])
        return job

    @property
    def state(self) -> str:
        """``placing waiting starting running stopping``, then ``finished failed cancelled``."""
        return self._end_state or self._attempt.state

    @property
    def attempt(self) -> int:
        """How often the job has been restarted."""
        return self._attempt.number

    @property
    def client(self) -> Client:
        """The client that launched it."""
        return self._client

    @property
    def futures(self) -> list[Future[Any]]:
        """Dask futures of the current attempt, one per worker, good for ``wait``.

        Results come from ``result()``. Empty when the job has ended: the results are in this
        process then, and no longer in the memory of the workers.
        """
        return list(self._attempt.futures)

    def result(self, timeout: float | None = None) -> list[Any]:
        """What the function returned, in rank order; blocks. May be called again.

        By the time this raises, no process of the job is alive, apart from those on hosts that
        cannot be reached any more. An interrupt (Ctrl-C) ends the waiting, not the job; but in a
        terminal it reaches the workers of a ``LocalCluster`` of this process as well, which close.

        Args:
            timeout: Seconds to wait. The job goes on when they are over.

        Raises:
            DDPCoreError: The root cause of the job's failure; ``errors`` says which kinds.
            TimeoutError: The job still runs.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = 1.0 if deadline is None else min(1.0, max(0.0, deadline - time.monotonic()))
            done, _ = concurrent.futures.wait([self._outcome], left)
            if done:
                return self._outcome.result()
            if self._client.status == "closed" and not self._outcome.done():
                self._end("cancelled")
                raise JobCancelledError(f"{self._spec}: its client was closed")
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"{self._spec} is still {self.state} after {timeout} s")

    def cancel(self) -> None:
        """Ask every rank to stop. Returns at once; ``result()`` raises when they are gone."""
        self._cancelled = True
        if not self._outcome.done():
            self._loop.add_callback(self._cancel_attempt)

    async def start(self) -> list[Future[Any]]:
        """Place and submit the first attempt, then follow the job from a task of this loop.

        Returns:
            What ``Attempt.begin`` lends.
        """
        try:
            lent = await self._attempt.begin()
        except asyncio.CancelledError:
            self._fail(JobCancelledError(f"{self._spec}: interrupted before it had its workers"))
            raise
        except BaseException as exc:
            self._fail(exc)
            raise
        task = asyncio.create_task(self._drive(), name=f"ddp-job-{self.job_id}")
        _running.add(task)
        task.add_done_callback(_running.discard)
        return lent

    async def _drive(self) -> None:
        """Follow attempts until one succeeds or no restart is due."""
        try:
            while True:
                try:
                    results = await self._attempt.follow()
                    break
                except DDPCoreError as exc:
                    if not self._may_restart(exc):
                        raise
                    await self._begin_again(exc)
        except asyncio.CancelledError:
            self._fail(JobCancelledError(f"{self._spec}: its client was closed"))
            raise
        except BaseException as exc:  # noqa: BLE001 - handed to whoever waits for the result
            self._fail(exc)
        else:
            self._end("finished")
            self._outcome.set_result(results)

    async def _begin_again(self, error: DDPCoreError) -> None:
        failed = self._attempt
        logger.warning(
            "%s starts again (%d of %d) after: %s",
            self._spec, failed.number + 1, self._spec.options.max_restarts, error,
        )  # fmt: skip
        self._attempt = Attempt(self._client, self._spec, failed.number + 1)
        if self._cancelled:
            await self._attempt.cancel()
        await self._attempt.begin(len(failed.plan))

    async def _cancel_attempt(self) -> None:
        await self._attempt.cancel()

    def _may_restart(self, error: DDPCoreError) -> bool:
        options = self._spec.options
        is_due = self.attempt < options.max_restarts and options.restarts_after(error)
        return is_due and not self._cancelled

    def _fail(self, error: BaseException) -> None:
        self._end("cancelled" if isinstance(error, JobCancelledError) else "failed")
        if not self._outcome.done():
            self._outcome.set_exception(error)

    def _end(self, state: str) -> None:
        self._end_state = state
        self._spec = replace(self._spec, payload=b"")
        self._ended_at = self._ended_at or time.monotonic()

    @property
    def _plan(self) -> list[Rank]:
        return self._attempt.plan

    @property
    def _states(self) -> dict[int, str]:
        return self._attempt.states

    def _elapsed_s(self) -> float:
        return (self._ended_at or time.monotonic()) - self._began

    def __repr__(self) -> str:
        return (
            f"<Job {self.job_id} {self.name}: {self.state}, {self._where()}, "
            f"attempt {self.attempt}, {self._elapsed_s():.1f} s>"
        )

    def _where(self) -> str:
        if not self._plan:
            return "in this process" if self._spec.options.n_ranks == 0 else "not yet placed"
        hosts = len({r.host for r in self._plan})
        return f"{_count(len(self._plan), 'rank')} on {_count(hosts, 'host')}"

    def _repr_html_(self) -> str:
        shown, hidden = self._plan[:_SHOWN_RANKS], len(self._plan) - _SHOWN_RANKS
        rows = [[str(r.rank), r.host, r.worker, self._states.get(r.rank, "")] for r in shown]
        if hidden > 0:
            rows.append(["…", f"{_count(hidden, 'more rank')}", "", ""])
        head = "".join(f"<th>{title}</th>" for title in ("rank", "host", "worker", "state"))
        body = "".join(
            f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows
        )
        return (
            f"<p><b>{html.escape(self.name)}</b> {html.escape(self.job_id)}: {self.state}, "
            f"{self._where()}, attempt {self.attempt}, {self._elapsed_s():.1f} s</p>"
            f"<table><tr>{head}</tr>{body}</table>"
        )


def jobs(client: Client) -> list[Job]:
    """The jobs that this process has started with this client, in the order of their start.

    Those that run, whether or not anybody keeps their ``Job``, and those that have ended and whose
    ``Job`` is still referenced. So a job that was started without keeping what ``launch`` returned,
    or by ``run``, can be looked at and cancelled::

        for job in jobs(client):
            job.cancel()
    """
    with _lock:
        found = [job for job in _known if job._client is client]
    return sorted(found, key=lambda job: job._began)


_lock = threading.Lock()
_known: weakref.WeakSet[Job] = weakref.WeakSet()
# An event loop keeps only weak references to its tasks. A task keeps its job.
_running: set[asyncio.Task[None]] = set()


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"
