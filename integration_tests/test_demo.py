"""The demo does what the README says, and leaves nothing running, however it ends."""

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ddp_results import open_run

pytestmark = pytest.mark.xdist_group("cluster")

DEMO = Path(__file__).resolve().parent.parent / "tools" / "demo.py"


class Demo:
    """The demo in a process group of its own; its descendants are known by a variable."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.mark = f"DEMO_MARK_{uuid.uuid4().hex}"
        self.output = folder / "output.txt"
        self.results = folder / "demo-results"
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, DEMO, "--results", self.results, *arguments],
                env={**os.environ, self.mark: "1"},
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def descendants(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                if self.mark in process.environ() and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def wait_until_nothing_runs(self, timeout_s: float) -> list[psutil.Process]:
        deadline = time.monotonic() + timeout_s
        while (left := self.descendants()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return left

    def wait_for_output(self, pattern: str, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not re.search(pattern, self.text()):
            assert self.process.poll() is None, self.text()
            assert time.monotonic() < deadline, self.text()
            time.sleep(0.1)

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def close(self) -> None:
        for process in self.descendants():
            process.kill()
        self.process.wait(10)


@pytest.fixture
def demos() -> Iterator[list[Demo]]:
    started: list[Demo] = []
    yield started
    for demo in started:
        demo.close()


@pytest.mark.timeout(300)
def test_demo_trains_on_digits_from_s3_and_leaves_nothing_running(
    tmp_path: Path, demos: list[Demo]
) -> None:
    demo = Demo(tmp_path)
    demos.append(demo)
    assert demo.process.wait(280) == 0, demo.text()
    assert demo.wait_until_nothing_runs(10) == []

    accuracy = re.search(r"^accuracy +([\d.]+)%", demo.text(), re.MULTILINE)
    assert accuracy is not None
    assert float(accuracy.group(1)) > 95
    assert "epoch 3: accuracy" in demo.text()
    assert (demo.results / "loss.png").read_bytes().startswith(b"\x89PNG")
    run = open_run(demo.results)
    losses = [point["metrics"]["loss"] for point in run.metrics("loss")]
    assert sum(losses[-20:]) < sum(losses[:20]) / 4
    checkpoint = run.latest_checkpoint()
    assert checkpoint is not None
    assert checkpoint.name == "epoch-7"


@pytest.mark.timeout(200)
@pytest.mark.parametrize("moment", ["uploading the digits", "epoch 0: accuracy"])
def test_demo_leaves_nothing_running_after_ctrl_c(
    tmp_path: Path, demos: list[Demo], moment: str
) -> None:
    demo = Demo(tmp_path, "--epochs", "1000")
    demos.append(demo)
    demo.wait_for_output(moment, 100)
    os.killpg(demo.process.pid, signal.SIGINT)  # what a terminal does
    assert demo.process.wait(60) != 0
    assert demo.wait_until_nothing_runs(20) == []
    assert "interrupted" in demo.text()
    assert "Traceback" not in demo.text().partition("interrupted")[2]
