"""The process beside each worker from which ranks are forked: torch loaded, no thread of its own.

It is the parent and the guard of every rank of its worker: it starts them, collects them, kills
what they leave behind, and when its worker dies it kills them all. It holds no lock and waits for
nothing but its descriptors, so a rank that keeps the GIL or ignores signals cannot stop it.

A rank is forked with torch already imported, which saves seconds, but only while this process is
safe to fork: one thread, CUDA untouched. Else the rank starts a fresh interpreter.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
import struct
import sys
import time
import traceback
from typing import Any, NoReturn

HEADER = struct.Struct("!I")
FDS = ("control", "report", "inbox", "outbox", "out", "status")
# Ranks notice the death of their worker themselves; after this they are not asked any more.
ORPHAN_GRACE_S = 1.5
IDLE_S = 900.0
BOOT = (
    "import json,os,sys;"
    "sys.path[:]=json.loads(os.environ.pop('_DDP_CORE_SYS_PATH'));"
    "from ddp_core.{module} import main;main({argument})"
)


class Nursery:
    """Serves one worker over a socket: ``spawn`` and ``kill`` requests, no answers.

    What becomes of a child is written to the ``status`` descriptor that came with its request:
    ``pid N``, later ``exit CODE``.
    """

    def __init__(self, server: socket.socket) -> None:
        self._server = server
        self._children: dict[int, tuple[str, int]] = {}
        self._parent = os.getppid()
        self._wake_r, self._wake_w = os.pipe()
        for fd in (self._wake_r, self._wake_w):
            os.set_blocking(fd, False)
        self._loaded = False
        self._used = time.monotonic()

    def serve(self) -> None:
        """Work until the worker has gone, or nothing was asked for a long time."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_w, warn_on_full_buffer=False)
        while os.getppid() == self._parent and not self._is_idle():
            ready, _, _ = select.select([self._server.fileno(), self._wake_r], [], [], 1.0)
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_r, 4096)
            self._collect()
            if self._server.fileno() in ready and not self._obey():
                break
        self._end()

    def _is_idle(self) -> bool:
        return not self._children and time.monotonic() - self._used > IDLE_S

    def _obey(self) -> bool:
        """Do what the next request says; False at the end of file."""
        try:
            head, fds, _, _ = socket.recv_fds(self._server, HEADER.size, len(FDS))
        except ConnectionError:
            return False
        if len(head) < HEADER.size:
            return False
        body = self._read(HEADER.unpack(head)[0])
        if body is None:
            return False
        request = json.loads(body)
        self._used = time.monotonic()
        if "kill" in request:
            self._kill(request["kill"])
        else:
            self._spawn(request, dict(zip(FDS, fds, strict=True)))
        return True

    def _read(self, size: int) -> bytes | None:
        parts = []
        while size:
            chunk = self._server.recv(size)
            if not chunk:
                return None
            parts.append(chunk)
            size -= len(chunk)
        return b"".join(parts)

    def _spawn(self, request: dict[str, Any], fds: dict[str, int]) -> None:
        if request["warm"]:
            self._load()
        fresh = not request["warm"] or not self._may_fork()
        status = fds.pop("status")
        pid = os.fork()
        if pid == 0:
            os.close(status)
            self._become(request, fds, fresh)
        for fd in fds.values():
            os.close(fd)
        self._children[pid] = (request["spawn"], status)
        _say(status, f"pid {pid}")

    def _load(self) -> None:
        """Import what every rank needs; the first collective would import ``torch._dynamo``."""
        if self._loaded:
            return
        self._loaded = True
        try:
            import torch
            import torch._dynamo
            import torch.distributed  # noqa: F401

            import ddp_core._child  # noqa: F401
        except ImportError:
            # The rank will fail at the same import and report it where the user sees it.
            traceback.print_exc()
        gc.collect()
        gc.freeze()

    def _may_fork(self) -> bool:
        if sys.platform == "darwin":
            return False
        torch = sys.modules.get("torch")
        if torch is None or torch.cuda.is_initialized():
            return False
        try:
            return len(os.listdir("/proc/self/task")) == 1
        except OSError:
            return False

    def _become(self, request: dict[str, Any], fds: dict[str, int], fresh: bool) -> NoReturn:
        """Turn the forked process into a child of the requested kind."""
        code = 70
        try:
            os.setsid()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            for fd in (self._wake_r, self._wake_w, *(s for _, s in self._children.values())):
                os.close(fd)
            self._server.close()
            self._redirect(fds.pop("out"))
            os.environ.clear()
            os.environ.update(request["env"])
            os.chdir(request["cwd"])
            spec = {**request["spec"], **fds}
            if fresh:
                _exec(request["module"], spec, fds)
            sys.path[:] = json.loads(os.environ.pop("_DDP_CORE_SYS_PATH"))
            _reseed()
            _run(request["module"], spec)
        except SystemExit as exc:
            code = exc.code if isinstance(exc.code, int) else 1
        except BaseException:  # noqa: BLE001 - nothing of the nursery may go on in the child
            traceback.print_exc()
        finally:
            os._exit(code)

    def _redirect(self, out: int) -> None:
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.close(out)

    def _collect(self) -> None:
        """Report and forget the children that have ended, with everything that they started."""
        for pid, (_, status) in list(self._children.items()):
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                continue
            # The group is killed before its leader is collected: till then nobody has its number.
            _kill_group(pid)
            _, state = os.waitpid(pid, 0)
            _say(status, f"exit {os.waitstatus_to_exitcode(state)}")
            os.close(status)
            del self._children[pid]
            self._used = time.monotonic()

    def _kill(self, token: str) -> None:
        for pid, (name, _) in self._children.items():
            if name == token:
                _kill_group(pid)

    def _end(self) -> None:
        """The worker is gone: give the ranks a moment to leave, then kill them."""
        deadline = time.monotonic() + ORPHAN_GRACE_S
        while self._children and time.monotonic() < deadline:
            select.select([self._wake_r], [], [], 0.05)
            self._collect()
        for pid in self._children:
            _kill_group(pid)


def _exec(module: str, spec: dict[str, Any], fds: dict[str, int]) -> NoReturn:
    for fd in fds.values():
        os.set_inheritable(fd, True)
    os.environ["_DDP_CORE_SPEC"] = json.dumps(spec)
    code = BOOT.format(module=module, argument="")
    os.execv(sys.executable, [sys.executable, "-c", code])


def _run(module: str, spec: dict[str, Any]) -> None:
    import importlib

    importlib.import_module(f"ddp_core.{module}").main(spec)


def _reseed() -> None:
    """Undo what forks share: generators seeded at import, and a thread count read from then."""
    import random

    random.seed()
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    if (torch := sys.modules.get("torch")) is not None and os.environ.get("OMP_NUM_THREADS"):
        with contextlib.suppress(ValueError, RuntimeError):
            torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _say(status: int, text: str) -> None:
    with contextlib.suppress(BrokenPipeError):
        os.write(status, text.encode() + b"\n")


def _open_standard() -> None:
    """Open what is closed of the three standard descriptors, as it is below some daemons.

    Else the next pipe of a rank would be taken for one of them.
    """
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            # The lowest free descriptor is this one.
            os.open(os.devnull, os.O_RDWR)
    for fd, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            stream = open(fd, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)


def main(fd: int) -> None:
    """Entry of the process: serve the worker at the other end of this socket."""
    _open_standard()
    Nursery(socket.socket(fileno=fd)).serve()
    os._exit(0)
