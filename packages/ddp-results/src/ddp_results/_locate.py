"""Find the Dask scheduler from wherever a handler is used."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import dask
from distributed.client import default_client
from distributed.security import Security
from distributed.worker import Worker, get_worker


@dataclass(frozen=True, slots=True)
class SchedulerAddress:
    """Where the scheduler listens, and how to speak to it.

    Attributes:
        address: such as `tcp://10.0.0.1:8786`.
        security: TLS settings; None for the ones of the Dask configuration.
        role: whose certificate to show, `client` or `worker`.
    """

    address: str
    security: Security | None = None
    role: str = "client"

    def __repr__(self) -> str:  # never print keys
        return f"SchedulerAddress({self.address!r})"

    @property
    def is_in_another_process(self) -> bool:
        """Whether it is an `inproc://host/pid/n` address of another process."""
        if not self.address.startswith("inproc://"):
            return False
        return self.address.removeprefix("inproc://").split("/")[1] != str(os.getpid())

    def connection_args(self) -> dict[str, Any]:
        """Return the keyword arguments of `distributed.rpc`."""
        security = Security() if self.security is None else self.security  # type: ignore[no-untyped-call]
        args: dict[str, Any] = security.get_connection_args(self.role)  # type: ignore[no-untyped-call]
        return args


def locate(carried: SchedulerAddress | None = None) -> SchedulerAddress | None:
    """Return the scheduler as this process should see it, or None if there is none.

    In this order: the worker whose task runs here; the `scheduler-address` of the Dask
    configuration (a rank in a child process); the only worker in this process (a plain thread);
    the address that the pickled handler carries; the client of this process. The worker comes
    before the client's view because the two may reach the scheduler by different addresses.
    """
    return _of_task() or _of_config() or _of_only_worker() or carried or of_client()


def is_worker_process() -> bool:
    """Whether a Dask worker runs in this process."""
    return bool(list(Worker._instances))


def of_client() -> SchedulerAddress | None:
    """Return the scheduler of this process's default Dask client, if it has one."""
    try:
        client = default_client()  # type: ignore[no-untyped-call]
    except ValueError:
        return None
    return of_clients([client])


def of_clients(clients: Iterable[Any]) -> SchedulerAddress | None:
    """Return the scheduler of these clients; one that is closed has none.

    Raises:
        ValueError: if there are several.
    """
    found = {
        client.scheduler.address: client
        for client in clients
        if getattr(client, "scheduler", None) is not None
    }
    if len(found) > 1:
        raise ValueError(
            f"the futures belong to several Dask clusters ({', '.join(sorted(found))}): call"
            " process_results for each cluster, with a handler and a folder of its own"
        )
    for address, client in found.items():
        return SchedulerAddress(address, client.security)
    return None


def _of_task() -> SchedulerAddress | None:
    try:
        worker = get_worker()
    except ValueError:
        return None
    return _of_worker(worker)


def _of_config() -> SchedulerAddress | None:
    address = dask.config.get("scheduler-address", None)
    return SchedulerAddress(address) if address else None


def _of_only_worker() -> SchedulerAddress | None:
    workers = list(Worker._instances)
    return _of_worker(workers[0]) if len(workers) == 1 else None


def _of_worker(worker: Any) -> SchedulerAddress:
    return SchedulerAddress(worker.scheduler.address, worker.security, role="worker")
