"""From what was seen of a cluster to findings, each failure with its remedy. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddp_core._ranks import WorkerInfo, host_port

_SHOWN = 4


@dataclass(frozen=True)
class Finding:
    """The outcome of one check. ``remedy`` is empty when ``is_good``."""

    check: str
    is_good: bool
    found: str
    remedy: str = ""


def check_workers(info: Mapping[str, Any], workers: Sequence[WorkerInfo]) -> Finding:
    """Whether there are workers at all, in a scheduler's ``identity``."""
    hosts = {w.host for w in workers}
    found = f"{len(workers)} running on {len(hosts)} hosts, {len(info['workers'])} known"
    return Finding("workers", bool(workers), found, "" if workers else "start workers")


def check_answers(seen: Mapping[str, object]) -> Finding:
    """Whether each worker has answered; ``seen`` has an exception for one that has not."""
    silent = {a: exc for a, exc in seen.items() if isinstance(exc, Exception)}
    if not silent:
        return Finding("answers", True, f"from all {len(seen)} workers")
    remedy = (
        "its process is stopped, or a task there holds the interpreter's lock: restart it, or "
        "leave it out with workers="
    )
    return Finding("answers", False, _first(silent), remedy)


def check_versions(
    own: Mapping[str, str],
    workers: Mapping[str, Mapping[str, str]],
    scheduler: Mapping[str, str],
) -> Iterator[Finding]:
    """Every package here, on the workers, and on the scheduler where it matters there."""
    for name, version in own.items():
        others = {address: seen[name] for address, seen in workers.items()}
        # A rank does not run on the scheduler, which needs neither torch nor this package.
        if name in ("python", "dask", "distributed"):
            others["scheduler"] = scheduler[name]
        yield compare_versions(name, version, others)


def compare_versions(name: str, own: str, others: Mapping[str, str]) -> Finding:
    """One package here and elsewhere.

    Python must agree in its first two numbers. A build for another device (``+cu128``) is the same
    version: where the client runs there may be no GPU.
    """

    def significant(version: str) -> str:
        if name == "python":
            return ".".join(version.split(".")[:2])
        return version.split("+")[0]

    differing = {a: v for a, v in others.items() if significant(v) != significant(own)}
    if not differing:
        return Finding(name, True, own)
    shown = ", ".join(f"{a}: {v}" for a, v in list(differing.items())[:_SHOWN])
    missing = [a for a, v in differing.items() if v == "-"]
    remedy = f"install {name} {own} on {', '.join(missing[:_SHOWN]) or 'all of them'}"
    return Finding(name, False, f"{own} here; {shown}", remedy)


def check_threads(info: Mapping[str, Any]) -> Finding:
    """Whether each worker has a thread for an agent."""
    counts = {w["nthreads"] for w in info["workers"].values()}
    found = f"{', '.join(map(str, sorted(counts)))} per worker"
    return Finding("threads", 0 not in counts, found, "" if 0 not in counts else "give one thread")


def check_port(host: str, port: int | Exception, seen: Mapping[str, object]) -> Finding:
    """Whether every worker has reached a port of rank 0's host.

    Args:
        host: Rank 0's.
        port: Where it listened, or why it could not.
        seen: Of each worker the empty string, or why it could not connect.
    """
    if isinstance(port, Exception):
        remedy = "the worker must listen on an address of its own host (dask worker --host)"
        return Finding("port", False, f"no port on {host}: {port!r}", remedy)
    bad = {address: why for address, why in seen.items() if why != ""}
    reached = f"reached from {len(seen) - len(bad)} of {len(seen)} workers"
    found = f"{host_port(host, port)} {reached}"
    if not bad:
        return Finding("port", True, found)
    remedy = f"open the ports of {host} for its peers, or choose one with port="
    return Finding("port", False, f"{found}; {_first(bad)}", remedy)


def check_devices(seen: Mapping[str, object]) -> Finding:
    """Whether torch works on each worker and sees as many devices on all."""
    broken = {a: text for a, text in seen.items() if not str(text)[:1].isdigit()}
    if broken:
        return Finding("devices", False, _first(broken), "repair torch on that worker")
    kinds = sorted(set(map(str, seen.values())))
    found = ", ".join(f"{k.split()[0]} CUDA devices (nccl: {k.split()[1]})" for k in kinds)
    remedy = "" if len(kinds) == 1 else "choose the like with workers=, or pass backend='gloo'"
    return Finding("devices", len(kinds) == 1, found, remedy)


def check_imports(what: str, seen: Mapping[str, object]) -> Finding:
    """Whether every worker can import a module of the user's."""
    bad = {address: text for address, text in seen.items() if text != ""}
    if not bad:
        return Finding(f"import {what}", True, f"on all {len(seen)} workers")
    module = what.partition(":")[0]
    remedy = f"install {module} on the workers, or client.upload_file(...)"
    return Finding(f"import {what}", False, _first(bad), remedy)


def _first(bad: Mapping[str, object]) -> str:
    """The first of what is wrong, and how many more there are."""
    address, why = next(iter(bad.items()))
    more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
    return f"{address}: {why}{more}"
