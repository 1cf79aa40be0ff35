"""What a launch may be told, checked where the user writes it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from ddp_core.errors import DDPCoreError

Logs = Literal["stderr", "logger", "worker", "off"]
RestartOn = Literal["worker-lost", "any"]

_POSITIVE = (
    "wait_timeout_s",
    "start_timeout_s",
    "rendezvous_timeout_s",
    "pg_timeout_s",
    "stall_timeout_s",
    "exit_timeout_s",
)


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """How a job is placed, started, watched and ended. All times are seconds.

    Args:
        n_ranks: World size. ``None``: ``ranks_per_worker`` on every running worker. ``0``: run the
            function once in this process, in a group of one, for debugging.
        workers: Addresses, names or hosts of the workers to use. ``None``: all.
        ranks_per_worker: How many ranks each worker runs.
        backend: ``"nccl"``, ``"gloo"`` or another backend of ``init_process_group``. ``None``:
            ``nccl`` when every rank has a CUDA device, else ``gloo``.
        init_process_group: Whether the process group exists when the function is called.
            ``False`` for code that calls ``init_process_group`` itself, as under torchrun.
        pass_local_rank: Whether the function is called with ``local_rank=``.
        port: Port of the rendezvous on rank 0's host. ``0``: a free one.
        max_restarts: How often the whole job is started again after a failure.
        restart_on: Which failures restart it: the loss of a worker, or ``"any"``.
        wait_timeout_s: How long to wait for enough workers.
        start_timeout_s: How long to wait until the workers are free for this job.
        rendezvous_timeout_s: How long the ranks may take to form the process group.
        pg_timeout_s: torch's timeout of one collective.
        stall_timeout_s: Fail the job when no rank makes progress for so long. ``None``: never.
        grace_s: How long a rank that is asked to stop may run exit functions before SIGKILL.
        exit_timeout_s: How long a rank may take to leave after its function has returned.
        env: Environment variables set in every rank, over those of the worker.
        logs: Where what ranks print is shown: the client's ``"stderr"``, its ``"logger"``
            ``ddp_core.ranks``, the output of their Dask ``"worker"``, or nowhere (``"off"``).
        warm: Whether ranks are forked from a process that keeps torch loaded beside each worker,
            which makes all launches but the first fast. ``False``: a fresh interpreter for each.
        name: What the job is called in messages. ``None``: the function's name.

    Raises:
        ValueError: For a value out of range.
        TypeError: For a value of the wrong type.
    """

    n_ranks: int | None = None
    workers: Sequence[str | int] | None = None
    ranks_per_worker: int = 1
    backend: str | None = None
    init_process_group: bool = True
    pass_local_rank: bool = False
    port: int = 0
    max_restarts: int = 0
    restart_on: RestartOn | tuple[type[BaseException], ...] = "worker-lost"
    wait_timeout_s: float = 60
    start_timeout_s: float = 300
    rendezvous_timeout_s: float = 60
    pg_timeout_s: float = 600
    stall_timeout_s: float | None = None
    grace_s: float = 5
    exit_timeout_s: float = 60
    env: Mapping[str, str] = field(default_factory=dict)
    logs: Logs = "stderr"
    warm: bool = True
    name: str | None = None

    def __post_init__(self) -> None:
        for name, low, high in (
            ("n_ranks", 0, 1 << 20),
            ("ranks_per_worker", 1, 1 << 10),
            ("port", 0, 65535),
            ("max_restarts", 0, 1 << 20),
        ):
            _check_int(name, getattr(self, name), low, high, optional=name == "n_ranks")
        for name in _POSITIVE:
            _check_seconds(name, getattr(self, name), optional=name == "stall_timeout_s")
        _check_seconds("grace_s", self.grace_s, zero=True)
        self._check_texts()

    def _check_texts(self) -> None:
        if self.backend is not None and not (isinstance(self.backend, str) and self.backend):
            raise TypeError(f"backend must be a name such as 'gloo', or None, not {self.backend!r}")
        if isinstance(self.workers, str | bytes):
            raise TypeError(f"workers must be a list of workers: [{self.workers!r}]")
        if self.workers is not None and not list(self.workers):
            raise ValueError("workers is an empty list; leave it out to use every worker")
        if self.logs not in get_args(Logs):
            raise ValueError(f"logs must be one of {get_args(Logs)}, not {self.logs!r}")
        restart_on = self.restart_on
        if restart_on not in ("worker-lost", "any") and not isinstance(restart_on, tuple):
            raise ValueError(
                f"restart_on must be 'worker-lost', 'any' or a tuple of exception types, "
                f"not {restart_on!r}"
            )
        if not isinstance(self.env, Mapping):
            raise TypeError(f"env must map names to strings, not {self.env!r}")
        env: dict[Any, Any] = dict(self.env)
        for key, value in env.items():
            if not (isinstance(key, str) and isinstance(value, str)) or "=" in key or not key:
                raise TypeError(f"env must map names to strings, found {key!r}: {value!r}")
            if "\0" in key + value:
                raise ValueError(f"env must not contain NUL, found {key!r}: {value!r}")

    def restarts_after(self, error: BaseException) -> bool:
        """Whether ``error`` is one that ``restart_on`` names."""
        from ddp_core.errors import GangTimeoutError, JobCancelledError, WorkerLostError

        if isinstance(error, JobCancelledError | GangTimeoutError):
            return False
        if isinstance(error, WorkerLostError):
            return True
        if self.restart_on == "any":
            return isinstance(error, DDPCoreError)
        if isinstance(self.restart_on, tuple):
            return isinstance(error, self.restart_on) or isinstance(
                error.__cause__, self.restart_on
            )
        return False


def as_options(options: Any) -> LaunchOptions:
    """The given options, or the defaults.

    Raises:
        TypeError: When it is something else, with the fields there are.
    """
    if options is None:
        return LaunchOptions()
    if not isinstance(options, LaunchOptions):
        names = ", ".join(f.name for f in fields(LaunchOptions))
        raise TypeError(
            f"options must be a LaunchOptions, not {type(options).__name__}; it has {names}"
        )
    return options


def _check_int(name: str, value: object, low: int, high: int, *, optional: bool) -> None:
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, not {value!r}")
    if not low <= value <= high:
        raise ValueError(f"{name} must be between {low} and {high}, not {value}")


def _check_seconds(name: str, value: object, *, optional: bool = False, zero: bool = False) -> None:
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number of seconds, not {value!r}")
    if not math.isfinite(value) or value < 0 or (value == 0 and not zero):
        raise ValueError(f"{name} must be a positive number of seconds, not {value}")
