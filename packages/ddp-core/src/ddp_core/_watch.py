"""The clock of a running attempt: what has taken too long, and what its owner should know."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from ddp_core._placement import SAY_AFTER_S
from ddp_core._ranks import host_port
from ddp_core.options import LaunchOptions

# What an agent may need to say that it has left, beyond the grace of its ranks.
_LEAVE_S = 6.0
_STACKS_S = 3.0
_NOT_JOINED = ("queued", "starting", "ready")
_LISTED = 16


T = TypeVar("T")


class Watch:
    """The clock of one attempt: what has taken too long, and what is worth saying."""

    def __init__(self, options: LaunchOptions) -> None:
        self._options = options
        self._state = "waiting"
        self._since = time.monotonic()
        self._said = 0
        self._stalled_at = 0.0
        self._silent: dict[str, tuple[int, float]] = {}
        self.blockers: list[str] = []

    def is_late(self, view: dict[str, Any]) -> bool:
        """Whether the present state has lasted too long."""
        if view["state"] != self._state:
            self._state, self._since = view["state"], time.monotonic()
            self._said = 0
        return view["cause"] is None and self.left_s() <= 0

    def check(self, view: dict[str, Any]) -> dict[str, Any] | None:
        """The failure of an attempt whose time is over."""
        if not self.is_late(view):
            return self._stall(view)
        if self._state == "waiting":
            return {
                "kind": "gang-timeout",
                "text": f"the workers were not free after {self._options.start_timeout_s:g} s: "
                + ("; ".join(self.blockers) or f"no agent on {', '.join(view['missing'])}")
                + "; free these workers, choose others with workers=, or wait longer with "
                "start_timeout_s=",
            }
        address = view["address"]
        states = ", ".join(f"rank {r} {s['state']}" for r, s in view["ranks"][:64])
        return {
            "kind": "rendezvous",
            "text": f"no process group after {self._options.rendezvous_timeout_s:g} s: {states}; "
            f"store at {host_port(*address) if address else '(not yet known)'}; if the ranks only "
            "need longer to start, set rendezvous_timeout_s=",
        }

    def left_s(self) -> float:
        """Seconds until the present state has lasted too long."""
        bounds = {
            "waiting": self._options.start_timeout_s,
            "starting": self._options.rendezvous_timeout_s,
        }
        if self._stalled_at:
            return 0.5
        return self._since + bounds.get(self._state, 1e9) - time.monotonic()

    def should_say(self, view: dict[str, Any]) -> bool:
        """Whether the job has waited so long that its owner should know: after 10 s, 20 s, 40 s."""
        waited = time.monotonic() - self._since
        waits = view["state"] in ("waiting", "starting", "stopping")
        if (
            view["state"] == self._state
            and waits
            and waited > SAY_AFTER_S * (1 << self._said) - 0.1
        ):
            self._said += 1
            return True
        return False

    def why(self, view: dict[str, Any]) -> str:
        """For whom the job waits, to follow its name in a sentence."""
        if view["state"] == "waiting":
            return "waits for its workers: " + (
                "; ".join(self.blockers) or f"no agent on {', '.join(view['missing'])}"
            )
        states = {int(r): str(s["state"]) for r, s in view["ranks"]}
        if view["state"] == "starting":
            slow = [f"rank {r} is {s}" for r, s in states.items() if s in _NOT_JOINED]
            return "waits for the ranks to join: " + (_listed(slow) or "all have")
        there = [str(r) for r, s in states.items() if s not in ("left", "queued")]
        if not there:
            return "is stopping: its ranks have left, its workers have not said so"
        many = len(there) > 1
        return (
            f"is stopping: rank{'s' if many else ''} {_listed(there)} do{'' if many else 'es'} "
            "not exit"
        )

    def silences(self, view: dict[str, Any]) -> list[str]:
        """What to say of silent workers: each once, and again after 10 s, 20 s, 40 s…."""
        due, now = [], time.monotonic()
        texts = {re.sub(r"for \d+ s", "", text): text for text in view.get("silent", ())}
        self._silent = {about: said for about, said in self._silent.items() if about in texts}
        for about, text in texts.items():
            times, since = self._silent.get(about, (0, now))
            if not times or now - since > SAY_AFTER_S * (1 << (times - 1)):
                self._silent[about] = times + 1, since
                due.append(text)
        return due

    def has_stalled(self, view: dict[str, Any]) -> bool:
        """Whether no rank has made progress for ``stall_timeout_s``; said once."""
        bound = self._options.stall_timeout_s
        idle = [float(s.get("idle_s", 0)) for _, s in view.get("ranks", [])]
        if bound is None or self._stalled_at or view["state"] != "running":
            return False
        if not idle or min(idle) < bound:
            return False
        self._stalled_at = time.monotonic()
        return True

    def _stall(self, view: dict[str, Any]) -> dict[str, Any] | None:
        """The failure of a stalled job, as soon as the stacks are there or do not come."""
        if not self._stalled_at or view["cause"] is not None:
            return None
        stacks = {r: s["stacks"] for r, s in view["ranks"] if s.get("stacks")}
        if len(stacks) < len(view["ranks"]) and time.monotonic() - self._stalled_at < _STACKS_S:
            return None
        parts = [f"--- rank {r}\n{stacks.get(r, 'gave no stack')}" for r, _ in view["ranks"][:16]]
        idle_s = min(float(s.get("idle_s", 0)) for _, s in view["ranks"])
        return {
            "kind": "stalled",
            "text": f"no rank has used the processor or printed for {idle_s:.0f} s",
            "log": "\n".join(parts),
        }

    def is_hopeless(self, view: dict[str, Any]) -> bool:
        """Whether agents that should have left by now must be unreachable."""
        bound = self._options.grace_s + _LEAVE_S
        return (
            view["state"] == "stopping"
            and view["cause"] is not None
            and self._state == "stopping"
            and time.monotonic() - self._since > bound
        )


async def patiently(waiting: Coroutine[Any, Any, T], say: Callable[[], None]) -> T:
    """Await something, calling ``say`` after 10 s, 20 s, 40 s…."""
    task = asyncio.ensure_future(waiting)
    began, bound_s = time.monotonic(), SAY_AFTER_S
    try:
        while not (await asyncio.wait({task}, timeout=began + bound_s - time.monotonic()))[0]:
            say()
            bound_s *= 2
        return await task
    finally:
        task.cancel()


def _listed(texts: list[str]) -> str:
    shown = ", ".join(texts[:_LISTED])
    hidden = len(texts) - _LISTED
    return f"{shown} and {hidden} more" if hidden > 0 else shown
