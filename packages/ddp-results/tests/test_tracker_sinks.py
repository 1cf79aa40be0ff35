"""TensorBoard and MLflow, read back with their own readers."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest

from ddp_results import DaskResultsHandler, MLflowSink, TensorBoardSink, open_sink
from ddp_results._record import Point, Source
from ddp_results.errors import SinkUnavailableError
from ddp_results.testing import check_sink

SOURCE = Source(uid="c0ffee", rank=3, attempt=0, host="here", pid=1, job="")
POINTS = [Point(n, 1e9 + n, n * 10, {"loss": 1.0 / n, "big": 10**400}) for n in (1, 2, 5)]


@pytest.fixture
def tracking_uri(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setenv("MLFLOW_REGISTRY_URI", f"file:{tmp_path}/registry")
    monkeypatch.chdir(tmp_path)  # where the default experiment puts its artifacts
    return uri


def _scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), purge_orphaned_data=False)
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def _history(sink: MLflowSink, key: str) -> list[tuple[int, float]]:
    from mlflow import MlflowClient

    history = MlflowClient(sink.tracking_uri).get_metric_history(sink.run_id, key)
    return [(metric.step, metric.value) for metric in history]


def _status(sink: MLflowSink) -> str:
    from mlflow import MlflowClient

    return str(MlflowClient(sink.tracking_uri).get_run(sink.run_id).info.status)


def test_tensorboard_sink_keeps_the_contract(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    check_sink(lambda: TensorBoardSink(tmp_path))
    assert [step for step, _ in _scalars(tmp_path / "rank-00003", "loss")] == [10, 20, 50]
    assert (tmp_path / "a/b.txt").read_bytes() == b"new"
    binary = bytes(range(256)) * 20480  # as check_sink writes it
    assert (tmp_path / "binary").read_bytes() == binary
    assert (tmp_path / "large").read_bytes() == 2 * binary + b"!"
    assert not (tmp_path / "gone").exists()
    assert not (tmp_path / "given-up").exists()


def test_tensorboard_shows_points_once_when_another_client_sends_them_again(
    tmp_path: Path,
) -> None:
    pytest.importorskip("tensorboard")
    first = open_sink(f"tensorboard://{tmp_path}")
    first.append(SOURCE, POINTS[:2])
    (file,) = (tmp_path / "rank-00003").iterdir()
    os.truncate(file, file.stat().st_size - 10)  # a client that is killed within a record
    second = TensorBoardSink(tmp_path)
    second.append(SOURCE, POINTS)
    second.close()
    first.close()
    assert _scalars(tmp_path / "rank-00003", "loss") == [
        (10, 1.0),
        (20, 0.5),
        (50, pytest.approx(0.2)),
    ]
    assert _scalars(tmp_path / "rank-00003", "big")[0][1] == math.inf


def test_tensorboard_sink_beside_another_need_not_store_results(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    handler = DaskResultsHandler()
    handler.submit_result("a", "b")
    handler.submit_result("large", bytes(3 * 2**20))
    handler.log_metrics({"loss": 0.5, "note": "é", "none": None}, step=7)
    handler.process_results(TensorBoardSink(tmp_path, results=False))
    (folder,) = tmp_path.iterdir()
    assert _scalars(folder, "loss") == [(7, 0.5)]


def test_mlflow_sink_keeps_the_contract(tracking_uri: str, tmp_path: Path) -> None:
    run_ids: list[str | None] = []

    def make() -> Any:
        sink = MLflowSink("digits", run_id=run_ids[-1] if run_ids else None)
        sink.open()
        run_ids.append(sink.run_id)
        return sink

    check_sink(make)
    sink = make()
    assert [step for step, _ in _history(sink, "loss/rank-3")] == [10, 20, 50]
    found = {path.name: path.read_bytes() for path in tmp_path.rglob("artifacts/**/*.*")}
    assert found["b.txt"] == b"new"
    assert list(tmp_path.rglob("artifacts/large"))
    assert not list(tmp_path.rglob("artifacts/gone"))
    assert not list(tmp_path.rglob("artifacts/given-up"))


def test_mlflow_run_that_was_given_is_not_ended(tracking_uri: str) -> None:
    own = MLflowSink("digits")
    own.append(SOURCE, POINTS)
    assert _status(own) == "RUNNING"
    given = MLflowSink("digits", run_id=own.run_id)
    given.open()
    given.close()
    assert _status(own) == "RUNNING"
    own.close()
    assert _status(own) == "FINISHED"
    own.open()  # it goes on
    assert _status(own) == "RUNNING"
    own.close()
    own.close()
    assert _status(own) == "FINISHED"


def test_mlflow_logs_points_once_when_another_client_sends_them_again(
    tracking_uri: str,
) -> None:
    first = MLflowSink("digits", tracking_uri=tracking_uri)
    first.append(SOURCE, POINTS[:2])
    second = MLflowSink("digits", run_id=first.run_id)
    second.append(SOURCE, POINTS)
    assert _history(second, "loss/rank-3") == [(10, 1.0), (20, 0.5), (50, 0.2)]


def test_mlflow_gets_everything_that_is_logged(tracking_uri: str) -> None:
    handler = DaskResultsHandler()
    for step in range(2500):
        handler.log_metrics({"train loss (é)": step, "note": f"at {step}"}, step=step)
    sink = open_sink("mlflow://digits", run_name="first")
    assert isinstance(sink, MLflowSink)
    handler.process_results(sink)
    assert _status(sink) == "FINISHED"
    assert _history(sink, "train loss _é_") == [(step, float(step)) for step in range(2500)]


def test_mlflow_server_that_is_not_there_is_said_at_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    sink = MLflowSink("digits", tracking_uri="http://127.0.0.1:9")
    with pytest.raises(SinkUnavailableError, match="tracking_uri"):
        sink.open()
