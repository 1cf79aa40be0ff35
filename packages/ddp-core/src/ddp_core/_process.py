"""The worker's side of its nursery: start children, listen to them, stop and reap them."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from typing import IO, Any

from ddp_core._environment import working_directory
from ddp_core._nursery import BOOT, FDS, HEADER

logger = logging.getLogger("ddp_core.agent")

# Read by libraries when they are loaded: other values need another nursery.
_LOADED = ("LD_", "DYLD_", "PYTHON", "TORCH", "PYTORCH", "KMP_", "GOMP_", "MALLOC_", "C10_")
_NOT_LOADED = ("TORCHELASTIC_", "PYTHONUNBUFFERED")
# A nursery that loads torch obeys no order meanwhile, one that hangs with a file system never.
ANSWER_S = 5.0
_lock = threading.Lock()
_kept: list[NurseryProcess] = []


@contextlib.contextmanager
def nursery(env: Mapping[str, str]) -> Iterator[NurseryProcess]:
    """The nursery of this worker, started if there is none that fits ``env``. Thread-safe.

    It is not closed before the block and all children that are started in it have ended.
    """
    wanted = {
        k: v for k, v in env.items() if k.startswith(_LOADED) and not k.startswith(_NOT_LOADED)
    }
    me = uuid.uuid4().hex
    with _lock:
        source = _fitting(env, wanted)
        source.users.add(me)
    try:
        yield source
    finally:
        source.users.discard(me)


def _fitting(env: Mapping[str, str], wanted: dict[str, str]) -> NurseryProcess:
    """A nursery that has loaded libraries with these variables; the unused others are closed."""
    for kept in list(_kept):
        if kept.is_alive() and kept.loaded_with == wanted:
            return kept
        if not kept.users:
            kept.close()
            _kept.remove(kept)
    _kept.append(NurseryProcess(env, wanted))
    return _kept[-1]


class NurseryProcess:
    """A running nursery. It ends when this process does, or by itself after a long idle time."""

    def __init__(self, env: Mapping[str, str], loaded_with: dict[str, str]) -> None:
        self.loaded_with = loaded_with
        # Children, and who is about to start some. Those of another worker too: a cluster inside
        # one process has several.
        self.users: set[str] = set()
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair()
        # A linear algebra library would start its threads when it is loaded, and a process with
        # threads cannot be forked safely.
        quiet = {**env, "OPENBLAS_NUM_THREADS": "1"}
        code = BOOT.format(module="_nursery", argument=theirs.fileno())
        with contextlib.ExitStack() as ours, theirs:
            ours.enter_context(self._socket)
            self._popen = subprocess.Popen(
                [sys.executable, "-c", code],
                env=quiet,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
            ours.pop_all()

    def is_alive(self) -> bool:
        """Whether the process still runs."""
        return self._popen.poll() is None

    def request(self, what: dict[str, Any], fds: list[int] | None = None) -> None:
        """Send one request, with descriptors.

        Raises:
            OSError: The nursery has gone.
        """
        body = json.dumps(what).encode()
        with self._lock:
            socket.send_fds(self._socket, [HEADER.pack(len(body))], fds or [])
            self._socket.sendall(body)

    def kill(self) -> None:
        """End a nursery that does not answer. The next launch starts another."""
        logger.warning("the nursery of this worker does not answer and is killed")
        self._popen.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(1)

    def close(self) -> None:
        """Let the nursery end; it first ends its children."""
        self._socket.close()
        threading.Thread(target=self._popen.wait, name="ddp-nursery-end", daemon=True).start()


class ChildProcess:
    """A process in a session of its own, forked from the nursery. Used by one thread.

    Everything that it starts belongs to its process group and ends with it.

    Args:
        source: The worker's nursery.
        module: Which module's ``main`` it runs.
        env: Its environment, complete.
        spec: What ``main`` needs to know, JSON.
        payload: The pickled call.
        warm: Whether it may be forked with torch loaded; else it is a fresh interpreter.

    Raises:
        OSError: The nursery has gone, or this process may open no more files; nothing is left open.
    """

    def __init__(
        self,
        source: NurseryProcess,
        module: str,
        env: Mapping[str, str],
        spec: dict[str, Any],
        *,
        payload: bytes = b"",
        warm: bool = True,
    ) -> None:
        self.returned = False
        self.raised: dict[str, Any] | None = None
        self.last_words = ""
        self.exit_code: int | None = None
        self.pid: int | None = None
        self._nursery = source
        self._token = uuid.uuid4().hex
        self._events, self._status = b"", b""
        self._deadline: float | None = None
        self._is_asked = False
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as passed:
            self.outbox = ours.enter_context(_temporary("ddp-outbox"))
            inbox = passed.enter_context(_temporary("ddp-inbox"))
            _write(inbox, payload)
            theirs = {"inbox": inbox.fileno(), "outbox": self.outbox.fileno()}
            theirs["control"], self._control_fd = _pipe(passed, ours)
            self.report_fd, theirs["report"] = _pipe(ours, passed)
            self.exit_fd, theirs["status"] = _pipe(ours, passed)
            self.out_fd, theirs["out"] = _pipe(ours, passed)
            for fd in (self.report_fd, self.exit_fd, self.out_fd):
                os.set_blocking(fd, False)
            what = {
                "spawn": self._token,
                "module": module,
                "env": dict(env),
                "cwd": working_directory(),
                "spec": spec,
                "warm": warm,
            }
            source.users.add(self._token)
            ours.callback(source.users.discard, self._token)
            source.request(what, [theirs[name] for name in FDS])
            self._ours = ours.pop_all()

    def order(self, op: str, **what: Any) -> None:
        """Send one order. A process that has gone is noticed by its exit, not here."""
        with contextlib.suppress(BrokenPipeError, OSError):
            os.write(self._control_fd, json.dumps({"op": op, **what}).encode() + b"\n")

    def events(self) -> list[dict[str, Any]]:
        """What the process has said since the last call. Does not block."""
        data, _ = _drain(self.report_fd)
        *lines, self._events = (self._events + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def stop(self, grace_s: float) -> None:
        """Ask the process once to leave; ``reap`` kills it when it has not done so in time."""
        if not self._is_asked and (self._deadline is None or not self.raised):
            self._is_asked = True
            self.order("stop")
        self.leave_within(grace_s)

    def leave_within(self, bound_s: float) -> None:
        """Give the process so long to exit by itself, or less if that was said before."""
        deadline = time.monotonic() + bound_s
        self._deadline = deadline if self._deadline is None else min(deadline, self._deadline)

    def reap(self) -> bool:
        """Learn whether the process has ended; kill it if its time is over. True when gone.

        A nursery that does not kill it within ``ANSWER_S`` goes too.
        """
        if self.exit_code is not None:
            return True
        over_s = 0.0 if self._deadline is None else time.monotonic() - self._deadline
        if over_s > 0:
            self._kill()
        data, ended = _drain(self.exit_fd)
        *lines, self._status = (self._status + data).split(b"\n")
        for line in lines:
            word, number = line.split()
            if word == b"pid":
                self.pid = int(number)
            else:
                self.exit_code = int(number)
        if ended and self.exit_code is None:
            # The nursery itself is gone, which the kernel may have chosen when memory ran out.
            logger.warning("the nursery of rank process %s is gone", self.pid)
            self._give_up()
        elif self.exit_code is None and over_s > ANSWER_S:
            # It has not collected the process either: nobody else has got that number.
            self._nursery.kill()
            self._give_up()
        return self.exit_code is not None

    def close(self) -> None:
        """Kill what still runs, wait until it is gone, and close every descriptor."""
        self.leave_within(0)
        while not self.reap():
            time.sleep(0.01)
        self._ours.close()

    def read_outbox(self) -> bytes:
        """What the process wrote: its pickled result or exception."""
        self.outbox.seek(0)
        return self.outbox.read()

    def _kill(self) -> None:
        with contextlib.suppress(OSError):
            self._nursery.request({"kill": self._token})

    def _give_up(self) -> None:
        """Kill the process without its nursery, which cannot tell of its end any more."""
        self._kill_group()
        self.exit_code = -signal.SIGKILL

    def _kill_group(self) -> None:
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)


def _drain(fd: int) -> tuple[bytes, bool]:
    """Everything that can be read now, and whether the writers have gone."""
    parts = []
    with contextlib.suppress(BlockingIOError):
        while chunk := os.read(fd, 1 << 16):
            parts.append(chunk)
        return b"".join(parts), True
    return b"".join(parts), False


def _pipe(reader: contextlib.ExitStack, writer: contextlib.ExitStack) -> tuple[int, int]:
    """A pipe, each end closed with its stack."""
    ends = os.pipe()
    for stack, end in zip((reader, writer), ends, strict=True):
        stack.callback(os.close, end)
    return ends


def _write(file: IO[bytes], data: bytes) -> None:
    """Write all of it from the start; one call to the system writes 2 GiB at most."""
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]
    file.seek(0)


def _temporary(name: str) -> IO[bytes]:
    """A file without a name, in memory where the system can do that."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create(name), "w+b", buffering=0)
    return tempfile.TemporaryFile(buffering=0)
