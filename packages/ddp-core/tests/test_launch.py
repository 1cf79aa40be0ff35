"""What a launch that succeeds gives, on a real cluster."""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import Client, LocalCluster

from ddp_core import (
    LaunchOptions,
    NotEnoughWorkersError,
    NotInRankError,
    RankFailedError,
    current_rank,
    launch,
    run,
)

pytestmark = [pytest.mark.xdist_group("cluster"), pytest.mark.usefixtures("untouched")]


def total(add: float = 0.0) -> float:
    value = torch.ones(1) * (dist.get_rank() + 1) + add
    dist.all_reduce(value)
    return float(value.item())


def test_every_rank_joins_and_the_results_come_in_rank_order(client: Client) -> None:
    def train(x: int, *, k: int) -> Any:
        return x, k, total(), current_rank(), os.environ["TORCHELASTIC_RUN_ID"], os.getpid()

    job = launch(client, train, args=(3,), kwargs={"k": 2})
    results = job.result(60)
    assert [r[:3] for r in results] == [(3, 2, 3.0)] * 2
    assert [r[3].rank for r in results] == [0, 1]
    assert [r[3].local_rank for r in results] == [0, 1]
    assert {r[3].device for r in results} == {"cpu"} or torch.cuda.is_available()
    assert {r[4] for r in results} == {job.job_id}
    assert len({r[5] for r in results}) == 2
    assert job.state == "finished"
    assert job.job_id in repr(job)
    assert "<table>" in job._repr_html_()


def test_run_gives_one_future_per_rank_with_its_plain_result(client: Client) -> None:
    def train(x: int, y: int = 0, local_rank: int = -1) -> tuple[int, ...]:
        return x, y, local_rank, dist.get_rank()

    futures = run(client, train, 1, y=2, pass_local_rank=True, backend="gloo")
    assert client.gather(futures) == [(1, 2, 0, 0), (1, 2, 1, 1)]
    assert client.submit(sum, futures[1]).result(timeout=10) == 5


def test_the_same_call_twice_trains_twice(client: Client) -> None:
    def train() -> int:
        return os.getpid()

    first, second = (client.gather(run(client, train)) for _ in range(2))
    assert not set(first) & set(second)


def test_two_jobs_at_once_run_one_after_the_other(client: Client) -> None:
    def train(tag: str) -> tuple[float, str, str]:
        return total(), tag, os.environ["MASTER_PORT"]

    with Client(client.scheduler.address) as other:
        jobs = [launch(c, train, args=(str(i),)) for i, c in enumerate([client, other, client])]
        results = [job.result(90) for job in jobs]
    assert [[r[:2] for r in ranks] for ranks in results] == [[(3.0, i)] * 2 for i in "012"]


def test_a_real_model_trains_with_data_loader_processes(client: Client) -> None:
    def train() -> list[float]:
        from torch.nn.parallel import DistributedDataParallel
        from torch.utils.data import DataLoader, TensorDataset

        torch.manual_seed(0)
        model = DistributedDataParallel(torch.nn.Linear(4, 1))
        data = DataLoader(TensorDataset(torch.rand(32, 4)), batch_size=8, num_workers=2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for (batch,) in data:
            optimizer.zero_grad()
            model(batch * (dist.get_rank() + 1)).pow(2).mean().backward()
            optimizer.step()
        return [float(p.sum()) for p in model.parameters()]

    first, second = launch(client, train).result(60)
    assert first == second


def test_several_ranks_share_a_worker(client: Client) -> None:
    job = launch(client, total, options=LaunchOptions(n_ranks=3, ranks_per_worker=2))
    assert job.result(60) == [6.0] * 3


def test_lambdas_closures_and_methods_travel(client: Client) -> None:
    class Trainer:
        def __init__(self, scale: int) -> None:
            self.scale = scale

        def train(self) -> int:
            return self.scale * dist.get_world_size()

    assert launch(client, Trainer(5).train).result(60) == [10, 10]
    offset = 7
    assert launch(client, lambda: dist.get_rank() + offset).result(60) == [7, 8]


def test_a_large_result_arrives_whole(client: Client) -> None:
    size = 50_000_000

    def train() -> bytes:
        return bytes([dist.get_rank() + 1]) * size

    first, second = launch(client, train).result(90)
    assert (len(first), len(second), second[-1]) == (size, size, 2)


def test_code_that_makes_its_own_process_group_works_as_under_torchrun(client: Client) -> None:
    def script() -> float:
        assert not dist.is_initialized()
        dist.init_process_group("gloo")
        return total()

    job = launch(client, script, options=LaunchOptions(init_process_group=False))
    assert job.result(60) == [3.0, 3.0]


def test_dask_works_inside_a_rank(client: Client) -> None:
    def train() -> int:
        with Client() as inner:
            return int(inner.submit(lambda: 41, workers=None, pure=False).key is not None)

    assert launch(client, train).result(60) == [1, 1]


def test_what_a_rank_registered_at_exit_runs(client: Client, tmp_path: Any) -> None:
    def train(folder: str) -> None:
        import atexit

        path = os.path.join(folder, os.environ["RANK"])
        atexit.register(lambda: open(path, "w").close())

    launch(client, train, args=(str(tmp_path),)).result(60)
    assert sorted(os.listdir(tmp_path)) == ["0", "1"]


def test_zero_ranks_run_here_in_a_group_of_one(client: Client) -> None:
    def train(x: int) -> tuple[int, int, int, str]:
        return x, dist.get_world_size(), os.getpid(), current_rank().job_id

    before = dict(os.environ)
    job = launch(client, train, args=(1,), options=LaunchOptions(n_ranks=0))
    assert job.result() == [(1, 1, os.getpid(), job.job_id)]
    assert dict(os.environ) == before
    assert not dist.is_initialized()
    with pytest.raises(NotInRankError, match="outside a rank"):
        current_rank()


def test_more_ranks_than_workers_is_said_in_time(client: Client) -> None:
    options = LaunchOptions(n_ranks=5, wait_timeout_s=0.5)
    with pytest.raises(NotEnoughWorkersError, match="5 ranks need 5 workers"):
        launch(client, total, options=options)


def test_no_workers_at_all_is_said_in_time() -> None:
    with (
        LocalCluster(n_workers=0, processes=True, dashboard_address=":0") as empty,
        Client(empty) as client,
        pytest.raises(NotEnoughWorkersError, match="running: 0"),
    ):
        launch(client, total, options=LaunchOptions(wait_timeout_s=0.5))


def test_the_wrong_argument_is_named(client: Client) -> None:
    with pytest.raises(TypeError, match=r"distributed\.Client"):
        launch("tcp://127.0.0.1:8786", total)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="callable"):
        launch(client, 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no worker is called 'nobody'"):
        launch(client, total, options=LaunchOptions(workers=["nobody"]))
    with pytest.raises(TypeError, match="cannot be pickled"):
        launch(client, total, args=(threading.Lock(),))


def test_a_wrong_backend_gives_torchs_own_message(client: Client) -> None:
    with pytest.raises(RankFailedError, match="nonsense") as caught:
        launch(client, total, options=LaunchOptions(backend="nonsense")).result(60)
    assert isinstance(caught.value.__cause__, Exception)


def test_threads_of_the_process_are_named(client: Client) -> None:
    def train() -> list[str]:
        return [t.name for t in threading.enumerate() if t is not threading.main_thread()]

    assert all("ddp-control" in names for names in launch(client, train).result(60))


def test_importing_the_package_does_not_import_torch_or_dask() -> None:
    import subprocess

    code = "import sys, ddp_core; print('torch' in sys.modules, 'distributed' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["False", "False"]


def test_a_process_that_the_function_forked_is_no_rank(client: Client) -> None:
    def train() -> str:
        pid = os.fork()
        if pid == 0:
            return "copy"
        os.waitpid(pid, 0)
        return "rank"

    assert launch(client, train).result(60) == ["rank", "rank"]


def test_dask_futures_among_the_arguments_are_replaced_by_their_results(client: Client) -> None:
    number = client.submit(lambda: 42, pure=False)
    assert (
        launch(client, lambda x, y: x + y, args=(number,), kwargs={"y": 1}).result(60) == [43] * 2
    )
    futures = run(client, lambda x, y: x - y, number, y=client.scatter(2))
    assert client.gather(futures) == [40, 40]


class Trainer:
    async def __call__(self) -> int:
        return 1

    async def fit(self, epochs: int) -> int:
        return epochs


async def in_steps() -> AsyncIterator[int]:
    yield 1


def in_turns() -> Iterator[int]:
    yield 1


@pytest.mark.parametrize(
    ("fn", "said"),
    [
        (Trainer().fit, r"Trainer\.fit is a coroutine function.*asyncio\.run"),
        (functools.partial(Trainer().fit, 3), r"fit.* is a coroutine function.*asyncio\.run"),
        (Trainer(), r"Trainer.* is a coroutine function.*asyncio\.run"),
        (in_steps, r"in_steps is an asynchronous generator function.*asyncio\.run"),
        (in_turns, r"in_turns is a generator function.*iterates"),
    ],
)
def test_a_function_of_which_a_call_runs_nothing_is_refused(
    client: Client, fn: Any, said: str
) -> None:
    for start in (launch, run):
        with pytest.raises(TypeError, match=said):
            start(client, fn)
    with pytest.raises(TypeError, match=said):
        launch(client, fn, options=LaunchOptions(n_ranks=0))


def test_a_forgotten_comma_is_found_at_the_call(client: Client) -> None:
    wrong: Any = "s3://bucket/train"
    with pytest.raises(TypeError, match=r"args=\('s3://bucket/train',\)"):
        launch(client, print, args=wrong)
    wrong = [1]
    with pytest.raises(TypeError, match="kwargs must map names"):
        launch(client, print, kwargs=wrong)
