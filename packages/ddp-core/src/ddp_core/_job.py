"""The job as its owner holds it, and the task on the client's loop that follows it to its end."""

from __future__ import annotations

import asyncio
import concurrent.futures
import html
import logging
import sys
import time
from collections.abc import Sequence
from typing import Any

from distributed import Client, Future

from ddp_core._agent import AgentSpec, unpack
from ddp_core._failures import error_from
from ddp_core._placement import place
from ddp_core._ranks import Rank
from ddp_core._submit import (
    agent_key,
    ask,
    fail_pending,
    future_error,
    gather,
    settle,
    submit_agents,
)
from ddp_core._watch import Watch
from ddp_core.errors import DDPCoreError, JobCancelledError
from ddp_core.options import LaunchOptions

logger = logging.getLogger("ddp_core")
rank_logger = logging.getLogger("ddp_core.ranks")

_TELL_S = 30.0


class Job:
    """One function on all its ranks, made by ``launch``. Its methods may be called from any thread.

    The job does not need to be kept: it runs to its end, or until its client goes away.

    Attributes:
        job_id: Names the job in logs and in ``TORCHELASTIC_RUN_ID``.
        name: The function's name, or the one from the options.
        futures: Dask futures of the current attempt, one per worker, good for ``wait``. Results
            come from ``result()``.
    """

    def __init__(
        self, client: Client, payload: bytes, job_id: str, options: LaunchOptions, *, decode: bool
    ) -> None:
        self.job_id = job_id
        self.name = options.name or "function"
        self.futures: list[Future[Any]] = []
        self._client = client
        self._loop: Any = client.loop
        self._payload = payload
        self._options = options
        self._decode = decode
        self._plan: list[Rank] = []
        self._state = "placing"
        self._states: dict[int, str] = {}
        self._began = time.monotonic()
        self._ended: float | None = None
        self._attempt = 0
        self._n_lines = 0
        self._cancelled = False
        self._task: asyncio.Task[None] | None = None
        self._outcome: concurrent.futures.Future[list[Any]] = concurrent.futures.Future()

    @classmethod
    def finished(cls, client: Client, job_id: str, options: LaunchOptions, value: Any) -> Job:
        """A job that has already run in this process."""
        job = cls(client, b"", job_id, options, decode=False)
        job._end("finished")
        job._outcome.set_result([value])
        return job

    @property
    def state(self) -> str:
        """``placing waiting starting running stopping``, then ``finished failed cancelled``."""
        return self._state

    @property
    def attempt(self) -> int:
        """How often the job has been restarted."""
        return self._attempt

    def result(self, timeout: float | None = None) -> list[Any]:
        """What the function returned, in rank order; blocks.

        By the time this raises, no process of the job is alive, apart from those on hosts that
        cannot be reached any more.

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
                raise JobCancelledError(f"job {self.job_id}: its client was closed")
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"job {self.job_id} is still {self._state} after {timeout} s")

    def cancel(self) -> None:
        """Ask every rank to stop. Returns at once; ``result()`` raises when they are gone."""
        self._cancelled = True
        if self._outcome.done():
            return
        failure = {"kind": "cancelled", "text": "cancelled by Job.cancel()"}
        self._loop.add_callback(self._try_stop, failure)

    async def start(self) -> None:
        """Place and submit the first attempt, then follow the job from a task of this loop."""
        view = await self._begin()
        self._task = asyncio.create_task(self._drive(view), name=f"ddp-job-{self.job_id}")

    async def _begin(self) -> dict[str, Any]:
        before = len(self._plan) or None
        self._plan = await place(self._client, self._options, before)
        specs = [
            AgentSpec(
                self.job_id,
                self._attempt,
                agent,
                tuple(r for r in self._plan if r.agent == agent),
                self._options,
                self._decode,
            )
            for agent in range(self._plan[-1].agent + 1)
        ]
        view: dict[str, Any] = await ask(
            self._client,
            "open",
            job=self.job_id,
            attempt=self._attempt,
            owner=self._client.id,
            name=f"{self.name} ({self.job_id})",
            agents=[
                {
                    "worker": s.ranks[0].worker,
                    "host": s.ranks[0].host,
                    "key": agent_key(s),
                    "ranks": [r.rank for r in s.ranks],
                }
                for s in specs
            ],
        )
        self.futures = submit_agents(self._client, specs, self._payload)
        self._state = "waiting"
        return view

    async def _drive(self, view: dict[str, Any]) -> None:
        """Follow attempts until one succeeds or no restart is due."""
        try:
            while True:
                try:
                    results = await self._follow(view)
                    break
                except DDPCoreError as exc:
                    if not self._may_restart(exc):
                        raise
                    self._attempt += 1
                    logger.warning(
                        "job %s starts again (%d of %d) after: %s",
                        self.job_id, self._attempt, self._options.max_restarts, exc,
                    )  # fmt: skip
                    view = await self._begin()
        except asyncio.CancelledError:
            self._fail(JobCancelledError(f"job {self.job_id}: its client was closed"))
            raise
        except BaseException as exc:  # noqa: BLE001 - handed to whoever waits for the result
            self._fail(self._translate(exc))
        else:
            self._end("finished")
            self._outcome.set_result(results)

    async def _follow(self, view: dict[str, Any]) -> list[Any]:
        """Watch one attempt to its end and return the results, or raise the cause."""
        futures, watch = self.futures, Watch(self._options)
        try:
            while view["state"] != "ended" and not watch.is_hopeless(view):
                if watch.is_late(view) and view["state"] == "waiting":
                    watch.blockers = await ask(self._client, "blockers", job_attempt=self._id)
                if failure := watch.check(view) or self._agent_failure(view, futures):
                    await self._try_stop(failure)
                if watch.has_stalled(view):
                    await ask(self._client, "want_stacks", job_attempt=self._id)
                if watch.should_say(view):
                    await self._say_what_for(view, watch)
                if self._cancelled and not view["cause"]:
                    await self._try_stop({"kind": "cancelled", "text": "cancelled by Job.cancel()"})
                view = await ask(
                    self._client,
                    "poll",
                    job_attempt=self._id,
                    seen=view["version"],
                    within_s=watch.left_s(),
                )
                self._note(view)
            return await self._conclude(view, futures)
        finally:
            self._n_lines = 0
            await self._close_attempt()

    async def _say_what_for(self, view: dict[str, Any], watch: Watch) -> None:
        """Tell the owner, who sees nothing happen, for whom the job waits."""
        if view["state"] == "waiting":
            watch.blockers = await ask(self._client, "blockers", job_attempt=self._id)
            what = "; ".join(watch.blockers)
        else:
            slow = [
                f"rank {r} is {s['state']}" for r, s in view["ranks"] if s["state"] != "running"
            ]
            what = "the ranks to join: " + ", ".join(slow[:16])
        logger.warning("job %s (%s) waits for %s", self.name, self.job_id, what)

    async def _conclude(self, view: dict[str, Any], futures: list[Future[Any]]) -> list[Any]:
        cause = view["cause"]
        if cause is None and not await settle(futures, _TELL_S):
            cause = {"kind": "worker-lost", "text": "a worker went before it delivered its results"}
        if cause is None:
            if self._decode:
                return []
            packed = {
                r: v for p in await gather(self._client, futures) for r, v in p.results.items()
            }
            return [unpack(packed.pop(rank.rank), rank.rank) for rank in self._plan]
        error = error_from(
            cause, job_id=self.job_id, attempt=self._attempt, others=tuple(view["others"])
        )
        await settle(futures, 1.0 if cause["kind"] == "worker-lost" else 2.0)
        fail_pending(futures, error)
        if not self._decode:
            error.results.update(await self._kept(futures))
        raise error

    async def _kept(self, futures: list[Future[Any]]) -> dict[int, Any]:
        """What ranks had returned before the job failed."""
        kept: dict[int, Any] = {}
        for future in futures:
            if future.status != "finished":
                continue
            try:
                packed = (await asyncio.wait_for(gather(self._client, [future]), _TELL_S))[0]
                kept.update((r, unpack(v, r)) for r, v in packed.results.items())
            except Exception as exc:  # noqa: BLE001 - the job's own failure matters more
                logger.warning("job %s: a result is lost: %r", self.job_id, exc)
        return kept

    def _agent_failure(
        self, view: dict[str, Any], futures: list[Future[Any]]
    ) -> dict[str, Any] | None:
        """The failure of a task that never became an agent, as where ddp_core is not installed."""
        if view["cause"] is not None:
            return None
        for future in futures:
            if future.status == "error" and view["state"] == "waiting":
                error = future_error(future)
                return {"kind": "setup", "text": f"an agent could not start: {error!r}"}
        return None

    async def _try_stop(self, failure: dict[str, Any]) -> None:
        try:
            await ask(self._client, "stop", job_attempt=self._id, failure=failure)
        except (OSError, TimeoutError, RuntimeError) as exc:
            logger.warning("job %s: cannot reach the scheduler: %s", self.job_id, exc)

    async def _close_attempt(self) -> None:
        try:
            await asyncio.wait_for(ask(self._client, "close", job_attempt=self._id), 5)
        except (OSError, TimeoutError, ValueError, RuntimeError) as exc:
            logger.debug("job %s: not closed: %s", self.job_id, exc)

    @property
    def _id(self) -> str:
        return f"{self.job_id}/{self._attempt}"

    def _may_restart(self, error: DDPCoreError) -> bool:
        return (
            not self._cancelled
            and self._attempt < self._options.max_restarts
            and self._options.restarts_after(error)
        )

    def _translate(self, exc: BaseException) -> BaseException:
        if self._client.status in ("closed", "closing") and isinstance(
            exc, OSError | ValueError | RuntimeError
        ):
            return JobCancelledError(f"job {self.job_id}: its client was closed")
        return exc

    def _note(self, view: dict[str, Any]) -> None:
        if view["state"] != "ended":
            self._state = view["state"]
        self._show(view.get("lines", ()), view.get("n_lines", 0))
        self._states = {int(r): str(s["state"]) for r, s in view.get("ranks", [])}

    def _show(self, lines: Sequence[Sequence[Any]], n_lines: int) -> None:
        """Show what ranks have printed, in order, with a word about what was too much."""
        missed = n_lines - self._n_lines - len(lines)
        self._n_lines = n_lines
        if missed > 0:
            lines = [("?", f"[... {missed} lines were too fast for this client ...]"), *lines]
        if self._options.logs == "logger":
            for rank, line in lines:
                rank_logger.info("[rank %s] %s", rank, line)
        elif lines and self._options.logs == "stderr":
            sys.stderr.write("".join(f"[rank {rank}] {line}\n" for rank, line in lines))

    def _fail(self, error: BaseException) -> None:
        self._end("cancelled" if isinstance(error, JobCancelledError) else "failed")
        fail_pending(self.futures, error)
        if not self._outcome.done():
            self._outcome.set_exception(error)

    def _end(self, state: str) -> None:
        self._state = state
        self._payload = b""
        self._ended = self._ended or time.monotonic()

    def _elapsed_s(self) -> float:
        return (self._ended or time.monotonic()) - self._began

    def __repr__(self) -> str:
        hosts = len({r.host for r in self._plan})
        return (
            f"<Job {self.job_id} {self.name}: {self._state}, {len(self._plan)} ranks on {hosts} "
            f"hosts, attempt {self._attempt}, {self._elapsed_s():.1f} s>"
        )

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{r.rank}</td><td>{html.escape(r.host)}</td>"
            f"<td>{html.escape(r.worker)}</td>"
            f"<td>{html.escape(self._states.get(r.rank, ''))}</td></tr>"
            for r in self._plan[:64]
        )
        return (
            f"<p><b>{html.escape(self.name)}</b> {html.escape(self.job_id)}: {self._state}, "
            f"attempt {self._attempt}, {self._elapsed_s():.1f} s</p>"
            f"<table><tr><th>rank</th><th>host</th><th>worker</th><th>state</th></tr>{rows}</table>"
        )
