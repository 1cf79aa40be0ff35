"""Run PyTorch DistributedDataParallel ranks on a Dask cluster.

A *rank* is a process of one training job, numbered from 0; the *world size* is how many there are.
Each rank is a child process of a Dask *worker*, started and watched by an *agent*, which is an
ordinary Dask task pinned to that worker. A *node* is a host, the *local rank* a rank's number on
its host. The ranks meet at a *rendezvous*, a store that the agent of rank 0 hosts, and form a
*process group*, inside which the user's function is called. A *gang* is all agents of a job: its
ranks start when all of them run, and when one fails all of them end. A *coordinator* in the
scheduler keeps the gangs apart and decides which failure came first. An *attempt* is one start of
a job, from 0.

    job = launch(client, train, args=("s3://bucket/train",), options=LaunchOptions(n_ranks=4))
    results = job.result()

Names are loaded when they are used, so that a rank process need not import Dask.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddp_core._current import CurrentRank, current_rank
    from ddp_core._job import Job, jobs
    from ddp_core._launch import launch, run
    from ddp_core.errors import (
        DDPCoreError,
        GangTimeoutError,
        JobCancelledError,
        JobStalledError,
        NotEnoughWorkersError,
        NotInRankError,
        RankFailedError,
        RemoteTraceback,
        RendezvousError,
        ResultError,
        WorkerLostError,
    )
    from ddp_core.options import LaunchOptions

__version__ = "0.3.0"

__all__ = [
    "CurrentRank",
    "DDPCoreError",
    "GangTimeoutError",
    "Job",
    "JobCancelledError",
    "JobStalledError",
    "LaunchOptions",
    "NotEnoughWorkersError",
    "NotInRankError",
    "RankFailedError",
    "RemoteTraceback",
    "RendezvousError",
    "ResultError",
    "WorkerLostError",
    "current_rank",
    "jobs",
    "launch",
    "run",
]

_HOMES = {
    "CurrentRank": "_current",
    "current_rank": "_current",
    "Job": "_job",
    "jobs": "_job",
    "LaunchOptions": "options",
    "launch": "_launch",
    "run": "_launch",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = importlib.import_module(f"{__name__}.{_HOMES.get(name, 'errors')}")
    value = globals()[name] = getattr(home, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
