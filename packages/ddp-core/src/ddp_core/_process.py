"""One rank process as its agent sees it: start, listen, stop, reap."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from typing import IO, Any

_BOOT = (
    "import json,os,sys;"
    "sys.path[:]=json.loads(os.environ.pop('_DDP_CORE_SYS_PATH'));"
    "from ddp_core._child import main;main()"
)


class RankProcess:
    """A child process in a session of its own, with its descriptors.

    Everything that it starts belongs to its process group and ends with it. Used by one thread.

    Args:
        env: The environment of the process, complete.
        spec: What ``_child`` needs to know, JSON.
        payload: The pickled call.
    """

    def __init__(self, env: dict[str, str], spec: dict[str, Any], payload: bytes) -> None:
        self.returned = False
        self.raised: dict[str, Any] | None = None
        self.exit_code: int | None = None
        self.outbox = _temporary("ddp-outbox")
        self._buffer = b""
        self._deadline: float | None = None
        with contextlib.ExitStack() as stack:
            inbox = stack.enter_context(_temporary("ddp-inbox"))
            inbox.write(payload)
            inbox.flush()
            inbox.seek(0)
            self.report_fd, child_end = os.pipe()
            stack.callback(os.close, child_end)
            os.set_blocking(self.report_fd, False)
            fds = {"report": child_end, "inbox": inbox.fileno(), "outbox": self.outbox.fileno()}
            self._popen = subprocess.Popen(
                [sys.executable, "-c", _BOOT],
                env={**env, "_DDP_CORE_SPEC": json.dumps({**spec, **fds})},
                stdin=subprocess.PIPE,
                pass_fds=tuple(fds.values()),
                start_new_session=True,
            )
        self.pid = self._popen.pid
        self.exit_fd = _pidfd(self.pid)

    def order(self, op: str, **what: Any) -> None:
        """Send one order. A process that has gone is noticed by its exit, not here."""
        stdin = self._popen.stdin
        if stdin is None or stdin.closed:
            return
        with contextlib.suppress(BrokenPipeError):
            stdin.write(json.dumps({"op": op, **what}).encode() + b"\n")
            stdin.flush()

    def events(self) -> list[dict[str, Any]]:
        """What the process has said since the last call. Does not block."""
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self.report_fd, 1 << 16):
                self._buffer += chunk
        *lines, self._buffer = self._buffer.split(b"\n")
        return [json.loads(line) for line in lines]

    def stop(self, grace_s: float) -> None:
        """Ask the process to leave; ``reap`` kills it when it has not done so in time."""
        if self._deadline is None:
            self.order("stop")
        self.leave_within(grace_s)

    def leave_within(self, bound_s: float) -> None:
        """Give the process so long to exit by itself, or less if that was said before."""
        deadline = time.monotonic() + bound_s
        self._deadline = deadline if self._deadline is None else min(deadline, self._deadline)

    def reap(self) -> bool:
        """Collect the process if it has ended, kill it if its time is over; True when gone."""
        if self.exit_code is not None:
            return True
        if self._deadline is not None and time.monotonic() > self._deadline:
            self._kill_group()
        if not self._has_exited():
            return False
        # The group is killed before its leader is collected: till then its number cannot be reused.
        self._kill_group()
        self.exit_code = self._popen.wait()
        return True

    def close(self) -> None:
        """Kill what still runs and close every descriptor."""
        if self.exit_code is None:
            self._kill_group()
            self.exit_code = self._popen.wait()
        for fd in (self.report_fd, self.exit_fd):
            if fd is not None:
                with contextlib.suppress(OSError):
                    os.close(fd)
        self.report_fd, self.exit_fd = -1, None
        if self._popen.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._popen.stdin.close()
        self.outbox.close()

    def read_outbox(self) -> bytes:
        """What the rank wrote: its pickled result or exception."""
        self.outbox.seek(0)
        return self.outbox.read()

    def _has_exited(self) -> bool:
        try:
            found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return True
        return found is not None

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


def _temporary(name: str) -> IO[bytes]:
    """A file without a name, in memory where the system can do that."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create(name), "w+b")
    return tempfile.TemporaryFile()


def _pidfd(pid: int) -> int | None:
    """A descriptor that becomes readable when the process ends, where the system has such."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None
