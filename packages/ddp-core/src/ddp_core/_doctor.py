"""Checks, before a job, of what usually breaks one; each failure with its remedy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle
from distributed import Client

from ddp_core import _probe
from ddp_core._ranks import WorkerInfo, plan_ranks, workers_of
from ddp_core._submit import identity, install_coordinator

_REACH_S = 5.0


@dataclass(frozen=True)
class Finding:
    """The outcome of one check. ``remedy`` is empty when ``is_good``."""

    check: str
    is_good: bool
    found: str
    remedy: str = ""


def examine(client: Client, modules: Sequence[str] = ()) -> Iterator[Finding]:
    """Run the checks one after the other, from the cheapest on.

    Args:
        client: Connected to the cluster.
        modules: Modules that the training function needs.
    """
    untyped: Any = client
    info = untyped.sync(identity, client)
    workers = workers_of(info)
    yield _check_workers(info, workers)
    if not workers:
        return
    cloudpickle.register_pickle_by_value(_probe)
    try:
        everywhere = dict(client.run(_probe.versions))
        yield from _check_versions(everywhere, untyped.run_on_scheduler(_probe.versions))
        yield _check_coordinator(client)
        yield _check_threads(info)
        yield _check_port(client, workers)
        yield _check_devices(dict(client.run(_probe.devices)))
        for module in modules:
            yield check_imports(module, dict(client.run(_probe.imports, module)))
    finally:
        cloudpickle.unregister_pickle_by_value(_probe)


def _check_workers(info: Mapping[str, Any], workers: Sequence[WorkerInfo]) -> Finding:
    hosts = {w.host for w in workers}
    found = f"{len(workers)} running on {len(hosts)} hosts, {len(info['workers'])} known"
    return Finding("workers", bool(workers), found, "" if workers else "start workers")


def _check_versions(
    workers: Mapping[str, Mapping[str, str]], scheduler: Mapping[str, str]
) -> Iterator[Finding]:
    here = _probe.versions()
    for name, own in here.items():
        others = {address: seen[name] for address, seen in workers.items()}
        # A rank does not run on the scheduler, which needs neither torch nor this package.
        if name in ("python", "dask", "distributed"):
            others["scheduler"] = scheduler[name]
        yield compare_versions(name, own, others)


def compare_versions(name: str, own: str, others: Mapping[str, str]) -> Finding:
    """One package here and elsewhere. Python must agree in its first two numbers."""

    def significant(version: str) -> str:
        return ".".join(version.split(".")[:2]) if name == "python" else version

    differing = {a: v for a, v in others.items() if significant(v) != significant(own)}
    if not differing:
        return Finding(name, True, own)
    shown = ", ".join(f"{a}: {v}" for a, v in list(differing.items())[:4])
    missing = [a for a, v in differing.items() if v == "-"]
    remedy = f"install {name} {own} on {', '.join(missing[:4]) or 'all of them'}"
    return Finding(name, False, f"{own} here; {shown}", remedy)


def _check_coordinator(client: Client) -> Finding:
    try:
        install_coordinator(client)
    except Exception as exc:  # noqa: BLE001 - every reason is a finding
        remedy = "allow pickle on the scheduler (distributed.scheduler.pickle)"
        return Finding("coordinator", False, repr(exc), remedy)
    return Finding("coordinator", True, "the scheduler accepts it")


def _check_threads(info: Mapping[str, Any]) -> Finding:
    counts = {w["nthreads"] for w in info["workers"].values()}
    found = f"{', '.join(map(str, sorted(counts)))} per worker"
    return Finding("threads", 0 not in counts, found, "" if 0 not in counts else "give one thread")


def _check_port(client: Client, workers: Sequence[WorkerInfo]) -> Finding:
    first = plan_ranks(workers)[0]
    try:
        ports = client.run(
            _probe.listen, first.host, len(workers), _REACH_S, workers=[first.worker]
        )
    except Exception as exc:  # noqa: BLE001 - every reason is a finding
        remedy = "the worker must listen on an address of its own host (dask worker --host)"
        return Finding("port", False, f"no port on {first.host}: {exc!r}", remedy)
    port = ports[first.worker]
    answers = client.run(_probe.reach, first.host, port, _REACH_S)
    bad = {address: why for address, why in answers.items() if why}
    found = f"{first.host}:{port} reached from {len(answers) - len(bad)} of {len(answers)} workers"
    if not bad:
        return Finding("port", True, found)
    address, why = next(iter(bad.items()))
    remedy = f"open the ports of {first.host} for its peers, or choose one with port="
    return Finding("port", False, f"{found}; {address}: {why}", remedy)


def _check_devices(seen: Mapping[str, str]) -> Finding:
    broken = {a: text for a, text in seen.items() if not text[:1].isdigit()}
    if broken:
        address, text = next(iter(broken.items()))
        return Finding("devices", False, f"{address}: {text}", "repair torch on that worker")
    kinds = sorted(set(seen.values()))
    found = ", ".join(f"{k.split()[0]} CUDA devices (nccl: {k.split()[1]})" for k in kinds)
    remedy = "" if len(kinds) == 1 else "choose the like with workers=, or pass backend='gloo'"
    return Finding("devices", len(kinds) == 1, found, remedy)


def check_imports(module: str, seen: Mapping[str, str]) -> Finding:
    """Whether every worker can import a module of the user's."""
    bad = {address: text for address, text in seen.items() if text != "ok"}
    if not bad:
        return Finding(f"import {module}", True, f"on all {len(seen)} workers")
    address, text = next(iter(bad.items()))
    remedy = f"install {module} on the workers, or client.upload_file(...)"
    return Finding(f"import {module}", False, f"{address}: {text}", remedy)


def report(findings: Iterator[Finding], write: Callable[[str], object]) -> bool:
    """Write a table as the checks go on; True when all are good."""
    good = True
    for finding in findings:
        good = good and finding.is_good
        mark = "ok  " if finding.is_good else "FAIL"
        write(f"{mark}  {finding.check:<16}  {finding.found}")
        if not finding.is_good:
            write(f"      {'':<16}  -> {finding.remedy}")
    return good
