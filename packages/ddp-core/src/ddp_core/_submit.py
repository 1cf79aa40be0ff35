"""What the client asks of Dask: the coordinator, the agents, their futures.

This is the only module that touches the insides of a Dask client.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence
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
        with _by_value, contextlib.ExitStack() as stack:
            for module in _coordinator.travels():
                cloudpickle.register_pickle_by_value(module)
                stack.callback(cloudpickle.unregister_pickle_by_value, module)
            return cloudpickle.loads, (cloudpickle.dumps(_coordinator.Coordinator()),)


def install_coordinator(client: Client) -> None:
    """Make sure that the scheduler has the coordinator. Blocks for one round trip."""
    client.register_plugin(_Shipped())


async def ask(client: Client, op: str, /, **given: Any) -> Any:
    """One call to the coordinator.

    Raises:
        OSError: The client is closed, or cannot reach the scheduler.
    """
    return await getattr(_scheduler(client), _coordinator.HANDLER)(verb=op, **given)


async def identity(client: Client) -> dict[str, Any]:
    """What the scheduler knows of all its workers; ``scheduler_info()`` has told of five only."""
    answer: dict[str, Any] = await _scheduler(client).identity(n_workers=-1)
    return answer


async def run_on_each(
    client: Client,
    workers: Sequence[str],
    function: Callable[..., Any],
    arguments: Sequence[Any],
    bound_s: float,
) -> dict[str, Any]:
    """Call a function in each worker's process.

    Returns:
        The answer of each worker. For one that raised, has gone, or has not answered within
        ``bound_s``: the exception.
    """

    async def one(address: str) -> Any:
        call = _untyped(client)._run(function, *arguments, workers=[address], on_error="return")
        try:
            return (await asyncio.wait_for(call, bound_s))[address]
        except TimeoutError:
            return TimeoutError(f"no answer within {bound_s:g} s")
        except Exception as exc:  # noqa: BLE001 - it is the answer
            return exc

    return dict(zip(workers, await asyncio.gather(*map(one, workers)), strict=True))


async def run_on_scheduler(client: Client, function: Callable[[], Any], bound_s: float) -> Any:
    """Call a function in the scheduler's process, waiting so long for its answer."""
    return await asyncio.wait_for(_untyped(client)._run_on_scheduler(function), bound_s)


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


def lend(futures: Sequence[Future[Any]]) -> list[Future[Any]]:
    """Copies of futures, each of which Dask counts as one more holder of its task."""
    return [Future(future.key, future.client) for future in futures]


def are_held(client: Client, futures: Sequence[Future[Any]]) -> bool:
    """Whether anybody but the caller holds one of the futures, or a copy of it."""
    counts = _untyped(client).refcount
    return any(counts.get(future.key, 0) > 1 for future in futures)


async def settle(futures: Sequence[Future[Any]], bound_s: float) -> bool:
    """Wait until Dask has told the end of each of the futures; False when time is over."""
    if not futures:
        return True
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


def _scheduler(client: Client) -> Any:
    if client.scheduler is None:
        raise ConnectionError("the client is closed")
    return client.scheduler


def _state(future: Future[Any]) -> Any:
    return future._state


def _untyped(client: Client) -> Any:
    return client
