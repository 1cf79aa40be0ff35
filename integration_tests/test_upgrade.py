"""Code written for dask-pytorch-ddp 0.2.2 runs, and its known faults are gone."""

import importlib
import json
import os
import pickle
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from distributed import Client
from torchvision import models

from dask_pytorch_ddp.data import S3ImageFolder
from dask_pytorch_ddp.dispatch import run
from dask_pytorch_ddp.results import DaskResultsHandler
from real_images import photographs
from s3_server import S3Server

pytestmark = pytest.mark.xdist_group("cluster")

SCRIPT = Path(__file__).with_name("train_as_in_0_2_2.py")
IMAGES = 16
STEPS_PER_RANK = 2 * IMAGES // 4  # epochs * images / batch size: each rank saw all images in 0.2.2


@pytest.fixture(scope="module")
def bucket(s3: S3Server) -> str:
    s3.create_bucket("photos")
    files = photographs(IMAGES)
    s3.put_objects("photos", {f"animals/train/{name}": body for name, body in files.items()})
    return "photos"


@pytest.mark.timeout(300)
def test_training_script_of_the_old_readme_runs(bucket: str, tmp_path: Path) -> None:
    results = tmp_path / "results"
    done = subprocess.run(
        [sys.executable, SCRIPT, bucket, "animals/train", results],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr

    for rank in (0, 1):
        steps = [json.loads(path.read_text()) for path in (results / f"worker/{rank}").iterdir()]
        assert sorted(step["count"] for step in steps) == list(range(1, STEPS_PER_RANK + 1))
        assert {step["worker"] for step in steps} == {rank}
        assert all(step["loss"] > 0 for step in steps)
    checkpoints = sorted(results.glob("checkpoint-*.pkl"))
    assert len(checkpoints) == STEPS_PER_RANK // 2
    state = pickle.loads(checkpoints[-1].read_bytes())
    model = models.resnet18(weights=None)
    model.load_state_dict({name.removeprefix("module."): value for name, value in state.items()})


def test_old_import_names_are_there() -> None:
    for package in ("dask_pytorch_ddp", "dask_pytorch"):
        assert importlib.import_module(f"{package}.dispatch").run is run
        assert importlib.import_module(f"{package}.data").S3ImageFolder is S3ImageFolder
        assert (
            importlib.import_module(f"{package}.results").DaskResultsHandler is DaskResultsHandler
        )


def test_positional_arguments_reach_the_function(client: Client) -> None:
    def train(first: int, second: int, *, third: int) -> tuple[int, int, int]:
        return first, second, third

    futures = run(client, train, 1, 2, third=3, backend="gloo")
    assert client.gather(futures) == [(1, 2, 3), (1, 2, 3)]


def test_local_rank_is_passed_when_asked_for(client: Client) -> None:
    futures = run(client, lambda local_rank: local_rank, backend="gloo", pass_local_rank=True)
    assert client.gather(futures) == [0, 1]


def test_the_same_call_twice_trains_twice(client: Client, tmp_path: Path) -> None:
    def train(folder: str) -> int:
        path = Path(folder, str(dist.get_rank()))
        with path.open("a") as file:
            file.write("trained\n")
        return path.read_text().count("trained")

    first = client.gather(run(client, train, folder=str(tmp_path), backend="gloo"))
    second = client.gather(run(client, train, folder=str(tmp_path), backend="gloo"))
    assert (first, second) == ([1, 1], [2, 2])


def test_a_listener_on_the_old_fixed_port_does_not_matter(client: Client) -> None:
    def train() -> int:
        total = torch.ones(1)
        dist.all_reduce(total)
        return int(total)

    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("", 23456))
        listener.listen()
        assert client.gather(run(client, train, backend="gloo")) == [2, 2]


def test_environment_of_the_workers_stays_as_it_was(client: Client) -> None:
    before = client.run(lambda: dict(os.environ))
    client.gather(run(client, lambda: None, backend="gloo"))
    assert client.run(lambda: dict(os.environ)) == before


def test_results_submitted_before_processing_starts_are_kept(
    client: Client, tmp_path: Path
) -> None:
    handler = DaskResultsHandler()

    def train() -> None:
        handler.submit_result(f"rank-{dist.get_rank()}.txt", "early")

    futures = run(client, train, backend="gloo")
    client.gather(futures)
    handler.process_results(str(tmp_path), futures)
    assert sorted(path.name for path in tmp_path.glob("rank-*")) == ["rank-0.txt", "rank-1.txt"]


def test_class_is_the_directory_that_holds_the_image(bucket: str) -> None:
    dataset = S3ImageFolder(bucket, "animals")
    assert dataset.classes == ["china", "flower"]
    assert len(dataset) == IMAGES
    image, target = dataset[0]
    assert image.mode == "RGB"
    assert target == 0


def test_images_come_over_few_connections_and_without_boto3(bucket: str) -> None:
    """0.2.2 built a boto3 resource, with its own connections, for every image."""
    program = (
        "import sys, psutil\n"
        "from dask_pytorch_ddp.data import S3ImageFolder\n"
        "dataset = S3ImageFolder('photos', 'animals')\n"
        "for _ in range(10):\n"
        "    for index in range(len(dataset)):\n"
        "        dataset[index]\n"
        "assert 'boto3' not in sys.modules\n"
        "print(len(psutil.Process().net_connections()))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=True
    )
    assert int(done.stdout) <= 4
