"""The two calls that start a job: ``launch`` and, as in dask-pytorch-ddp, ``run``."""

from __future__ import annotations

import inspect
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import cloudpickle
from distributed import Client, Future

from ddp_core._attempt import JobSpec
from ddp_core._here import run_here
from ddp_core._job import Job
from ddp_core._submit import install_coordinator
from ddp_core.options import LaunchOptions, as_options

_RUN = "give a function that calls asyncio.run(...) on it"
_LAZY: tuple[tuple[Callable[[Any], bool], str, str], ...] = (
    (inspect.iscoroutinefunction, "a coroutine function", _RUN),
    (inspect.isasyncgenfunction, "an asynchronous generator function", _RUN),
    (inspect.isgeneratorfunction, "a generator function", "give a function that iterates over it"),
)


def launch(
    client: Client,
    fn: Callable[..., Any],
    *,
    args: Iterable[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    options: LaunchOptions | None = None,
) -> Job:
    """Start ``fn`` once per rank, each in a process of its own below a Dask worker.

    Blocks until there are enough workers; returns before the ranks run. Each call trains anew.
    With ``n_ranks=0`` it returns when ``fn`` has returned, and raises what ``fn`` raises.

    Args:
        client: A client of the cluster, not an asynchronous one.
        fn: Called as ``fn(*args, **kwargs)`` in each rank, inside a process group. Pickled with
            cloudpickle, so it may be a lambda, a closure or a function of a notebook.
        args: Its positional arguments; Dask futures among them are replaced by their results.
        kwargs: Its keyword arguments, likewise.
        options: Everything else.

    Raises:
        NotEnoughWorkersError: There are too few workers after ``wait_timeout_s``.
        TypeError: ``client``, ``fn``, ``args``, ``kwargs`` or ``options`` is something else, or
            cannot be pickled; ``fn`` is a coroutine or generator function.
        ValueError: ``options.workers`` names an unknown worker.
    """
    if isinstance(args, str | bytes) or not isinstance(args, Iterable):
        raise TypeError(f"args must be a tuple, not {args!r}; for one argument: args=({args!r},)")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise TypeError(f"kwargs must map names to arguments, not {kwargs!r}")
    given = tuple(args), dict(kwargs or {})
    return _launch(client, fn, *given, as_options(options), decode=False)[0]


def run(
    client: Client,
    fn: Callable[..., Any],
    *args: Any,
    backend: str | None = None,
    pass_local_rank: bool = False,
    **kwargs: Any,
) -> list[Future[Any]]:
    """Run ``fn(*args, **kwargs)`` on every worker; the call of dask-pytorch-ddp 0.2.2.

    Args:
        client: A client of the cluster.
        fn: The training function.
        *args: Its positional arguments.
        backend: Backend of the process group; ``None`` chooses by the devices there are.
        pass_local_rank: Whether ``fn`` gets ``local_rank=``.
        **kwargs: Its keyword arguments.

    Returns:
        One Dask future per rank, in rank order. Its result is what the rank returned. When the
        job fails, the futures of all ranks without a result raise the job's root cause. The job
        lives as long as they do: it ends when one is cancelled, or when the last is dropped and no
        other task needs its result.
    """
    options = LaunchOptions(backend=backend, pass_local_rank=pass_local_rank)
    return _launch(client, fn, args, kwargs, options, decode=True)[1]


def _launch(
    client: Client,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: LaunchOptions,
    *,
    decode: bool,
) -> tuple[Job, list[Future[Any]]]:
    _check(client, fn)
    args, kwargs = _gathered(client, args, kwargs)
    name = options.name or getattr(fn, "__qualname__", None) or type(fn).__name__
    options = replace(options, name=name)
    job_id = uuid.uuid4().hex[:12]
    if options.n_ranks == 0:
        value = run_here(fn, args, kwargs, options, job_id)
        return Job.finished(client, JobSpec(job_id, name, options, b"", decode), value), []
    try:
        payload = cloudpickle.dumps((fn, args, kwargs), protocol=5)
    except Exception as exc:
        raise TypeError(
            f"{name} and its arguments cannot be pickled for the ranks: {exc}; open files, locks, "
            "clients and CUDA tensors inside the function instead"
        ) from exc
    install_coordinator(client)
    job = Job(client, JobSpec(job_id, name, options, payload, decode))
    untyped: Any = client
    try:
        return job, untyped.sync(job.start)
    except BaseException:
        # Whoever interrupts the wait for workers has no other hold on the job.
        job.cancel()
        raise


def _gathered(
    client: Client, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Put the results of Dask futures into their places, as `client.submit` and 0.2.2 do."""
    if not any(isinstance(value, Future) for value in (*args, *kwargs.values())):
        return args, kwargs
    untyped: Any = client
    gathered_args, gathered_kwargs = untyped.gather((list(args), kwargs))
    return tuple(gathered_args), gathered_kwargs


def _check(client: Client, fn: Callable[..., Any]) -> None:
    if not isinstance(client, Client):
        raise TypeError(f"client must be a distributed.Client, not {type(client).__name__}")
    if client.asynchronous:
        raise TypeError(
            "launch blocks and needs a synchronous client: make a second one with "
            "Client(address), or call it in a thread"
        )
    if client.status in ("closed", "closing"):
        raise ValueError("the client is closed; make a new one")
    if not callable(fn):
        raise TypeError(f"fn must be callable, not {type(fn).__name__}")
    for is_lazy, kind, remedy in _LAZY:
        if is_lazy(fn) or is_lazy(type(fn).__call__):
            name = getattr(fn, "__qualname__", None) or repr(fn)
            raise TypeError(
                f"fn must train when it is called, but {name} is {kind}, of which a call runs "
                f"nothing: {remedy}"
            )
