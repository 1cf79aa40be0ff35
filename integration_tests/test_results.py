"""Results of real jobs: ranks that are killed and begin again, and loaders inside of ranks."""

import os
import signal
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import Client
from torch.nn.parallel import DistributedDataParallel

from ddp_core import LaunchOptions, RankFailedError, current_rank, launch
from ddp_results import DaskResultsHandler, MemorySink, open_run

pytestmark = [pytest.mark.xdist_group("cluster"), pytest.mark.timeout(240)]

STEPS = 12


def train(handler: DaskResultsHandler, folder: str, die_at: int | None) -> list[Any]:
    """Train from the latest checkpoint on; rank 1 is killed once, in the middle of a step."""
    torch.manual_seed(0)
    me = current_rank()
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    checkpoint = open_run(folder).latest_checkpoint() if me.attempt else None
    first = 0
    if checkpoint is not None:
        assert checkpoint.step is not None
        model.module.load_state_dict(checkpoint.load())
        first = checkpoint.step + 1
    for step in range(first, STEPS):
        if step == die_at and me.attempt == 0 and me.rank == 1:
            handler.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        data = torch.Generator().manual_seed(step * 2 + me.rank)
        model.zero_grad()
        loss = model(torch.rand(8, 4, generator=data)).pow(2).mean()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
        handler.log_metrics({"loss": loss}, step=step)
        handler.submit_result(f"rank-{me.rank}/attempt-{me.attempt}/{step}", str(step))
        if me.rank == 0:
            handler.save_checkpoint(f"step-{step}", model.module.state_dict(), step=step)
            handler.flush()
        dist.barrier()
    return [parameter.tolist() for parameter in model.parameters()]


def test_run_whose_rank_was_killed_is_whole_and_resumes(client: Client, tmp_path: Path) -> None:
    rough, calm = tmp_path / "rough", tmp_path / "calm"
    handler = DaskResultsHandler()
    expected = launch(client, train, args=(handler, str(calm), None))
    handler.process_results(calm, expected)

    handler = DaskResultsHandler()
    options = LaunchOptions(max_restarts=1, restart_on="any", grace_s=2)
    job = launch(client, train, args=(handler, str(rough), 6), options=options)
    report = handler.process_results(rough, job)
    assert job.result() == expected.result()
    assert job.attempt == 1

    steps: dict[tuple[int, int], list[int]] = defaultdict(list)
    for point in open_run(rough).metrics("loss"):
        steps[point["attempt"], point["rank"]].append(point["step"])
    assert steps[0, 1] == list(range(6))
    assert steps[0, 0] in (list(range(6)), list(range(7)))
    assert steps[1, 0] == steps[1, 1] == list(range(steps[1, 0][0], STEPS))
    assert steps[1, 0][0] in (6, 7)
    for (attempt, rank), numbers in steps.items():
        folder = rough / f"rank-{rank}" / f"attempt-{attempt}"
        assert sorted(int(path.name) for path in folder.iterdir()) == numbers
        assert all((folder / str(step)).read_text() == str(step) for step in numbers)
    assert any(label.startswith("rank 1") for label in report.unfinished)
    assert not any("attempt 1" in label for label in report.unfinished)
    latest = open_run(rough).latest_checkpoint()
    assert latest is not None
    assert latest.step == STEPS - 1


def test_job_that_fails_for_good_leaves_what_it_has_submitted(
    client: Client, tmp_path: Path
) -> None:
    handler = DaskResultsHandler()
    job = launch(client, train, args=(handler, str(tmp_path), 6))
    with pytest.raises(RankFailedError, match="SIGKILL"):
        handler.process_results(tmp_path, job)
    assert sorted(int(path.name) for path in (tmp_path / "rank-1/attempt-0").iterdir()) == list(
        range(6)
    )


def test_last_words_before_an_exception_arrive(client: Client) -> None:
    handler, sink = DaskResultsHandler(), MemorySink()

    def fail() -> None:
        rank = current_rank().rank
        for n in range(200):
            handler.submit_result(f"{rank}/{n}", b"x" * 1000)
        raise ValueError("the last line")

    with pytest.raises(RankFailedError, match="the last line"):
        handler.process_results(sink, launch(client, fail))
    # One rank was first; the other may have been stopped by that before it had submitted all.
    counts = [sum(path.startswith(f"{rank}/") for path in sink.results) for rank in range(2)]
    assert max(counts) == 200


class Telling(torch.utils.data.Dataset[int]):
    """Submits a result for every item, from the process that loads it."""

    def __init__(self, handler: DaskResultsHandler) -> None:
        self.handler = handler

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        self.handler.submit_result(f"item/{index}", str(os.getpid()))
        return index


def load(handler: DaskResultsHandler, method: str) -> int:
    """Load everything by two processes that this rank starts."""
    handler.submit_result(f"rank/{current_rank().rank}", "before")
    sampler = torch.utils.data.DistributedSampler(Telling(handler), shuffle=False)
    loader = torch.utils.data.DataLoader(
        Telling(handler), 4, sampler=sampler, num_workers=2, multiprocessing_context=method
    )
    n_items = sum(len(batch) for batch in loader)
    handler.submit_result(f"rank/{current_rank().rank}", "after")
    return n_items


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_of_a_loader_in_a_rank_deliver(client: Client, method: str) -> None:
    handler, sink = DaskResultsHandler(), MemorySink()
    job = launch(client, load, args=(handler, method))
    report = handler.process_results(sink, job)
    assert job.result() == [20, 20]
    assert {path for path in sink.results if path.startswith("item/")} == {
        f"item/{index}" for index in range(40)
    }
    assert len({sink.results[f"item/{index}"] for index in range(40)}) == 4
    assert [sink.results[f"rank/{rank}"] for rank in range(2)] == [b"after"] * 2
    assert not report.unfinished
