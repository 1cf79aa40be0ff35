"""Whether ranks still do something: they use the processor, or they print."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping

import psutil

from ddp_core._logs import RankLogs
from ddp_core._process import ChildProcess

# Blocked threads wake now and then; less than this share of one processor is nothing.
_IDLE_SHARE = 0.05


class Activity:
    """Measures how long each rank of an agent has been idle. Used by one thread.

    Args:
        timeout_s: The option ``stall_timeout_s``; ``None`` measures nothing.
    """

    def __init__(self, timeout_s: float | None) -> None:
        self._period_s = None if timeout_s is None else min(1.0, timeout_s / 4)
        self._looked = time.monotonic()
        self._used: dict[int, tuple[float, int]] = {}
        self._active: dict[int, float] = {}

    def look(
        self, processes: Mapping[int, ChildProcess], logs: RankLogs | None
    ) -> dict[int, float]:
        """Seconds of idleness by rank, once in a period; empty between."""
        now = time.monotonic()
        if self._period_s is None or now - self._looked < self._period_s:
            return {}
        floor = _IDLE_SHARE * (now - self._looked)
        self._looked = now
        for rank, process in processes.items():
            used = (_cpu_s(process.pid), logs.n_bytes(rank) if logs is not None else 0)
            before = self._used.get(rank, (-1.0, 0))
            if used[0] - before[0] > floor or used[1] != before[1]:
                self._active[rank] = now
            self._used[rank] = used
        return {rank: now - self._active.get(rank, now) for rank in processes}


def _cpu_s(pid: int | None) -> float:
    """Processor time of a process and those below it."""
    total = 0.0
    if pid is None:
        return total
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        for one in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                times = one.cpu_times()
                total += float(times.user + times.system)
    return total
