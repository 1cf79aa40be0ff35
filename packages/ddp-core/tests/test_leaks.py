"""The check for what a launch leaves behind finds each kind of it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
from conftest import wait_until
from distributed import Client
from leaks import changes, look

pytestmark = pytest.mark.xdist_group("cluster")

KEPT: list[Callable[[], object]] = []


def leave(what: str) -> None:
    """Leave something of this kind in a worker, and keep the way to undo it."""
    match what:
        case "environ":
            os.environ["DDP_TEST"] = "left"
            KEPT.append(lambda: os.environ.pop("DDP_TEST"))
        case "cwd":
            before = os.getcwd()
            os.chdir("/")
            KEPT.append(lambda: os.chdir(before))
        case "threads":
            over = threading.Event()
            thread = threading.Thread(target=over.wait, name="ddp-left", daemon=True)
            thread.start()
            KEPT.append(over.set)
        case "children":
            child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
            KEPT.append(lambda: child.communicate(b"\n"))
        case "files":
            descriptor = os.open(sys.executable, os.O_RDONLY)
            KEPT.append(lambda: os.close(descriptor))
        case "listening":
            server = socket.create_server(("127.0.0.1", 0))
            KEPT.append(server.close)


def undo() -> None:
    while KEPT:
        KEPT.pop()()


@pytest.mark.parametrize("what", ["environ", "cwd", "threads", "children", "files", "listening"])
def test_what_is_left_in_a_worker_is_found(client: Client, what: str) -> None:
    before = look(client)
    assert not changes(before, look(client))
    worker = next(iter(client.scheduler_info()["workers"]))
    client.run(leave, what, workers=[worker])
    found = [(where, kind) for where, kind, *_ in changes(before, look(client))]
    client.run(undo)
    assert (worker, what) in found
    wait_until(lambda: not changes(before, look(client)))


def test_a_task_that_nobody_forgets_is_found(client: Client) -> None:
    before = look(client)
    future: Any = client.submit(str, 1, pure=False)
    future.result(10)
    found = {(where == "scheduler", kind) for where, kind, *_ in changes(before, look(client))}
    assert {(True, "tasks"), (False, "data")} <= found
