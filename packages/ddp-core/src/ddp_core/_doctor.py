"""Checks, before a job, of what usually breaks one."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

import cloudpickle
from distributed import Client, Security
from distributed.comm import core

from ddp_core import _checks, _probe
from ddp_core._checks import Finding
from ddp_core._ranks import plan_ranks, workers_of
from ddp_core._submit import identity, install_coordinator, run_on_each, run_on_scheduler

_ANSWER_S = 10.0
_REACH_S = 5.0
# Importing torch from a slow network file system takes this long.
_IMPORT_S = 120.0


def examine(client: Client, modules: Sequence[str] = ()) -> Iterator[Finding]:
    """Run the checks one after the other, from the cheapest on.

    Every check has a bound. A worker that does not answer is a finding, and the others go on
    without it.

    Args:
        client: Connected to the cluster.
        modules: Modules, or functions as ``module:function``, that the training needs.

    Raises:
        OSError: The scheduler has gone, or does not answer (``TimeoutError``).
    """
    info = _sync(client, _known, client)
    workers = workers_of(info)
    yield _checks.check_workers(info, workers)
    if not workers:
        return
    cloudpickle.register_pickle_by_value(_probe)
    try:
        addresses = [w.address for w in workers]
        seen = _ask(client, addresses, _probe.versions)
        yield _checks.check_answers(seen)
        there = {a: v for a, v in seen.items() if not isinstance(v, Exception)}
        if there:
            own = _probe.versions()
            scheduler = _sync(client, run_on_scheduler, client, _probe.versions, _ANSWER_S)
            yield from _checks.check_versions(own, there, scheduler)
        yield _check_coordinator(client)
        yield _checks.check_threads(info)
        if there:
            yield from _check_from_inside(client, [w for w in workers if w.address in there])
        for module in modules if there else ():
            found = _ask(client, list(there), _probe.imports, module, _IMPORT_S, more_s=_IMPORT_S)
            yield _checks.check_imports(module, found)
    finally:
        cloudpickle.unregister_pickle_by_value(_probe)


def find_scheduler(address: str) -> Finding | None:
    """Why no scheduler answers at ``address``, said sooner than Dask would; else ``None``.

    Dask waits without end for the greeting of whoever accepts its connection.
    """
    parts = urlsplit(address if "://" in address else f"tcp://{address}")
    with contextlib.suppress(ValueError):
        if parts.scheme not in ("tcp", "tls") or parts.port is None or not parts.hostname:
            return None
        try:
            socket.create_connection((parts.hostname, parts.port), _REACH_S).close()
            asyncio.run(_greet(address))
        except (OSError, TypeError) as exc:  # TypeError: no certificates configured for tls://
            return no_scheduler(address, exc)
        return None
    return no_scheduler(address, ValueError("that is no address such as tcp://host:8786"))


def no_scheduler(address: str, why: Exception) -> Finding:
    """The finding that the scheduler cannot be reached."""
    text = str(why).strip().splitlines()
    remedy = "is it running, and is its port open from here?"
    return Finding("scheduler", False, f"{address}: {text[0] if text else why!r}", remedy)


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


async def _greet(address: str) -> None:
    security: Any = Security
    connect: Any = core.connect
    arguments = security().get_connection_args("client")
    try:
        reached = await asyncio.wait_for(connect(address, _REACH_S, **arguments), _ANSWER_S)
    except TimeoutError:
        raise TimeoutError(
            f"it accepts connections, and has not greeted within {_ANSWER_S:g} s"
        ) from None
    await reached.close()


async def _known(client: Client) -> dict[str, Any]:
    try:
        return await asyncio.wait_for(identity(client), _ANSWER_S)
    except TimeoutError:
        raise TimeoutError(f"no answer within {_ANSWER_S:g} s") from None


def _check_coordinator(client: Client) -> Finding:
    try:
        install_coordinator(client)
    except Exception as exc:  # noqa: BLE001 - every reason is a finding
        remedy = "allow pickle on the scheduler (distributed.scheduler.pickle)"
        return Finding("coordinator", False, repr(exc), remedy)
    return Finding("coordinator", True, "the scheduler accepts it")


def _check_from_inside(client: Client, workers: Sequence[Any]) -> Iterator[Finding]:
    """What only the workers can see: the port of rank 0, and devices."""
    first = plan_ranks(workers)[0]
    addresses = [w.address for w in workers]
    bound_s = 2 * _REACH_S + _ANSWER_S
    opened = _ask(client, [first.worker], _probe.listen, first.host, len(workers), bound_s)
    port = opened[first.worker]
    is_open = isinstance(port, int)
    answers = (
        _ask(client, addresses, _probe.reach, first.host, port, _REACH_S, more_s=_REACH_S)
        if is_open
        else {}
    )
    yield _checks.check_port(first.host, port, answers)
    yield _checks.check_devices(
        _ask(client, addresses, _probe.devices, _IMPORT_S, more_s=_IMPORT_S)
    )


def _ask(
    client: Client,
    workers: Sequence[str],
    probe: Callable[..., Any],
    *arguments: Any,
    more_s: float = 0.0,
) -> dict[str, Any]:
    """The answer of each worker, or an exception."""
    found: dict[str, Any] = _sync(
        client, run_on_each, client, workers, probe, arguments, _ANSWER_S + more_s
    )
    return found


def _sync(client: Client, function: Callable[..., Any], *arguments: Any) -> Any:
    untyped: Any = client
    return untyped.sync(function, *arguments)
