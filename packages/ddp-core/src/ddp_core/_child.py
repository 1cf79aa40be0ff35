"""The entry of a rank process: imports torch, waits for the signal to go, calls the function.

It talks with its agent over inherited descriptors: JSON lines come in on one pipe and go out on
another, the function is read from one file and the result written to another. What the user's
code prints never mixes with these.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import io
import json
import os
import pickle
import queue
import signal
import sys
import threading
import traceback
from datetime import timedelta
from typing import Any

from ddp_core._groups import keep_destroyed_groups, leave_group

MESSAGE_CHARS = 4000
TRACEBACK_CHARS = 200_000
_GROUP_EXISTS = (
    "ddp_core makes the process group before it calls the function; for code that makes it "
    "itself, launch with LaunchOptions(init_process_group=False)"
)

_exiting = threading.Lock()


class Link:
    """The rank's end of the conversation with its agent."""

    def __init__(self, control: int, report: int, grace_s: float) -> None:
        self._control = io.FileIO(control)
        self._report = report
        self._grace_s = grace_s
        self._lock = threading.Lock()
        self._all_joined = threading.Event()
        self._orders: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._listen, name="ddp-control", daemon=True).start()

    def tell(self, event: str, **news: Any) -> None:
        """Send one event to the agent. An agent that has gone is noticed by the listener."""
        line = json.dumps({"event": event, **news}).encode() + b"\n"
        with self._lock, contextlib.suppress(BrokenPipeError):
            while line:
                line = line[os.write(self._report, line) :]

    def wait_for_go(self) -> dict[str, Any]:
        """The order to go, with the rendezvous address."""
        return self._orders.get()

    def wait_for_all(self, bound_s: float) -> None:
        """Wait until every rank has joined: who left before would break the others' joining."""
        self._all_joined.wait(bound_s)

    def _listen(self) -> None:
        """Obey the agent; its end of file means that the worker is dead."""
        for line in self._control:
            order = json.loads(line)
            if order["op"] == "go":
                self._orders.put(order)
            elif order["op"] == "joined":
                self._all_joined.set()
            elif order["op"] == "stacks":
                self.tell("stacks", text=_stacks())
            elif order["op"] == "stop":
                _leave_now(self._grace_s)
        _leave_now(min(self._grace_s, 1.0))


def main(spec: dict[str, Any] | None = None) -> None:
    """Run one rank in this process, and leave.

    Args:
        spec: What the agent says; ``None`` in a fresh interpreter, which finds it in a variable.
    """
    spec = spec or json.loads(os.environ.pop("_DDP_CORE_SPEC"))
    for name in ("control", "report", "inbox", "outbox"):
        os.set_inheritable(spec[name], False)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable()
    link = Link(spec["control"], spec["report"], spec["grace_s"])
    pid = os.getpid()
    try:
        code = _run(spec, link)
    except SystemExit as exc:
        code = exc.code if isinstance(exc.code, int) else int(exc.code is not None)
        if not isinstance(exc.code, int | None):
            _print(f"{exc.code}\n")
            if os.getpid() == pid:
                link.tell("exiting", text=_short(str(exc.code), MESSAGE_CHARS))
    _leave_copy(pid, code)
    _leave(code)


def _run(spec: dict[str, Any], link: Link) -> int:
    pid = os.getpid()
    try:
        import torch
        import torch.distributed as dist

        device = choose_device(spec["device_index"], torch.cuda.device_count())
        link.tell("ready", device=device)
        order = link.wait_for_go()
        _enter(spec, order, device)
        if spec["init_process_group"]:
            dist.init_process_group(
                order["backend"], timeout=timedelta(seconds=spec["pg_timeout_s"])
            )
        keep_destroyed_groups()
        link.tell("running")
        fn, args, kwargs = _load(spec["inbox"])
        if spec["pass_local_rank"]:
            kwargs["local_rank"] = int(os.environ["LOCAL_RANK"])
        result = fn(*args, **kwargs)
        _leave_copy(pid, 0)
        _store(spec["outbox"], result, link)
        link.tell("returned")
        link.wait_for_all(spec["rendezvous_timeout_s"])
        leave_group(spec["grace_s"])
    except SystemExit:
        raise
    except BaseException as exc:  # noqa: BLE001 - everything that ends a rank is reported
        if os.getpid() != pid:
            traceback.print_exception(exc)
        _leave_copy(pid, 1)
        if spec["init_process_group"] and "process group twice" in _one_line(exc):
            exc.add_note(_GROUP_EXISTS)
        _report(spec["outbox"], exc, link)
        return 1
    return 0


def choose_device(index: int, count: int) -> str:
    """The device of a rank: ``cpu`` without CUDA, else the device with this index.

    Raises:
        RuntimeError: When more ranks share a host than it has devices.
    """
    if count == 0:
        return "cpu"
    if index >= count:
        raise RuntimeError(
            f"this rank would need CUDA device {index}, but the process sees {count}: "
            "start fewer ranks on the host, or set CUDA_VISIBLE_DEVICES='' to train on the CPU"
        )
    return f"cuda:{index}"


def _enter(spec: dict[str, Any], order: dict[str, Any], device: str) -> None:
    import torch

    from ddp_core._current import CurrentRank, variable

    os.environ["MASTER_ADDR"] = order["host"]
    os.environ["MASTER_PORT"] = str(order["port"])
    os.environ.update(variable(CurrentRank(device=device, **spec["rank"])))
    if device.startswith("cuda"):
        torch.cuda.set_device(device)


def _load(inbox: int) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Unpickle the call. Only now, so that the user's modules see the whole environment."""
    with os.fdopen(inbox, "rb") as file:
        try:
            fn, args, kwargs = pickle.load(file)
        except ModuleNotFoundError as exc:
            exc.add_note(
                f"the function needs the module {exc.name!r}, which the worker cannot import: "
                "install it there, send it with client.upload_file(...), or call "
                "cloudpickle.register_pickle_by_value(module) before launching"
            )
            raise
    return fn, args, kwargs


def _store(outbox: int, value: Any, link: Link) -> None:
    """Write what the function returned; say so when that cannot be pickled."""
    import cloudpickle

    with os.fdopen(os.dup(outbox), "wb") as file:
        try:
            cloudpickle.dump(value, file, protocol=5)
        except Exception as exc:
            exc.add_note(f"the rank returned {_short(repr(value), 200)}, which cannot be pickled")
            link.tell("unpicklable")
            raise


def _report(outbox: int, exc: BaseException, link: Link) -> None:
    """Tell the agent what was raised, with the exception itself where it can be pickled."""
    import cloudpickle

    text = "".join(traceback.format_exception(exc))
    _print(text)
    data = b""
    bare = exc.with_traceback(None)
    for attempt in (bare, _without_context(bare)):
        try:
            data = cloudpickle.dumps(attempt, protocol=5)
            pickle.loads(data)
            break
        except Exception:  # noqa: BLE001 - the user's class may do anything; the text remains
            data = b""
    os.ftruncate(outbox, 0)
    with os.fdopen(os.dup(outbox), "wb") as file:
        file.seek(0)
        file.write(data)
    link.tell(
        "raised",
        text=_short(_one_line(exc), MESSAGE_CHARS),
        traceback=_short(text, TRACEBACK_CHARS),
        weak=_is_collateral(exc),
    )


def _print(text: str) -> None:
    """Print where the function may have closed or replaced what there was to print to."""
    with contextlib.suppress(Exception):
        sys.stderr.write(text)


def _without_context(exc: BaseException) -> BaseException:
    exc.__cause__ = exc.__context__ = None
    return exc


def _one_line(exc: BaseException) -> str:
    try:
        return "".join(traceback.format_exception_only(exc)).strip()
    except Exception:  # noqa: BLE001 - a broken __str__
        return type(exc).__name__


def _short(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit // 2] + " [...] " + text[-limit // 2 :]


def _is_collateral(exc: BaseException) -> bool:
    """Whether ``exc`` looks like the consequence of another rank's failure."""
    import torch.distributed as dist

    kinds = tuple(
        getattr(dist, name)
        for name in ("DistBackendError", "DistNetworkError", "DistStoreError")
        if hasattr(dist, name)
    )
    if isinstance(exc, (*kinds, ConnectionError)):
        return True
    signs = ("gloo", "Connection closed by peer", "Connection reset", "NCCL", "Broken pipe")
    return isinstance(exc, RuntimeError) and any(sign in str(exc) for sign in signs)


def _stacks() -> str:
    """Where each thread of the user's is."""
    names = {t.ident: t.name for t in threading.enumerate()}
    shown = [
        f"thread {names.get(ident, ident)}\n{''.join(traceback.format_stack(frame)[-6:])}"
        for ident, frame in sys._current_frames().items()
        if not str(names.get(ident, "")).startswith("ddp-")
    ]
    return _short("\n".join(shown), MESSAGE_CHARS)


def _leave_copy(pid: int, code: int) -> None:
    """End a process that the function forked and that came back through it: it is no rank."""
    if os.getpid() != pid:
        _flush()
        os._exit(code)


def _leave(code: int) -> None:
    """End as the interpreter does, but without running torch's destructors.

    Those of a process group whose peers are gone may wait or abort, which would turn a success
    into a crash. Threads are joined and exit functions run, in the interpreter's own order.
    """
    with contextlib.suppress(Exception):
        threading._shutdown()  # type: ignore[attr-defined]
    _run_exit_functions()
    _flush()
    os._exit(code)


def _run_exit_functions() -> None:
    """Run them once, though the agent may ask a rank to stop that is just leaving."""
    with _exiting:
        atexit._run_exitfuncs()


def _leave_now(grace_s: float) -> None:
    """Stop although the main thread may be blocked in a collective; runs in the control thread."""
    threading.Thread(target=_kill_after, args=(grace_s,), name="ddp-kill", daemon=True).start()
    handler = signal.getsignal(signal.SIGTERM)
    if callable(handler):
        # The user's handler runs in the main thread if that is free; it may end the process.
        os.kill(os.getpid(), signal.SIGTERM)
        threading.main_thread().join(grace_s / 2)
    with contextlib.suppress(BaseException):
        _run_exit_functions()
    _flush()
    _kill_group()


def _kill_after(grace_s: float) -> None:
    threading.Event().wait(grace_s)
    _kill_group()


def _kill_group() -> None:
    """End this process and everything that it started: it leads a session of its own."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(128 + signal.SIGTERM)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
