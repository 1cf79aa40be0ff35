"""`S3ResultsHandler` in tasks of Dask: the worker's process goes on when the task has ended."""

from __future__ import annotations

import os

import pytest
from distributed import Client

from ddp_results import S3ResultsHandler, open_run
from s3_server import S3Server

pytestmark = pytest.mark.xdist_group("cluster")


def _train(rank: int, handler: S3ResultsHandler) -> None:
    for step in range(100):
        handler.log_metrics({"loss": 1.0}, step=step)
    handler.submit_result(f"{rank}", "x")
    if rank == 2:
        raise RuntimeError("rank 2 fails")


@pytest.fixture(autouse=True)
def _workers_know_the_server(s3: S3Server, client: Client) -> None:
    values = s3.environment()
    client.run(lambda: os.environ.update(values))


def test_all_is_stored_when_process_results_returns(bucket: str, client: Client) -> None:
    handler = S3ResultsHandler(f"s3://{bucket}/run")
    handler.process_results(None, client.map(_train, range(2), handler=handler, pure=False))
    run = open_run(f"s3://{bucket}/run")
    assert len(run.metrics()) == 200
    assert run.results() == ["0", "1"]
    run.close()


def test_all_is_stored_before_a_failure_is_raised(bucket: str, client: Client) -> None:
    handler = S3ResultsHandler(f"s3://{bucket}/run")
    with pytest.raises(RuntimeError, match="rank 2 fails"):
        handler.process_results(None, client.submit(_train, 2, handler, pure=False))
    run = open_run(f"s3://{bucket}/run")
    assert len(run.metrics()) == 100
    assert run.results() == ["2"]
    run.close()


def test_futures_in_the_place_of_the_prefix_are_refused(
    client: Client,
) -> None:
    handler = S3ResultsHandler("s3://bucket/run")
    future = client.submit(int, pure=False)
    with pytest.raises(TypeError, match=r"process_results\(None, futures\)"):
        handler.process_results([future])
    handler.process_results("ignored", future)
