"""From what was seen of a failure to the error that people read."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Any

from ddp_core.errors import (
    DDPCoreError,
    GangTimeoutError,
    JobCancelledError,
    JobStalledError,
    RankFailedError,
    RendezvousError,
    WorkerLostError,
)

_KINDS: dict[str, type[DDPCoreError]] = {
    "worker-lost": WorkerLostError,
    "cancelled": JobCancelledError,
    "gang-timeout": GangTimeoutError,
    "rendezvous": RendezvousError,
    "stalled": JobStalledError,
}
_LOG_CHARS = 4000


def error_from(
    cause: Mapping[str, Any], *, job_id: str, attempt: int, others: tuple[str, ...] = ()
) -> DDPCoreError:
    """The error for the failure that the coordinator took for the first.

    Args:
        cause: ``kind`` and ``text``, and where known ``rank host worker exit_code signal exc
            traceback log returned_first``.
        job_id: The job.
        attempt: Which start of it.
        others: One line about each later failure.
    """
    kind = _KINDS.get(str(cause["kind"]), RankFailedError)
    log = str(cause.get("log") or "")[-_LOG_CHARS:]
    text = f"job {job_id}: {cause['text']}"
    if cause["kind"] == "comm" and cause.get("returned_first"):
        text += (
            f"; rank {cause['returned_first'][0]} had returned first: do the ranks get uneven "
            "numbers of batches? (see torch's Join, or drop_last=True)"
        )
    if log and cause["kind"] in ("signal", "aborted", "exit", "stalled"):
        title = "stacks" if cause["kind"] == "stalled" else "last lines of the rank"
        text += f"\n{title}:\n{log}"
    error = kind(
        text,
        job_id=job_id,
        attempt=attempt,
        rank=cause.get("rank"),
        host=cause.get("host"),
        worker=cause.get("worker"),
        exit_code=cause.get("exit_code"),
        signal=cause.get("signal"),
        log=log,
        others=others,
        cause=cause.get("exc") or None,
        cause_text=str(cause.get("traceback") or ""),
    )
    if others:
        error.add_note("later failures: " + "; ".join(others[:8]))
    return error


def raised(place: str, event: Mapping[str, Any], data: bytes) -> dict[str, Any]:
    """The failure of a rank whose function raised."""
    return {
        "kind": "comm" if event["weak"] else "exception",
        "text": f"{place} failed: {event['text']}",
        "exc": data if len(data) <= 1 << 20 else b"",
        "traceback": event["traceback"],
    }


def exited(
    place: str, exit_code: int, last_words: str = "", *, with_nccl: bool = False
) -> dict[str, Any]:
    """The failure of a rank whose process ended without a result."""
    if exit_code >= 0:
        return {
            "kind": "exit",
            "exit_code": exit_code,
            "text": f"{place} left with exit code {exit_code} before its function had returned: "
            + (last_words or "does the code call sys.exit() or os._exit()?"),
        }
    number = -exit_code
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    return {
        # NCCL's watchdog aborts a process whose peer has gone: such a death is a consequence.
        "kind": "aborted" if with_nccl and number == signal.SIGABRT else "signal",
        "signal": number,
        "text": f"{place} was killed by {name}{_HINTS.get(number, '')}",
    }


_HINTS: dict[int, str] = {
    signal.SIGKILL: " (out of memory? the kernel's log would say so)",
    signal.SIGSEGV: " (a crash in native code; its Python stack is in the log)",
    signal.SIGBUS: " (often /dev/shm is full: DataLoader workers share tensors there)",
    signal.SIGABRT: " (native code gave up; its message is in the log)",
}
