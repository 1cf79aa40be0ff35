"""Results and exceptions that are large, or cannot travel."""

from __future__ import annotations

import gc
import os
from typing import Any

import psutil
import pytest
import torch.distributed as dist
from conftest import wait_until
from distributed import Client

from ddp_core import LaunchOptions, RankFailedError, ResultError, launch, run

pytestmark = pytest.mark.xdist_group("cluster")


def only_in_a_rank(*arguments: Any) -> Any:
    """Rebuild something where there is a rank, as a class needs that lives on workers only."""
    return Fussy() if os.environ["RANK"] else None


class Fussy:
    """Can be pickled and unpickled in a rank, and not unpickled elsewhere."""

    def __reduce__(self) -> Any:
        return only_in_a_rank, ()


class FussyError(Exception):
    def __reduce__(self) -> Any:
        return (lambda text: FussyError(text) if os.environ["RANK"] else None), self.args


@pytest.mark.timeout(400)
def test_a_result_of_half_a_gigabyte_arrives_whole(client: Client) -> None:
    size = 500_000_000

    def train() -> bytes:
        return b"" if dist.get_rank() else b"\1" * size

    large, small = launch(client, train).result(300)
    assert (len(large), large[0], large[-1], small) == (size, 1, 1, b"")


def test_a_worker_keeps_no_result_that_was_delivered(client: Client) -> None:
    def train() -> bytes:
        return os.urandom(100_000_000)

    def memory() -> int:
        return psutil.Process().memory_info().rss

    client.run(gc.collect)
    client.run(gc.disable)  # else it would free them, sooner or later
    try:
        launch(client, train).result(60)
        before = client.run(memory)
        for _ in range(3):
            launch(client, train).result(60)
        wait_until(lambda: all(m < before[w] + 150e6 for w, m in client.run(memory).items()))
    finally:
        client.run(gc.enable)


def test_a_result_that_cannot_be_unpickled_here_leaves_those_of_the_others(client: Client) -> None:
    def train() -> Any:
        return Fussy() if dist.get_rank() else "fine"

    job = launch(client, train)
    with pytest.raises(ResultError, match=r"rank 1 .*cannot be unpickled here.*RANK") as caught:
        job.result(60)
    assert caught.value.results == {0: "fine"}
    assert (caught.value.rank, caught.value.job_id) == (1, job.job_id)
    assert isinstance(caught.value.__cause__, KeyError)
    assert job.state == "failed"


def test_a_future_of_such_a_result_raises_and_the_others_give_theirs(client: Client) -> None:
    def train() -> Any:
        return Fussy() if dist.get_rank() else "fine"

    first, second = run(client, train)
    assert first.result(timeout=60) == "fine"
    assert isinstance(second.exception(timeout=60), ResultError)


def test_an_exception_that_cannot_be_unpickled_here_leaves_its_traceback(client: Client) -> None:
    def train() -> Any:
        if dist.get_rank():
            raise FussyError("the text of it")
        return "fine"

    with pytest.raises(RankFailedError, match=r"rank 1 .*the text of it") as caught:
        launch(client, train, options=LaunchOptions(grace_s=2)).result(60)
    assert "in train" in str(caught.value.__cause__)
    assert any("cannot be unpickled here" in note for note in caught.value.__cause__.__notes__)
    assert caught.value.results in ({}, {0: "fine"})  # who was faster


def test_a_rank_without_memory_is_named(client: Client) -> None:
    def train() -> Any:
        return bytearray(1 << 60) if dist.get_rank() else "fine"

    with pytest.raises(RankFailedError, match=r"rank 1 .*MemoryError") as caught:
        launch(client, train, options=LaunchOptions(grace_s=2)).result(60)
    assert isinstance(caught.value.__cause__, MemoryError)


def test_what_a_rank_returned_before_another_failed_is_kept(client: Client) -> None:
    def train() -> Any:
        if dist.get_rank() == 0:
            return "fine"
        import time

        time.sleep(2)
        return (i for i in range(3))

    with pytest.raises(RankFailedError, match=r"rank 1 .*cannot pickle") as caught:
        launch(client, train, options=LaunchOptions(grace_s=2)).result(60)
    assert caught.value.results == {0: "fine"}
