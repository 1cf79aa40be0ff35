from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
from conftest import wait_for
from distributed import Client, LocalCluster

from ddp_results import CheckpointError, DaskResultsHandler, PathError, open_run, open_sink
from fault_proxy import Fault, FaultProxy
from s3_server import S3Server

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.xdist_group("cluster")


def test_checkpoint_is_read_back_as_saved(client: Client, tmp_path: Path) -> None:
    handler = DaskResultsHandler()
    state = torch.nn.Linear(300, 2000).state_dict()

    def work() -> None:
        for step in (1, 2):
            handler.save_checkpoint(f"step-{step}", state, step=step, metrics={"loss": 1 / step})

    handler.process_results(tmp_path, [client.submit(work, pure=False)])
    run = open_run(tmp_path)
    latest = run.latest_checkpoint()
    assert latest is not None
    assert (latest.name, latest.step, latest.metrics) == ("step-2", 2, {"loss": 0.5})
    assert torch.equal(latest.load()["weight"], state["weight"])
    assert run.best_checkpoint("loss", "max").name == "step-1"
    plain = torch.load(tmp_path / latest.path, weights_only=True)
    assert torch.equal(plain["bias"], state["bias"])


def test_what_could_not_be_read_back_is_refused_when_saved() -> None:
    with pytest.raises(CheckpointError, match="weights_only"):
        DaskResultsHandler().save_checkpoint("x", {"model": Path("a")})


def test_name_of_a_checkpoint_is_one_segment() -> None:
    with pytest.raises(PathError, match="single path segment"):
        DaskResultsHandler().save_checkpoint("a/b", {})


def test_only_the_last_and_the_best_are_kept(client: Client, tmp_path: Path) -> None:
    handler = DaskResultsHandler()

    def work() -> None:
        for step, loss in enumerate([5, 1, 4, 3, 2]):
            handler.save_checkpoint(
                f"step-{step}",
                {"w": torch.full((3,), step)},
                step=step,
                metrics={"loss": loss},
                keep_last=2,
                keep_best="loss",
            )

    handler.process_results(tmp_path, [client.submit(work, pure=False)])
    names = [checkpoint.name for checkpoint in open_run(tmp_path).checkpoints()]
    assert names == ["step-1", "step-3", "step-4"]
    assert len(list(tmp_path.glob("checkpoints/*/*.pt"))) == 3


def test_what_was_just_saved_is_kept_though_its_step_is_not_the_last(tmp_path: Path) -> None:
    handler = DaskResultsHandler()
    for step in (100, 60, 70):
        handler.save_checkpoint(f"step-{step}", {"w": torch.ones(1)}, step=step, keep_last=1)
    handler.process_results(tmp_path)
    names = [checkpoint.name for checkpoint in open_run(tmp_path).checkpoints()]
    assert names == ["step-70", "step-100"]


@pytest.mark.parametrize("metrics", [None, {"accuracy": 1}], ids=["none", "another"])
def test_keeping_the_best_needs_its_value(metrics: dict[str, float] | None) -> None:
    with pytest.raises(ValueError, match=r"keep_best='loss' needs the value, metrics=\{'loss'"):
        DaskResultsHandler().save_checkpoint("x", {}, metrics=metrics, keep_best="loss")


def test_checkpoint_without_the_value_does_not_drive_out_the_best(
    client: Client, tmp_path: Path
) -> None:
    handler = DaskResultsHandler()

    def work() -> None:
        for step, loss in enumerate([2, 1, None, None]):
            handler.save_checkpoint(
                f"step-{step}", {}, step=step, metrics={"loss": loss}, keep_best="loss"
            )

    handler.process_results(tmp_path, [client.submit(work, pure=False)])
    names = [checkpoint.name for checkpoint in open_run(tmp_path).checkpoints()]
    assert names == ["step-1", "step-3"]


def test_reader_sees_a_whole_checkpoint_while_its_name_is_saved_again(
    client: Client, tmp_path: Path
) -> None:
    handler, n_saves = DaskResultsHandler(), 40

    def work() -> None:
        for step in range(n_saves):
            handler.save_checkpoint("last", {"w": torch.full((50_000,), step)}, step=step)

    future = client.submit(work, pure=False)
    (tmp_path / "out").mkdir()
    seen: list[int] = []
    stop = threading.Event()

    def read() -> None:
        run = open_run(tmp_path / "out")
        while not stop.is_set():
            latest = run.latest_checkpoint()
            if latest is not None:
                weights = latest.load()["w"]
                assert (weights == weights[0]).all()
                seen.append(int(weights[0]))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        handler.process_results(tmp_path / "out", [future])
        last = open_run(tmp_path / "out").latest_checkpoint()
        assert last is not None
        assert int(last.load()["w"][0]) == n_saves - 1
    finally:
        stop.set()
        reader.join()
    assert seen == sorted(seen)
    assert len(list((tmp_path / "out").glob("checkpoints/last/*.pt"))) == 1


def test_reader_sees_a_whole_checkpoint_although_its_writer_is_killed(
    client: Client, cluster: LocalCluster, tmp_path: Path
) -> None:
    handler, folder, stop = DaskResultsHandler(), tmp_path / "out", tmp_path / "stop"
    folder.mkdir()

    def work() -> int:
        step = 0
        while not stop.exists():
            step += 1
            handler.save_checkpoint("last", {"w": torch.full((600_000,), step)}, step=step)
        return step

    future = client.submit(work, pure=False)
    program = """
        import sys
        from distributed import Client
        from ddp_results import DaskResultsHandler

        class Pending:
            def done(self): return False

        with Client(sys.argv[1]):
            DaskResultsHandler(sys.argv[2]).process_results(sys.argv[3], [Pending()])
    """
    command = [sys.executable, "-c", textwrap.dedent(program), cluster.scheduler_address]

    def read() -> int:
        latest = open_run(folder).latest_checkpoint()
        if latest is None:
            return 0
        weights = latest.load()["w"]
        assert (weights == weights[0]).all()
        return int(weights[0])

    try:
        for _ in range(3):
            writer = subprocess.Popen([*command, handler.pub_sub_key, str(folder)])
            goal, deadline = read() + 5, time.monotonic() + 60
            while read() < goal:
                assert time.monotonic() < deadline, "no newer checkpoint came"
            writer.send_signal(signal.SIGKILL)
            writer.wait()
            assert read() >= 1
    finally:
        stop.touch()
    handler.process_results(folder, [future])
    latest = open_run(folder).latest_checkpoint()
    assert latest is not None
    assert int(latest.load()["w"][0]) == latest.step == future.result()
    assert len(list(folder.glob("checkpoints/last/*.pt"))) == 1


def test_manifest_is_seen_in_s3_only_when_its_file_is_there(
    s3: S3Server, bucket: str, proxy: FaultProxy
) -> None:
    handler, state = DaskResultsHandler(), {"w": torch.ones(3)}
    proxy.script([Fault(delay_s=3)], path=".pt")
    handler.save_checkpoint("slow", state, step=1)
    sink = open_sink(f"s3://{bucket}/run", endpoint_url=proxy.endpoint_url)
    thread = threading.Thread(target=handler.process_results, args=(sink,))
    thread.start()
    try:
        manifest = "run/checkpoints/slow/manifest.json"
        wait_for(lambda: manifest in s3.list_keys(bucket))
        run = open_run(f"s3://{bucket}/run")
        latest = run.latest_checkpoint()
        assert latest is not None
        assert torch.equal(latest.load()["w"], state["w"])
        run.close()
    finally:
        thread.join(60)
