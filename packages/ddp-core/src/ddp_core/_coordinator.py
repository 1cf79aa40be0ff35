"""The gang's referee, a plugin of the Dask scheduler: who runs, who is lost, what failed first.

The scheduler is the one place that sees every job, every worker and every client, and sees at once
when one of them goes. This module is sent there by value, so the scheduler need not have ddp_core
installed; of this package it may import only what ``travels`` with it.

A job waits until a task of it (an agent) runs on each of its workers. Then it is granted its
workers, unless another job holds one of them. Agents of different jobs reach every worker in the
same order, because a job's agents are submitted in one graph; hence no two jobs can wait for each
other.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from types import ModuleType
from typing import Any

from distributed.diagnostics.plugin import SchedulerPlugin

from ddp_core._gang import Agent, Job
from ddp_core._silence import Silence

PROTOCOL = 1
HANDLER = f"ddp_core_{PROTOCOL}"

# A rank whose peer has gone reports an error of the connection, often before the peer's own
# failure arrives. Such a report waits this long for a better cause.
SETTLE_S = 1.0
POLL_S = 3.0
LOOK_S = 0.5
_WITH_IT = ("ddp_core._gang", "ddp_core._knock", "ddp_core._silence")
WEAK = ("comm", "aborted")


class Coordinator(SchedulerPlugin):
    """Keeps the jobs. Runs on the scheduler's event loop, so nothing here needs a lock."""

    name = f"ddp-core-{PROTOCOL}"
    idempotent = True

    def __init__(self) -> None:
        self.jobs: dict[str, Job] = {}
        self.keys: dict[str, str] = {}
        self.leaving: set[str] = set()
        self.scheduler: Any = None
        self.beat: Any = None
        self.silence: Any = None

    async def start(self, scheduler: Any) -> None:
        """Install the one handler through which clients and agents talk."""
        self.scheduler = scheduler
        self.silence = Silence(scheduler)
        scheduler.handlers[HANDLER] = self.handle

    async def close(self) -> None:
        """Stop looking for silent workers."""
        if self.beat is not None:
            self.beat.cancel()
        self.silence.close()

    async def handle(self, verb: str, **given: Any) -> Any:
        """Dispatch one call from a client or an agent."""
        answer = getattr(self, f"op_{verb}")(**given)
        return await answer if asyncio.iscoroutine(answer) else answer

    # What clients ask

    def op_open(
        self, job: str, attempt: int, owner: str, name: str, agents: list[dict[str, Any]]
    ) -> dict[str, Any]:
        """Register an attempt before its agents are submitted."""
        team = [Agent(a["worker"], a["host"], a["key"], list(a["ranks"])) for a in agents]
        record = Job(job, attempt, owner, name, team)
        self.jobs[record.id] = record
        self.keys.update((a.key, record.id) for a in team)
        for agent in team:
            if agent.worker not in self.scheduler.workers or agent.worker in self.leaving:
                self._lose(record, agent, "it left before the job was submitted")
        if self.beat is None or self.beat.done():
            self.beat = asyncio.create_task(self._watch_silence(), name="ddp-core-silence")
        return self._full(record)

    async def op_survey(self) -> dict[str, list[str]]:
        """The workers that jobs hold or wait for, and those that cannot be counted on.

        These leave because the cluster is restarted, or their host does not answer.
        """
        jobs = [job for job in self.jobs.values() if job.state != "ended"]
        silent = await self.silence.gone()
        return {
            "busy": sorted(set().union(*(job.workers for job in jobs))),
            "gone": sorted(self.leaving.union(silent)),
        }

    def op_stop(self, job_attempt: str, failure: dict[str, Any]) -> None:
        """End the attempt for a reason that the client found: cancelled, too late, stalled."""
        if (job := self.jobs.get(job_attempt)) is not None:
            self._fail(job, failure)

    def op_want_stacks(self, job_attempt: str) -> None:
        """Ask the agents where their ranks are."""
        if (job := self.jobs.get(job_attempt)) is not None:
            job.want_stacks = True
            job.touch(phase=True)

    def op_close(self, job_attempt: str) -> None:
        """Forget an attempt."""
        job = self.jobs.pop(job_attempt, None)
        if job is None:
            return
        for agent in job.agents:
            self.keys.pop(agent.key, None)
        if job.state != "ended":
            job.cause = job.cause or {"kind": "cancelled", "text": "the job was closed"}
            job.state = "ended"
            job.touch(phase=True)
        self._grant()

    def op_blockers(self, job_attempt: str) -> list[str]:
        """Who keeps the attempt waiting, worker by worker, for people to read."""
        job = self.jobs.get(job_attempt)
        if job is None:
            return []
        said = []
        for agent in job.agents:
            holder = next(
                (j for j in self.jobs.values() if j.holds and agent.worker in j.workers), None
            )
            if holder:
                said.append(f"{agent.worker} runs job {holder.name}")
            elif not agent.joined and agent.worker in self.scheduler.workers:
                tasks = [
                    ts.key
                    for ts in self.scheduler.workers[agent.worker].processing
                    if ts.key != agent.key
                ]
                said.append(
                    f"{agent.worker} runs {', '.join(map(str, tasks[:3])) or 'nothing yet'}"
                )
        return said

    # What agents say

    def op_join(
        self,
        job_attempt: str,
        agent: int,
        worker: str,
        visible: str | None,
    ) -> dict[str, Any]:
        """An agent runs. Refused when the attempt is over or Dask has run the task again."""
        job = self.jobs.get(job_attempt)
        if job is None:
            return {"refused": "its client has gone, or the job is over"}
        member = job.agents[agent]
        if job.state in ("stopping", "ended") or member.gone or member.joined:
            why = "Dask ran this task a second time" if member.joined else "the job has failed"
            return {"refused": why, **job.view(full=False)}
        if member.worker != worker:
            self._lose(job, member, f"its task was moved to {worker}")
            return {"refused": "Dask moved the task", **job.view(full=False)}
        member.joined, member.visible, member.heard = True, visible, time.monotonic()
        if all(a.joined for a in job.agents):
            job.joined_at = time.monotonic()
        job.touch()
        self._grant()
        return job.view(full=False)

    def op_post(
        self,
        job_attempt: str,
        agent: int,
        ranks: list[Any] = (),  # type: ignore[assignment]
        address: list[Any] | None = None,
    ) -> None:
        """News of an agent: states of its ranks, or the rendezvous address."""
        job = self.jobs.get(job_attempt)
        if job is None:
            return
        job.agents[agent].heard = time.monotonic()
        if address is not None:
            job.address = address
        for rank, news in ranks:
            job.ranks[rank].update(news)
            if news.get("state") == "returned" and rank not in job.returned:
                job.returned.append(rank)
        job.touch()
        self._advance(job)

    def op_fail(self, job_attempt: str, agent: int, failure: dict[str, Any]) -> None:
        """A rank failed. The first good reason becomes the cause."""
        if (job := self.jobs.get(job_attempt)) is not None:
            job.agents[agent].heard = time.monotonic()
            self._fail(job, failure)

    def op_log(self, job_attempt: str, agent: int, lines: list[Any]) -> None:
        """Lines that ranks have printed, on their way to the client."""
        if (job := self.jobs.get(job_attempt)) is not None:
            job.agents[agent].heard = time.monotonic()
            job.lines.extend(lines)
            job.n_lines += len(lines)
            job.touch()

    def op_leave(self, job_attempt: str, agent: int) -> None:
        """An agent has no process left."""
        if (job := self.jobs.get(job_attempt)) is not None:
            job.agents[agent].gone = True
            self._maybe_end(job)

    async def op_poll(
        self,
        job_attempt: str,
        seen: int,
        agent: int | None = None,
        within_s: float = POLL_S,
    ) -> dict[str, Any]:
        """Wait a few seconds for something newer than ``seen``, then tell how things are."""
        job = self.jobs.get(job_attempt)
        if job is None:
            cause = {"kind": "cancelled", "text": "the scheduler no longer knows the job"}
            return {"state": "ended", "version": seen, "phase": seen, "cause": cause, "others": []}
        if agent is not None:
            job.agents[agent].heard = time.monotonic()
        deadline = time.monotonic() + min(POLL_S, within_s)
        while seen == (job.version if agent is None else job.phase):
            left = deadline - time.monotonic()
            if left <= 0:
                break
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(job.changed.wait(), left)
        return job.view(full=False) if agent is not None else self._full(job)

    # What the scheduler sees

    def remove_worker(self, scheduler: Any, worker: str, **_: Any) -> None:  # noqa: ARG002
        """A worker is gone: so is every rank on it."""
        self.leaving.discard(worker)
        for job in list(self.jobs.values()):
            for agent in job.agents:
                if agent.worker == worker and job.state != "ended":
                    self._lose(job, agent, "the scheduler lost its connection or removed it")

    def remove_client(self, scheduler: Any, client: str) -> None:  # noqa: ARG002
        """A client is gone: its jobs end, and nobody will close those that have ended."""
        for job in list(self.jobs.values()):
            if job.client != client:
                continue
            if job.state == "ended":
                self.op_close(job.id)
            else:
                job.orphan = True
                self._fail(job, {"kind": "cancelled", "text": "the client that owned it went away"})
                self._maybe_end(job)

    def transition(self, key: Any, start: str, finish: str, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """A future that the client gave up is a cancelled job.

        Unless Dask has given it up, which restarts the cluster and says so in the same step of the
        event loop: hence not before the next one.
        """
        if finish == "forgotten" and key in self.keys:
            job = self.jobs[self.keys[key]]
            agent = next(a for a in job.agents if a.key == key)
            asyncio.get_running_loop().call_soon(self._drop, job, agent)

    def restart(self, scheduler: Any) -> None:
        """Somebody restarts the cluster: every worker that it has now is about to go."""
        self.leaving = set(scheduler.workers)
        text = "its workers are lost: the cluster was restarted (Client.restart)"
        for job in list(self.jobs.values()):
            self._fail(job, {"kind": "worker-lost", "text": text})

    def valid_workers_downscaling(self, scheduler: Any, workers: list[Any]) -> list[Any]:  # noqa: ARG002
        """Keep an adaptive cluster from taking away a worker that trains."""
        held = set().union(*(j.workers for j in self.jobs.values() if j.state != "ended"))
        return [w for w in workers if w.address not in held]

    # How a job moves on

    def _full(self, job: Job) -> dict[str, Any]:
        return {**job.view(full=True), "silent": self.silence.told(job)}

    def _grant(self) -> None:
        """Give workers to the jobs that are complete, in the order in which they became so."""
        taken: set[str] = set()
        for job in self.jobs.values():
            if job.holds:
                taken |= job.workers
        ready = [j for j in self.jobs.values() if j.state == "waiting" and j.joined_at is not None]
        for job in sorted(ready, key=lambda j: j.joined_at or 0.0):
            if not (job.workers & taken):
                job.state = "starting"
                job.touch(phase=True)
            # A complete job reserves its workers even while it waits: nobody overtakes it.
            taken |= job.workers

    def _advance(self, job: Job) -> None:
        here = {r for r, news in job.ranks.items() if news["state"] == "running"}
        if job.state == "starting" and not job.go and job.address and "device" in _common(job):
            job.go = True
            cuda = all(str(r["device"]).startswith("cuda") for r in job.ranks.values())
            job.backend = "nccl" if cuda else "gloo"
            job.touch(phase=True)
        if job.state == "starting" and len(here.union(job.returned)) == len(job.ranks):
            job.state = "running"
            job.touch(phase=True)
        if job.state in ("starting", "running") and job.have_returned(job.ranks):
            job.state = "stopping"
            job.touch(phase=True)

    def _lose(self, job: Job, agent: Agent, how: str) -> None:
        agent.gone = True
        text = f"worker {agent.worker} is lost: {how}"
        where = {"rank": agent.ranks[0], "host": agent.host, "worker": agent.worker}
        self._fail(job, {"kind": "worker-lost", **where, "text": text})
        self._maybe_end(job)

    def _drop(self, job: Job, agent: Agent) -> None:
        """The task of an agent is no longer wanted."""
        if job.state == "ended":
            return
        if not agent.joined:
            agent.gone = True
        if not job.have_returned(agent.ranks):
            self._fail(job, {"kind": "cancelled", "text": "its futures were cancelled or dropped"})
        self._maybe_end(job)

    def _fail(self, job: Job, failure: dict[str, Any]) -> None:
        weak = failure["kind"] in WEAK
        if job.state == "ended":
            return
        if job.cause is None:
            failure["returned_first"] = list(job.returned)
            job.cause = failure
            if job.state == "stopping":
                job.touch(phase=True)
            elif weak:
                asyncio.get_running_loop().call_later(SETTLE_S, self._stop, job)
            else:
                self._stop(job)
            return
        settling = job.state != "stopping"
        if settling and not weak and job.cause["kind"] in WEAK:
            job.others.append(_line(job.cause))
            job.cause = failure
            self._stop(job)
        elif failure["kind"] != "cancelled" and len(job.others) < 32:
            job.others.append(_line(failure))

    def _stop(self, job: Job) -> None:
        if job.state in ("stopping", "ended"):
            return
        # A job that was waiting has started nothing: its agents only have to leave.
        job.state = "stopping"
        for agent in job.agents:
            agent.gone = agent.gone or not agent.joined
        job.touch(phase=True)
        self._maybe_end(job)

    def _maybe_end(self, job: Job) -> None:
        if job.state == "stopping" and all(a.gone for a in job.agents):
            job.state = "ended"
            job.touch(phase=True)
            if job.orphan:
                self.op_close(job.id)
            self._grant()

    async def _watch_silence(self) -> None:
        """Lose agents that stopped talking. Ends when there are no jobs."""
        while self.jobs:
            await self.silence.sleep(LOOK_S)
            for job in list(self.jobs.values()):
                for agent in job.agents:
                    if agent.gone or job.state == "ended":
                        continue
                    if why := self.silence.why_lost(agent):
                        self._lose(job, agent, why)


def travels() -> list[ModuleType]:
    """The modules that go to the scheduler by value with a ``Coordinator``."""
    return [sys.modules[name] for name in (__name__, *_WITH_IT)]


def _common(job: Job) -> set[str]:
    return set.intersection(*(set(r) for r in job.ranks.values()))


def _line(failure: dict[str, Any]) -> str:
    """One line about a failure; most texts already begin with the rank."""
    rank, text = failure.get("rank"), str(failure["text"])
    if rank is None:
        return f"job: {text}"[:500]
    return (text if text.startswith(f"rank {rank} ") else f"rank {rank}: {text}")[:500]
