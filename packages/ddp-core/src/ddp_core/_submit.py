"""What the client asks of Dask: the coordinator, the agents, their futures.

This is the only module that touches the insides of a Dask client.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Sequence
from typing import Any

import cloudpickle
from dask.base import annotate
from dask.delayed import delayed
from distributed import Client, Future
from distributed.diagnostics.plugin import SchedulerPlugin

from ddp_core import _coordinator
from ddp_core._agent import AgentSpec, run_agent

_by_value = threading.Lock()


class _Shipped(SchedulerPlugin):
    """Unpickles on the scheduler as the coordinator, whose code travels along."""

    name = _coordinator.Coordinator.name
    idempotent = True

    def __reduce__(self) -> tuple[Any, ...]:
        with _by_value:
            cloudpickle.register_pickle_by_value(_coordinator)
            try:
                return cloudpickle.loads, (cloudpickle.dumps(_coordinator.Coordinator()),)
            finally:
                cloudpickle.unregister_pickle_by_value(_coordinator)


def install_coordinator(client: Client) -> None:
    """Make sure that the scheduler has the coordinator. Blocks for one round trip."""
    client.register_plugin(_Shipped())


async def ask(client: Client, op: str, /, **given: Any) -> Any:
    """One call to the coordinator."""
    return await getattr(client.scheduler, _coordinator.HANDLER)(verb=op, **given)


async def identity(client: Client) -> dict[str, Any]:
    """What the scheduler knows of all its workers; ``scheduler_info()`` has told of five only."""
    scheduler: Any = client.scheduler
    answer: dict[str, Any] = await scheduler.identity(n_workers=-1)
    return answer


def agent_key(spec: AgentSpec) -> str:
    """The key of an agent's task. Its beginning marks our tasks in a worker."""
    return f"ddp-agent-{spec.job_id}-{spec.attempt}-{spec.agent}"


def submit_agents(client: Client, specs: Sequence[AgentSpec], payload: bytes) -> list[Future[Any]]:
    """Submit all agents of a job in one graph, each pinned to its worker.

    One graph, because then the scheduler and every worker see the agents of two jobs in the same
    order, without which they could wait for each other for ever.
    """
    tasks = []
    for spec in specs:
        with annotate(workers=[spec.ranks[0].worker], allow_other_workers=False, retries=0):
            tasks.append(
                delayed(run_agent, pure=False, traverse=False)(
                    spec, payload, dask_key_name=agent_key(spec)
                )
            )
    return list(_untyped(client).compute(tasks, optimize_graph=False))


async def settle(futures: Sequence[Future[Any]], bound_s: float) -> bool:
    """Wait until Dask has told the end of each of the futures; False when time is over."""
    waits = [asyncio.ensure_future(_state(f).wait()) for f in futures]
    try:
        _, late = await asyncio.wait(waits, timeout=bound_s)
    finally:
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
    return not late


async def gather(client: Client, futures: Sequence[Future[Any]]) -> list[Any]:
    """The values of finished futures."""
    return list(await _untyped(client)._gather(list(futures)))


def fail_pending(futures: Sequence[Future[Any]], error: BaseException) -> None:
    """End futures whose task will never run, as Dask leaves them when their worker is lost."""
    for future in futures:
        if future.status in ("pending", "lost"):
            with contextlib.suppress(AttributeError):
                _state(future).set_error(error, None)


def future_error(future: Future[Any]) -> BaseException | None:
    """The exception of a future that has failed; does not block."""
    error: BaseException | None = _state(future).exception
    return error


def _state(future: Future[Any]) -> Any:
    return future._state


def _untyped(client: Client) -> Any:
    return client
