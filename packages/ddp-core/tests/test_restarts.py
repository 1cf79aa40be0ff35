"""A lost worker costs a restart, not the run."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import Client

from ddp_core import LaunchOptions, RankFailedError, WorkerLostError, current_rank, launch

pytestmark = [pytest.mark.xdist_group("cluster"), pytest.mark.timeout(240)]


def train(folder: str, kill_at: int | None, worker_pids: dict[str, int]) -> tuple[Any, int]:
    """Train with a checkpoint after every step; lose a worker once in between."""
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    me = current_rank()
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    checkpoint, first = Path(folder, "checkpoint.pt"), 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"] + 1
    for step in range(first, 20):
        if step == kill_at and me.attempt == 0 and me.rank == 1:
            for pid in worker_pids.values():
                os.kill(pid, signal.SIGKILL)
                break
        data = torch.Generator().manual_seed(step * 2 + me.rank)
        optimizer.zero_grad()
        model(torch.rand(8, 4, generator=data)).pow(2).mean().backward()
        optimizer.step()
        if me.rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "step": step}, checkpoint.with_suffix(".new"))
            checkpoint.with_suffix(".new").replace(checkpoint)
        dist.barrier()
    return [p.tolist() for p in model.parameters()], me.attempt


def test_training_resumes_with_the_same_final_weights(fresh: Client, tmp_path: Path) -> None:
    for name in ("calm", "rough"):
        (tmp_path / name).mkdir()
    options = LaunchOptions(max_restarts=1, grace_s=2)
    calm = launch(fresh, train, args=(str(tmp_path / "calm"), None, {}), options=options)
    expected = [weights for weights, _ in calm.result(100)]
    pids = dict(fresh.run(os.getpid))
    rough = launch(fresh, train, args=(str(tmp_path / "rough"), 7, pids), options=options)
    results = rough.result(150)
    assert [weights for weights, _ in results] == expected
    assert [attempt for _, attempt in results] == [1, 1]
    assert rough.attempt == 1


def test_restarts_are_used_up(fresh: Client) -> None:
    def fail() -> None:
        raise ValueError(f"attempt {current_rank().attempt}")

    options = LaunchOptions(max_restarts=2, restart_on=(ValueError,), grace_s=1)
    with pytest.raises(RankFailedError, match="attempt 2"):
        launch(fresh, fail, options=options).result(150)
    with pytest.raises(RankFailedError, match="attempt 0"):
        launch(fresh, fail, options=LaunchOptions(max_restarts=2, grace_s=1)).result(150)
    assert issubclass(WorkerLostError, Exception)
