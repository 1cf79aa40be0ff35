"""What the client asks of Dask: the coordinator, the agents, their futures.

This is the only module that touches the insides of a Dask client.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle
from dask.base import annotate
from dask.delayed import delayed
from distributed import Client, Future
from distributed.diagnostics.plugin import SchedulerPlugin

from ddp_core import _coordinator
from ddp_core._agent import AgentSpec, run_agent
from ddp_core.errors import JobCancelledError, WorkerLostError

# A value that Dask cannot fetch at once may only be on a worker that is slow to answer.
_LOST_S = 2.0
_LOOK_S = 0.5
_LOST = "a worker has gone, and with it a result that nobody had fetched"

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

    One graph, of a generation of its own, because then every worker runs the agents of two jobs in
    the same order, without which they could wait for each other for ever.
    """
    tasks = []
    for spec in specs:
        with annotate(workers=[spec.ranks[0].worker], allow_other_workers=False, retries=0):
            tasks.append(
                delayed(run_agent, pure=False, traverse=False)(
                    spec, payload, dask_key_name=agent_key(spec)
                )
            )
    return list(_untyped(client).compute(tasks, optimize_graph=False, fifo_timeout=0))


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
    """The values of finished futures.

    Raises:
        WorkerLostError: A value went with its worker; Dask would wait for it for ever.
        JobCancelledError: A future was cancelled.
    """
    work = asyncio.ensure_future(_untyped(client)._gather(list(futures)))
    seen = time.monotonic()
    error: Exception = WorkerLostError(_LOST)
    try:
        while time.monotonic() - seen < _LOST_S:
            if (await asyncio.wait({work}, timeout=_LOOK_S))[0]:
                return list(work.result())
            if not any(future.status in ("pending", "lost") for future in futures):
                seen = time.monotonic()
    except concurrent.futures.CancelledError as exc:
        match getattr(exc, "reason", ""):
            case "scheduler-connection-lost":
                raise
            case "scheduler-restart":
                error = WorkerLostError(f"{_LOST}: the cluster was restarted")
            case _:
                error = JobCancelledError("its futures were cancelled")
    finally:
        work.cancel()
        # The frame of an error lives as long as it does, and a value as long as its future.
        del work, futures
    raise error


async def outlive(futures: Sequence[Future[Any]]) -> None:
    """Fail finished futures whose value goes with its worker; Dask would wait for it for ever.

    Holds none of them, and returns when the client has none of them any more.
    """
    client = _untyped(futures[0].client)
    states = {future.key: _state(future) for future in futures}
    del futures
    missing: dict[Any, float] = {}
    while states := {k: s for k, s in states.items() if client.futures.get(k) is s}:
        await asyncio.sleep(_LOOK_S)
        now = time.monotonic()
        gone = [k for k, s in states.items() if s.status in ("pending", "lost")]
        missing = {key: missing.get(key, now) for key in gone}
        for key, since in missing.items():
            if now - since > _LOST_S:
                states[key].set_error(WorkerLostError(_LOST), None)


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
