"""``n_ranks=0``: the function in this process."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from ddp_core import CurrentRank, NotInRankError, current_rank
from ddp_core._here import run_here
from ddp_core.options import LaunchOptions

Listeners = set[tuple[str, int]]


def listeners() -> Listeners:
    """Address and port of each; other tests of this process may have left some of their own."""
    connections = psutil.Process().net_connections()
    return {tuple(c.laddr) for c in connections if c.status == psutil.CONN_LISTEN}


def reduce() -> tuple[float, CurrentRank, Listeners]:
    value = torch.ones(1)
    dist.all_reduce(value)
    return float(value.item()), current_rank(), listeners()


def reduce_in_own_group() -> Any:
    assert not dist.is_initialized()
    dist.init_process_group("gloo")
    return reduce()


@pytest.mark.parametrize("makes_group", [True, False])
def test_a_group_of_one_listens_on_the_loopback_only_and_leaves_nothing(makes_group: bool) -> None:
    options = LaunchOptions(backend="gloo", init_process_group=makes_group)
    function = reduce if makes_group else reduce_in_own_group
    run_here(function, (), {}, options, "job")  # torch keeps two descriptors after its first store
    before = dict(os.environ), psutil.Process().num_fds(), set(threading.enumerate()), listeners()
    value, me, listening = run_here(function, (), {}, options, "job")
    assert (value, me.rank, me.world_size, me.job_id) == (1.0, 0, 1, "job")
    assert {host for host, _ in listening - before[-1]} == {"127.0.0.1"}
    assert not dist.is_initialized()
    after = dict(os.environ), psutil.Process().num_fds(), set(threading.enumerate()), listeners()
    assert before == after
    with pytest.raises(NotInRankError):
        current_rank()


def test_an_exception_goes_through_and_leaves_nothing() -> None:
    def fail() -> None:
        os.environ["LEFT_BEHIND"] = "1"
        del os.environ["PATH"]
        raise KeyError("mine")

    before = dict(os.environ), listeners()
    with pytest.raises(KeyError, match="mine"):
        run_here(fail, (), {}, LaunchOptions(backend="gloo"), "job")
    assert (dict(os.environ), listeners()) == before
    assert not dist.is_initialized()


def test_a_function_may_destroy_the_group_itself() -> None:
    run_here(dist.destroy_process_group, (), {}, LaunchOptions(backend="gloo"), "job")
    assert not dist.is_initialized()


def test_a_group_that_is_there_already_is_said_and_kept(tmp_path: Path) -> None:
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(tmp_path / "s"), 1), rank=0, world_size=1
    )  # type: ignore[attr-defined]
    try:
        with pytest.raises(RuntimeError, match="destroy_process_group"):
            run_here(reduce, (), {}, LaunchOptions(), "job")
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


def test_the_users_variables_and_the_local_rank_are_passed() -> None:
    def see(local_rank: int) -> tuple[int, str]:
        return local_rank, os.environ["COLOUR"]

    options = LaunchOptions(backend="gloo", pass_local_rank=True, env={"COLOUR": "red"})
    assert run_here(see, (), {}, options, "job") == (0, "red")
