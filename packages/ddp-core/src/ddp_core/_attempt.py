"""One start of a job, followed on the client's loop: placed, opened, polled, concluded."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from distributed import Client, Future

from ddp_core._agent import AgentSpec, unpack
from ddp_core._failures import error_from
from ddp_core._output import Output
from ddp_core._placement import place
from ddp_core._ranks import Rank
from ddp_core._submit import (
    agent_key,
    are_held,
    ask,
    fail_pending,
    future_error,
    gather,
    lend,
    outlive,
    settle,
    submit_agents,
)
from ddp_core._watch import Watch, patiently
from ddp_core.errors import DDPCoreError, JobCancelledError, ResultError
from ddp_core.options import LaunchOptions

logger = logging.getLogger("ddp_core")

_TELL_S = 30.0
_INPROC = (
    "the cluster lives in this process; its scheduler cannot be reached from the processes of the "
    "ranks, where distributed.Client() would start a cluster of its own: if they need Dask, use "
    "LocalCluster(processes=True)"
)
# An event loop keeps only weak references to its tasks.
_guards: set[asyncio.Task[None]] = set()
_CANCELLED = {"kind": "cancelled", "text": "cancelled by Job.cancel()"}


@dataclass(frozen=True)
class JobSpec:
    """What a job is, the same for all its attempts.

    ``decode``: whether each task's value is the plain result of a rank, for futures that are given
    away; else the results come to this process.
    """

    job_id: str
    name: str
    options: LaunchOptions
    payload: bytes
    decode: bool

    def __str__(self) -> str:
        return f"job {self.name} ({self.job_id})"


class Attempt:
    """One start of a job. Everything in it runs on the client's event loop.

    Attributes:
        plan: The ranks and their workers, once they are known.
        state: ``placing waiting starting running stopping``.
        states: What each rank does.
        futures: One per worker. These references keep the tasks alive; they are given up when the
            attempt has ended, or when everybody to whom ``begin`` has lent copies dropped them.
    """

    def __init__(self, client: Client, spec: JobSpec, number: int = 0) -> None:
        self.number = number
        self.plan: list[Rank] = []
        self.state = "placing"
        self.states: dict[int, str] = {}
        self.futures: list[Future[Any]] = []
        self._client = client
        self._spec = spec
        self._id = f"{spec.job_id}/{number}"
        self._stopped = asyncio.Event()
        self._view: dict[str, Any] = {}
        self._output = Output(spec.options.logs)

    async def begin(self, before: int | None = None) -> list[Future[Any]]:
        """Place the ranks and submit the agents.

        Args:
            before: World size of the attempt that failed.

        Returns:
            When the job decodes its results, copies of the futures, for its owner: the tasks live
            as long as these do. Else nothing.

        Raises:
            DDPCoreError: There are too few workers, or the job was cancelled meanwhile.
            ValueError: ``workers`` names one that does not exist.
        """
        self.plan = await self._place(before)
        if self.plan[0].worker.startswith("inproc:"):
            logger.warning("%s: %s", self._spec, _INPROC)
        agents = range(self.plan[-1].agent + 1)
        specs = [
            AgentSpec(
                self._spec.job_id,
                self.number,
                agent,
                tuple(r for r in self.plan if r.agent == agent),
                self._spec.options,
                self._spec.decode,
            )
            for agent in agents
        ]
        try:
            self._view = await ask(self._client, "open", **self._described(specs))
            self.futures = submit_agents(self._client, specs, self._spec.payload)
        except BaseException:
            await self._close()
            raise
        self.state = "waiting"
        return lend(self.futures) if self._spec.decode else []

    async def follow(self) -> list[Any]:
        """Watch the attempt to its end and return the results in rank order, or raise the cause."""
        watch = Watch(self._spec.options)
        try:
            view = self._view
            while view["state"] != "ended" and not watch.is_hopeless(view):
                await self._tend(view, watch)
                view = await ask(
                    self._client,
                    "poll",
                    job_attempt=self._id,
                    seen=view["version"],
                    within_s=watch.left_s(),
                )
                self._note(view)
            return await self._conclude(view)
        except Exception as exc:
            error = self._translated(exc)
            fail_pending(self.futures, error)
            if error is exc:
                raise
            raise error from exc
        finally:
            # What is kept here occupies the memory of workers.
            self.futures = []
            self._output.close()
            await self._close()

    async def cancel(self) -> None:
        """Ask every rank to stop."""
        self._stopped.set()
        if self.state != "placing":
            await self._stop(_CANCELLED)

    async def _place(self, before: int | None) -> list[Rank]:
        """The plan, unless the job is cancelled while it waits for workers."""
        placing = asyncio.ensure_future(place(self._client, self._spec.options, before))
        stopped = asyncio.ensure_future(self._stopped.wait())
        try:
            await asyncio.wait({placing, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if self._stopped.is_set():
                raise JobCancelledError(f"{self._spec}: {_CANCELLED['text']}")
            return placing.result()
        finally:
            placing.cancel()
            stopped.cancel()

    def _described(self, specs: list[AgentSpec]) -> dict[str, Any]:
        """The attempt as the coordinator wants to know it."""
        agents = [
            {
                "worker": s.ranks[0].worker,
                "host": s.ranks[0].host,
                "key": agent_key(s),
                "ranks": [r.rank for r in s.ranks],
            }
            for s in specs
        ]
        return {
            "job": self._spec.job_id,
            "attempt": self.number,
            "owner": self._client.id,
            "name": f"{self._spec.name} ({self._spec.job_id})",
            "agents": agents,
        }

    async def _tend(self, view: dict[str, Any], watch: Watch) -> None:
        """Do what the present moment asks for."""
        if self._spec.decode and self.futures and not are_held(self._client, self.futures):
            # Nobody can ask for the results any more. If no other task needs them either, the
            # scheduler forgets them, which the coordinator takes for a cancellation.
            self.futures = []
        if watch.is_late(view) and view["state"] == "waiting":
            watch.blockers = await ask(self._client, "blockers", job_attempt=self._id)
        if failure := watch.check(view) or self._agent_failure(view):
            await self._stop(failure)
        if watch.has_stalled(view):
            await ask(self._client, "want_stacks", job_attempt=self._id)
        if watch.should_say(view):
            if view["state"] == "waiting":
                watch.blockers = await ask(self._client, "blockers", job_attempt=self._id)
            logger.warning("%s %s", self._spec, watch.why(view))
        for text in watch.silences(view):
            logger.warning("%s: %s", self._spec, text)
        if self._stopped.is_set() and not view["cause"]:
            await self._stop(_CANCELLED)

    async def _conclude(self, view: dict[str, Any]) -> list[Any]:
        cause = view["cause"]
        if cause is None and not await patiently(settle(self.futures, _TELL_S), self._say_late):
            cause = {"kind": "worker-lost", "text": "a worker went before it delivered its results"}
        if cause is None and self._spec.decode:
            guard = asyncio.create_task(outlive(self.futures), name=f"ddp-results-{self._id}")
            _guards.add(guard)
            guard.add_done_callback(_guards.discard)
            return []
        if cause is None:
            return await self._results()
        error = error_from(
            cause,
            job_id=self._spec.job_id,
            attempt=self.number,
            others=tuple(view["others"]),
        )
        await settle(self.futures, 1.0 if cause["kind"] == "worker-lost" else 2.0)
        fail_pending(self.futures, error)
        if not self._spec.decode:
            error.results.update(await self._kept())
        raise error

    async def _results(self) -> list[Any]:
        try:
            return await self._gathered()
        except DDPCoreError as exc:
            exc.job_id, exc.attempt = self._spec.job_id, self.number
            raise

    async def _gathered(self) -> list[Any]:
        gathered = await patiently(gather(self._client, self.futures), self._say_late)
        packed = {r: data for part in gathered for r, data in part.results.items()}
        del gathered
        values, error = await unpack_all(packed)
        if error is not None:
            raise error
        return [values[rank.rank] for rank in self.plan]

    async def _kept(self) -> dict[int, Any]:
        """What ranks had returned before the job failed."""
        kept: dict[int, Any] = {}
        for future in self.futures:
            if future.status != "finished":
                continue
            try:
                gathered = await asyncio.wait_for(gather(self._client, [future]), _TELL_S)
                values, error = await unpack_all(gathered[0].results)
                kept.update(values)
                if error is not None:
                    raise error
            except Exception as exc:  # noqa: BLE001 - the job's own failure matters more
                logger.warning("%s: a result is lost: %r", self._spec, exc)
        return kept

    def _agent_failure(self, view: dict[str, Any]) -> dict[str, Any] | None:
        """The failure of a task that never became an agent, as where ddp_core is not installed."""
        if view["cause"] is not None or view["state"] != "waiting":
            return None
        for future in self.futures:
            if future.status == "error":
                error = future_error(future)
                is_import = isinstance(error, ImportError)
                remedy = "; install the same ddp-core there as here" if is_import else ""
                return {"kind": "setup", "text": f"an agent could not start: {error!r}{remedy}"}
        return None

    def _say_late(self) -> None:
        logger.warning("%s waits for the results of its ranks to arrive", self._spec)

    async def _stop(self, failure: dict[str, Any]) -> None:
        try:
            await ask(self._client, "stop", job_attempt=self._id, failure=failure)
        except (OSError, TimeoutError, RuntimeError) as exc:
            logger.warning("%s: cannot reach the scheduler: %s", self._spec, exc)

    async def _close(self) -> None:
        try:
            await asyncio.wait_for(ask(self._client, "close", job_attempt=self._id), 5)
        except (OSError, TimeoutError, ValueError, RuntimeError) as exc:
            logger.debug("%s: not closed: %s", self._spec, exc)

    def _note(self, view: dict[str, Any]) -> None:
        if view["state"] != "ended":
            self.state = view["state"]
        self._output.show(view.get("lines", ()), view.get("n_lines", 0))
        self.states = {int(r): str(s["state"]) for r, s in view.get("ranks", [])}

    def _translated(self, exc: Exception) -> Exception:
        """The error for what was raised, which may only be the end of the client."""
        is_closed = self._client.status in ("closed", "closing")
        if is_closed and isinstance(exc, OSError | ValueError | RuntimeError):
            return JobCancelledError(f"{self._spec}: its client was closed")
        return exc


async def unpack_all(packed: dict[int, bytes]) -> tuple[dict[int, Any], ResultError | None]:
    """Unpickle results; the values by rank, and an error if some cannot be unpickled here.

    In a thread of its own: they may be large, and what runs is the user's code. ``packed`` is empty
    afterwards, so that nothing is in memory twice for long.
    """

    def work() -> tuple[dict[int, Any], ResultError | None]:
        values: dict[int, Any] = {}
        error: ResultError | None = None
        for rank in sorted(packed):
            try:
                values[rank] = unpack(packed.pop(rank), rank)
            except ResultError as exc:
                error = error or exc
        if error is not None:
            error.results.update(values)
        return values, error

    executor = ThreadPoolExecutor(1, thread_name_prefix="ddp-unpack")
    try:
        return await asyncio.get_running_loop().run_in_executor(executor, work)
    finally:
        executor.shutdown(wait=False)
