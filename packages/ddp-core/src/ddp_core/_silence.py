"""Who has said nothing for how long, and which of the silent must be lost.

Goes to the scheduler by value: of this package it may import only what goes with it.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from distributed.scheduler import heartbeat_interval

from ddp_core._gang import Agent, Job
from ddp_core._knock import Knocker

# After so long without a word from an agent its worker is knocked at: lost when nobody answers,
# else kept for longer, since another task there may hold the interpreter's lock.
SILENCE_S = 12.0
MUTE_S = 300.0
# When the scheduler's own loop was late by so much, silence says nothing about the agents.
STOOD_STILL_S = 2.0
# A worker that has missed so many heartbeats is knocked at before it gets a rank.
MISSED_BEATS = 4


class Silence:
    """Listens to the agents of all jobs, and to Dask's heartbeats. Lives on the scheduler's loop.

    Args:
        scheduler: Dask's.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._knocker = Knocker()
        self._awake = 0.0

    def close(self) -> None:
        """Stop knocking."""
        self._knocker.close()

    async def sleep(self, seconds: float) -> None:
        """Sleep, and learn from how long it took whether this loop stood still."""
        before = time.monotonic()
        await asyncio.sleep(seconds)
        if time.monotonic() - before > seconds + STOOD_STILL_S:
            # What the agents said meanwhile is still unread.
            self._awake = time.monotonic()

    async def gone(self) -> list[str]:
        """The workers that send no heartbeat and whose host does not answer."""
        late = [w for w in self._scheduler.workers if self._unheard_s(w) > self._patience_s()]
        answers = await asyncio.gather(*map(self._knocker.knock, late))
        return [worker for worker, why in zip(late, answers, strict=True) if why]

    def why_lost(self, agent: Agent) -> str:
        """Why a silent agent must be gone; the empty string while it may be there."""
        silent_s = self._silent_s(agent)
        if silent_s < (SILENCE_S if agent.joined else max(SILENCE_S, self._patience_s())):
            agent.answers = False
            return ""
        knock = self._knocker.knock(agent.worker)
        if not knock.done():
            return ""
        why, agent.answers = knock.result(), not knock.result()
        if not why and agent.joined and silent_s > MUTE_S:
            why = "another task may have held the interpreter's lock all this time"
        return why and f"no word from it for {silent_s:.0f} s, {why}"

    def told(self, job: Job) -> list[str]:
        """What the owner of a job should know of its silent workers."""
        return [
            f"worker {a.worker} has said nothing for {self._silent_s(a):.0f} s, but its host "
            "answers: another task may hold the interpreter's lock"
            for a in job.agents
            if a.answers and not a.gone
        ]

    def _silent_s(self, agent: Agent) -> float:
        """How long an agent, or the worker that has not yet begun to run it, has said nothing."""
        if not agent.joined:
            return self._unheard_s(agent.worker)
        return time.monotonic() - max(agent.heard, self._awake)

    def _patience_s(self) -> float:
        """How long a healthy worker may send no heartbeat: on large clusters they are rare."""
        return MISSED_BEATS * float(heartbeat_interval(len(self._scheduler.workers)))

    def _unheard_s(self, worker: str) -> float:
        """How long a worker has sent no heartbeat to the scheduler."""
        state = self._scheduler.workers.get(worker)
        unheard_s = 0.0 if state is None else time.time() - state.last_seen
        return min(unheard_s, time.monotonic() - self._awake)
