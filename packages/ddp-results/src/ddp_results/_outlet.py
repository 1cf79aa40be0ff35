"""One outlet per process and key: created on first use, renewed after fork, emptied at exit."""

from __future__ import annotations

import atexit
import logging
import multiprocessing.util
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from ddp_results._outbox import Retired
from ddp_results._record import Record

logger = logging.getLogger("ddp_results")

EXIT_TIMEOUT_S = 30.0


class Outlet(Protocol):
    """Takes records from any thread and sees to it that they arrive."""

    def submit(self, records: Sequence[Record]) -> None:
        """Accept records; block only for lack of room. `Retired` if it has been closed."""

    def flush(self, timeout_s: float | None) -> bool:
        """Wait until everything submitted is durable; False if that takes too long."""

    def close(self, timeout_s: float) -> None:
        """Deliver what is left, as far as possible within the time, and stop."""


outlets: dict[str, Outlet] = {}  # those of this process; emptied by a fork


class _State:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.armed_pid = 0


_state = _State()


def submit(key: str, create: Callable[[], Outlet], records: Sequence[Record]) -> Outlet:
    """Give `records` to the outlet of this process for `key`; return it."""
    while True:
        outlet = outlets.get(key) or outlet_for(key, create)
        try:
            outlet.submit(records)
        except Retired:
            forget(key, outlet)
            continue
        return outlet


def outlet_for(key: str, create: Callable[[], Outlet]) -> Outlet:
    """Return the outlet of this process for `key`, created by `create` if there is none."""
    with _state.lock:
        _arm()
        outlet = outlets.get(key)
        if outlet is None:
            outlet = outlets[key] = create()
        return outlet


def forget(key: str, outlet: Outlet) -> None:
    """Let the next submission create a new outlet."""
    with _state.lock:
        if outlets.get(key) is outlet:
            del outlets[key]


def _arm() -> None:
    """Register, once per process, what has to happen at fork and at exit."""
    pid = os.getpid()
    if _state.armed_pid == pid:
        return
    if _state.armed_pid == 0:
        atexit.register(close_all)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=_after_fork)
    # A child of multiprocessing leaves by os._exit: only its own finalizers run.
    multiprocessing.util.Finalize(None, close_all, exitpriority=100)
    _state.armed_pid = pid


def _after_fork() -> None:
    """Forget the parent's outlets: their threads do not exist in the child."""
    _state.lock = threading.Lock()
    outlets.clear()


def close_all(timeout_s: float = EXIT_TIMEOUT_S) -> None:
    """Deliver what this process has submitted, then stop its threads; bounded by the time."""
    deadline = time.monotonic() + timeout_s
    with _state.lock:
        open_now = list(outlets.values())
        outlets.clear()
    for outlet in open_now:
        try:
            outlet.close(max(0.1, deadline - time.monotonic()))
        except Exception:  # at exit there is nobody to raise to
            logger.exception("delivering the last results at exit")
