"""The records that the coordinator keeps of a job and of its agents.

Goes to the scheduler by value: it must import nothing of this package.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from typing import Any

# Lines that wait for a slow client; older ones are dropped, and counted.
LOG_LINES = 2000


class Agent:
    """One task of a job, on one worker, with one or more ranks.

    ``answers``: it is silent, but its host answered when it was knocked at.
    """

    def __init__(self, worker: str, host: str, key: str, ranks: list[int]) -> None:
        self.worker = worker
        self.host = host
        self.key = key
        self.ranks = ranks
        self.joined = False
        self.gone = False
        self.heard = 0.0
        self.answers = False
        self.visible: str | None = None


class Job:
    """One attempt of a job. ``state``: waiting, starting, running, stopping, ended."""

    def __init__(self, job: str, attempt: int, client: str, name: str, agents: list[Agent]) -> None:
        self.id = f"{job}/{attempt}"
        self.client = client
        self.name = name
        self.agents = agents
        self.ranks = {r: {"state": "queued"} for a in agents for r in a.ranks}
        self.state = "waiting"
        self.joined_at: float | None = None
        self.address: list[Any] | None = None
        self.go = False
        self.want_stacks = False
        self.backend: str | None = None
        self.cause: dict[str, Any] | None = None
        self.others: list[str] = []
        self.returned: list[int] = []
        self.lines: deque[list[Any]] = deque(maxlen=LOG_LINES)
        self.n_lines = 0
        self.orphan = False
        self.version = 0
        self.phase = 0
        self.changed = asyncio.Event()

    @property
    def workers(self) -> set[str]:
        """Addresses of the workers that the job needs or holds."""
        return {a.worker for a in self.agents}

    @property
    def holds(self) -> bool:
        """Whether the job has been granted its workers and not yet left them."""
        return self.state in ("starting", "running", "stopping")

    def have_returned(self, ranks: Iterable[int]) -> bool:
        """Whether the function has returned in all of these ranks."""
        return set(ranks) <= set(self.returned)

    def touch(self, *, phase: bool = False) -> None:
        """Wake everyone who waits for news; agents only care for a new phase."""
        self.version += 1
        self.phase += phase
        self.changed.set()
        self.changed = asyncio.Event()

    def view(self, *, full: bool) -> dict[str, Any]:
        """What a waiting client (``full``) or agent is told."""
        shown = {
            "state": self.state,
            "version": self.version,
            "phase": self.phase,
            "address": self.address,
            "go": self.go,
            "want_stacks": self.want_stacks,
            "backend": self.backend,
            "cause": self.cause,
            "others": self.others,
        }
        if full:
            shown["lines"], shown["n_lines"] = list(self.lines), self.n_lines
            self.lines.clear()
            shown["ranks"] = [[r, dict(s)] for r, s in self.ranks.items()]
            shown["missing"] = [a.worker for a in self.agents if not a.joined]
        elif self.holds:
            shown["visible"] = [[r, a.host, a.visible] for a in self.agents for r in a.ranks]
        return shown
