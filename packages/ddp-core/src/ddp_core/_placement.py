"""Wait for workers and plan the ranks on them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from distributed import Client

from ddp_core._ranks import Rank, choose_workers, plan_ranks, workers_of
from ddp_core._submit import ask, identity
from ddp_core.errors import NotEnoughWorkersError
from ddp_core.options import LaunchOptions

logger = logging.getLogger("ddp_core")

SAY_AFTER_S = 10.0
_LOOK_EVERY_S = 0.25
# A worker that its nanny starts again is back in a few seconds; after that a job whose size was
# left open continues with those that are there.
_RESPAWN_S = 10.0


async def place(client: Client, options: LaunchOptions, before: int | None = None) -> list[Rank]:
    """The plan for one attempt.

    Args:
        client: Connected to the cluster.
        options: Says which workers and how many ranks.
        before: World size of the attempt that failed.

    Raises:
        NotEnoughWorkersError: When ``wait_timeout_s`` ends with too few workers.
        ValueError: When ``workers`` names one that does not exist.
    """
    began = time.monotonic()
    say_at = SAY_AFTER_S
    while True:
        waited = time.monotonic() - began
        survey = await ask(client, "survey")
        workers = workers_of(await identity(client), survey["busy"], survey["gone"])
        n_ranks = options.n_ranks
        if n_ranks is None and before is not None and waited < _RESPAWN_S:
            n_ranks = before
        try:
            chosen = choose_workers(workers, options.workers)
            return plan_ranks(chosen, n_ranks, options.ranks_per_worker)
        except ValueError:
            if before is None or waited > options.wait_timeout_s:
                raise
        except NotEnoughWorkersError as exc:
            if waited > options.wait_timeout_s:
                raise NotEnoughWorkersError(
                    f"after {waited:.0f} s: {_explain(exc, options, survey['gone'])}"
                ) from None
            if waited > say_at:
                say_at *= 2
                logger.warning("waiting for workers: %s", _explain(exc, options, survey["gone"]))
        await asyncio.sleep(_LOOK_EVERY_S)


def _explain(exc: NotEnoughWorkersError, options: LaunchOptions, gone: Sequence[str]) -> str:
    """The error, and why workers that somebody may see were not counted."""
    parts = [str(exc)]
    if options.workers is not None:
        parts.append(f"counted are those that workers={list(options.workers)!r} names")
    if gone:
        parts.append(f"not counted, because they are leaving or do not answer: {', '.join(gone)}")
    return "; ".join(parts)
