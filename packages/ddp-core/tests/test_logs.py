from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from commandline import cluster_with_fixed_ports
from conftest import wait_until
from distributed import Client

from ddp_core import LaunchOptions, RankFailedError, launch
from ddp_core._logs import RankLogs

pytestmark = pytest.mark.xdist_group("cluster")


def test_what_ranks_print_reaches_the_client_with_the_rank(
    client: Client, capfd: pytest.CaptureFixture[str]
) -> None:
    def train() -> None:
        print("hello from", dist.get_rank())
        os.system("echo from a child")

    launch(client, train).result(60)
    seen = capfd.readouterr().err
    for line in ("[rank 0] hello from 0\n", "[rank 1] hello from 1\n", "[rank 0] from a child\n"):
        assert seen.count(line) == 1


def test_the_last_lines_of_a_killed_rank_are_part_of_its_error(client: Client) -> None:
    def train() -> None:
        for step in range(1000):
            print("step", step)
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RankFailedError, match="SIGKILL") as caught:
        launch(client, train, options=LaunchOptions(n_ranks=1, logs="off")).result(60)
    assert caught.value.log.endswith("step 998\nstep 999")
    assert "step 999" in str(caught.value)


def test_a_job_outlives_the_disk_to_which_its_client_writes(client: Client) -> None:
    def train() -> int:
        for _ in range(3):
            print("hello from", dist.get_rank())
            time.sleep(0.3)
        return dist.get_rank()

    full = open(os.open("/dev/full", os.O_WRONLY), "w")  # noqa: SIM115 - cannot be closed well
    with contextlib.redirect_stderr(full):
        assert launch(client, train).result(60) == [0, 1]
    with contextlib.suppress(OSError):
        full.close()


@contextlib.contextmanager
def full_disk() -> Iterator[Any]:
    with open("/dev/full", "wb") as full:
        yield full


@contextlib.contextmanager
def pipe_without_reader() -> Iterator[Any]:
    readable, writable = os.pipe()
    os.close(readable)
    yield writable
    os.close(writable)


@pytest.mark.parametrize("stderr", [full_disk, pipe_without_reader, contextlib.nullcontext])
def test_a_job_outlives_the_stderr_of_its_workers(stderr: Any) -> None:
    """The last one is none at all: its descriptor is closed, and taken by the next file."""

    def train() -> int:
        for _ in range(3):
            print("hello from", dist.get_rank())
            time.sleep(0.3)
        return dist.get_rank()

    with stderr() as broken, cluster_with_fixed_ports(broken) as (client, _):
        for warm in (True, False):
            options = LaunchOptions(logs="worker", warm=warm)
            assert launch(client, train, options=options).result(60) == [0, 1]


@pytest.mark.timeout(240)
def test_a_rank_that_prints_very_much_is_not_held_up_and_costs_no_memory(
    client: Client, capfd: pytest.CaptureFixture[str]
) -> None:
    def train() -> int:
        line = "x" * 999 + "\n"
        return sum(sys.stdout.write(line) for _ in range(350_000))

    before = client.run(memory)
    assert launch(client, train).result(200) == [350_000_000] * 2
    grown = {worker: used - before[worker] for worker, used in client.run(memory).items()}
    assert max(grown.values()) < 100_000_000
    seen = capfd.readouterr().err
    assert "not sent" in seen
    assert len(seen) < 350_000_000


def memory() -> int:
    """The most that this process has ever occupied, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def test_what_a_rank_leaves_without_an_end_reaches_the_client(
    client: Client, capfd: pytest.CaptureFixture[str]
) -> None:
    def train() -> None:
        for step in range(1001):
            sys.stdout.write(f"\r{step} of 1000")
        sys.stdout.write("" if dist.get_rank() else "\nno newline")

    launch(client, train).result(60)
    seen = capfd.readouterr().err
    assert seen.count("[rank 0] 1000 of 1000") == 1
    assert seen.count("[rank 0] no newline\n") == 1
    assert "[rank 1] 1000 of 1000\n" in seen
    assert seen.count("[rank 1]") < 10


def test_nobody_wakes_while_nothing_is_printed() -> None:
    readable, writable = os.pipe()
    os.set_blocking(readable, False)
    sent: list[Any] = []
    logs = RankLogs({0: readable}, sent.extend)
    os.write(writable, b"one\n")
    wait_until(lambda: sent)
    wait_until(lambda: wakes() == (time.sleep(0.5), wakes())[1])
    before = wakes()
    time.sleep(1.5)  # any polling would show within it
    assert wakes() == before
    os.close(writable)
    logs.close()
    os.close(readable)


def wakes() -> dict[str, str]:
    """How often each thread of the logs has gone to sleep."""
    threads = [t for t in threading.enumerate() if t.name.startswith("ddp-logs")]
    assert len(threads) == 2
    return {
        t.name: line
        for t in threads
        for line in Path(f"/proc/self/task/{t.native_id}/status").read_text().splitlines()
        if line.startswith("voluntary_ctxt_switches")
    }


def test_closing_does_not_wait_for_who_still_prints() -> None:
    """A process that left its rank's session may hold the pipe, and fill it for ever."""
    readable, writable = os.pipe()
    os.set_blocking(readable, False)
    code = "import os\nwhile True: os.write(1, b'x' * 60_000 + b'\\n')"
    with subprocess.Popen([sys.executable, "-c", code], stdout=writable) as printer:
        logs = RankLogs({0: readable}, lambda batch: None)
        wait_until(lambda: logs.n_bytes(0) > 1_000_000)
        assert logs.tail(0).startswith("x")
        logs.close()
        printer.kill()
    for fd in (readable, writable):
        os.close(fd)


def test_a_slow_reader_of_the_lines_never_blocks_the_writer() -> None:
    readable, writable = os.pipe()
    os.set_blocking(readable, False)
    sent: list[Any] = []

    def slowly(batch: list[tuple[int, str]]) -> None:
        time.sleep(0.5)
        sent.extend(batch)

    logs = RankLogs({3: readable}, slowly)
    for number in range(20_000):
        os.write(writable, b"line %d\n" % number)
    os.write(writable, b"no newline")
    wait_until(lambda: logs.tail(3).endswith("line 19999\nno newline"))
    logs.close(10)
    assert sent[0] == (3, "line 0")
    assert any("not sent" in line for _, line in sent)
    for fd in (readable, writable):
        os.close(fd)
