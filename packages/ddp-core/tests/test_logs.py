from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import pytest
import torch.distributed as dist
from conftest import wait_until
from distributed import Client

from ddp_core import LaunchOptions, RankFailedError, launch
from ddp_core._logs import RankLogs

pytestmark = [pytest.mark.xdist_group("cluster"), pytest.mark.usefixtures("untouched")]


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


def test_a_rank_that_prints_very_much_is_not_held_up(
    client: Client, capfd: pytest.CaptureFixture[str]
) -> None:
    def train() -> float:
        line = "x" * 999
        began = time.monotonic()
        for _ in range(200_000):
            sys.stdout.write(line + "\n")
        return time.monotonic() - began

    assert max(launch(client, train).result(90)) < 30
    assert "not sent" in capfd.readouterr().err


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
