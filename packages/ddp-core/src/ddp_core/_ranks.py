"""The plan: which worker runs which ranks. Pure, so that it is tested without a cluster."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from ddp_core.errors import NotEnoughWorkersError


@dataclass(frozen=True)
class WorkerInfo:
    """A Dask worker as the scheduler knows it."""

    address: str
    host: str
    name: str
    busy: bool = False


@dataclass(frozen=True)
class Rank:
    """One rank of a plan. ``agent`` numbers the worker among those of the job."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    n_nodes: int
    agent: int
    host: str
    worker: str


def workers_of(
    identity: Mapping[str, Any], busy: Iterable[str] = (), gone: Iterable[str] = ()
) -> list[WorkerInfo]:
    """The running workers in a scheduler's ``identity(n_workers=-1)``.

    Args:
        identity: What the scheduler answered.
        busy: Addresses of workers that another job holds.
        gone: Addresses of workers that do not answer, though the scheduler still counts them.
    """
    taken, lost = set(busy), set(gone)
    return [
        WorkerInfo(address, host_of(address), str(info.get("name", address)), address in taken)
        for address, info in identity["workers"].items()
        if info.get("status", "running") == "running" and address not in lost
    ]


def host_of(address: str) -> str:
    """The host in a worker's address; workers inside this process live on the loopback."""
    if address.startswith("inproc:"):
        return "127.0.0.1"
    return urlsplit(address).hostname or address


def host_port(host: str, port: int | str) -> str:
    """``host:port``, with the brackets that an IPv6 address needs."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def choose_workers(
    workers: Sequence[WorkerInfo], wanted: Sequence[str | int] | None
) -> list[WorkerInfo]:
    """The workers that ``wanted`` names by address, name or host; all when it is ``None``.

    Raises:
        ValueError: When an entry names no worker, with what there is.
    """
    if wanted is None:
        return list(workers)
    chosen: dict[str, WorkerInfo] = {}
    for entry in wanted:
        text = str(entry)
        bare = text.split("://", 1)[-1]
        found = [w for w in workers if w.address == text or w.address.split("://")[-1] == bare]
        found = found or [w for w in workers if w.name == text]
        found = found or [w for w in workers if w.host == text]
        if not found:
            there = ", ".join(f"{w.name} ({w.address})" for w in workers) or "none"
            raise ValueError(f"workers: no worker is called {entry!r}; there are: {there}")
        chosen.update((w.address, w) for w in found)
    return list(chosen.values())


def plan_ranks(
    workers: Sequence[WorkerInfo], n_ranks: int | None = None, ranks_per_worker: int = 1
) -> list[Rank]:
    """Number the ranks host by host, workers of a host in natural order, rank 0 first.

    When fewer workers are needed than there are, those that no other job holds come first, then
    those that keep the ranks on few hosts.

    Raises:
        NotEnoughWorkersError: When the workers cannot hold ``n_ranks``.
    """
    n_ranks = len(workers) * ranks_per_worker if n_ranks is None else n_ranks
    needed = -(-n_ranks // ranks_per_worker)
    if not n_ranks or needed > len(workers):
        there = ", ".join(w.address for w in workers) or "none"
        raise NotEnoughWorkersError(
            f"{n_ranks or 'at least 1'} ranks need {needed or 1} workers "
            f"({ranks_per_worker} per worker), running: {len(workers)} ({there}); "
            "start more workers (of an adaptive cluster: cluster.adapt(minimum=…), for only tasks "
            "make it grow), ask for fewer ranks (n_ranks=, ranks_per_worker=) or wait longer "
            "(wait_timeout_s=)"
        )
    used = sorted(_cheapest(workers, needed), key=_place)
    hosts = list(dict.fromkeys(w.host for w in used))
    slots = [(a, w) for a, w in enumerate(used) for _ in range(ranks_per_worker)][:n_ranks]
    sizes = {host: sum(w.host == host for _, w in slots) for host in hosts}
    seen: dict[str, int] = {}
    ranks = []
    for number, (agent, worker) in enumerate(slots):
        local = seen[worker.host] = seen.get(worker.host, -1) + 1
        ranks.append(
            Rank(
                rank=number,
                world_size=n_ranks,
                local_rank=local,
                local_world_size=sizes[worker.host],
                node_rank=hosts.index(worker.host),
                n_nodes=len(hosts),
                agent=agent,
                host=worker.host,
                worker=worker.address,
            )
        )
    return ranks


def device_indices(visible: Sequence[tuple[str, str | None]]) -> list[int]:
    """Which of the CUDA devices that it sees each rank takes.

    dask-cuda gives every worker of a host its own rotation of ``CUDA_VISIBLE_DEVICES``, so that
    the first one is its own; plain workers of a host all see the same list and take turns. Both
    follow from one rule: a rank's index is the number of earlier ranks on its host that see the
    same list.

    Args:
        visible: Host and ``CUDA_VISIBLE_DEVICES`` of each rank, in rank order.
    """
    seen: dict[tuple[str, str | None], int] = {}
    indices = []
    for place in visible:
        indices.append(seen.get(place, 0))
        seen[place] = indices[-1] + 1
    return indices


def _cheapest(workers: Sequence[WorkerInfo], needed: int) -> list[WorkerInfo]:
    free: dict[str, int] = {}
    for worker in workers:
        free[worker.host] = free.get(worker.host, 0) + (not worker.busy)
    ordered = sorted(workers, key=lambda w: (w.busy, -min(free[w.host], needed), _place(w)))
    return ordered[:needed]


def _place(worker: WorkerInfo) -> tuple[Any, ...]:
    return natural(worker.host), natural(worker.name), natural(worker.address)


def natural(text: str) -> tuple[tuple[int, int, str], ...]:
    """A sort key under which ``w10`` comes after ``w9``."""
    parts = re.split(r"(\d+)", text)
    return tuple((0, int(p), "") if p.isdigit() else (1, 0, p) for p in parts if p)
