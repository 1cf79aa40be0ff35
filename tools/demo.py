"""Train a small CNN on handwritten digits, straight from S3, on a Dask cluster of two workers.

    nox -s demo        or, with the packages installed:        python tools/demo.py

The S3 server is an embedded one and the cluster a local one, so that this runs anywhere; with your
own bucket and scheduler the rest stays as it is. Everything ends with the script, after Ctrl-C too.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from distributed import Client, LocalCluster
from PIL import Image
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import Dataset, random_split

from ddp_core import current_rank, launch
from ddp_results import DaskResultsHandler, TeeSink, open_run
from ddp_s3data import S3DataLoader, S3ImageFolder
from real_images import digits
from s3_server import S3Server


def to_tensor(image: Image.Image) -> torch.Tensor:
    """Turn a PIL image into floats, (1, 8, 8) in 0..1."""
    return torch.from_numpy(np.asarray(image.convert("L"), dtype=np.float32))[None] / 255


def digit_classifier() -> nn.Module:
    """Return a small CNN: (n, 1, 8, 8) to scores, (n, 10)."""
    return nn.Sequential(
        *[nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU()],
        *[nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64 * 4 * 4, 128), nn.ReLU(), nn.Linear(128, 10)],
    )


def train(url: str, epochs: int, results: DaskResultsHandler) -> dict[str, float]:
    """Train on four fifths of the images below `url`, test on the rest; run by every rank."""
    images = S3ImageFolder(url, transform=to_tensor)
    train_set, test_set = random_split(images, [0.8, 0.2], torch.Generator().manual_seed(0))
    loader = S3DataLoader(train_set, batch_size=32, shuffle=True)  # this rank's share of each epoch

    torch.manual_seed(0)
    device = current_rank().device
    model = DDP(digit_classifier().to(device))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    step, start = 0, time.perf_counter()
    for epoch in range(epochs):
        model.train()
        for inputs, targets in loader:
            loss = nn.functional.cross_entropy(model(inputs.to(device)), targets.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            results.log_metrics({"loss": loss.item(), "epoch": epoch}, step=step)
        accuracy = accuracy_of(model.module, test_set, device)
        results.log_metrics({"accuracy": accuracy}, step=step)
        if current_rank().rank == 0:
            print(f"epoch {epoch}: accuracy {accuracy:.1%}", flush=True)
            results.save_checkpoint(f"epoch-{epoch}", model.module.state_dict(), step=step)
    seconds = time.perf_counter() - start
    return {"accuracy": accuracy, "images_per_s": epochs * len(train_set) / seconds}


@torch.no_grad()
def accuracy_of(model: nn.Module, test_set: Dataset[Any], device: str) -> float:
    """Return the share of right answers; each rank tests a share, and all learn the total."""
    model.eval()
    right = torch.zeros(2)
    for inputs, targets in S3DataLoader(test_set, batch_size=64):
        answers = model(inputs.to(device)).argmax(1).cpu()
        right += torch.tensor([(answers == targets).sum(), len(targets)])
    dist.all_reduce(right)
    return (right[0] / right[1]).item()


def main() -> None:
    """Bring up S3 and Dask, train, and say where everything lies."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--results", type=Path, default=Path("demo-results"))
    options = parser.parse_args()

    with S3Server() as s3:
        print(f"S3 server at {s3.endpoint_url}; uploading the digits ...", flush=True)
        os.environ.update(s3.environment())
        for bucket in ("digits", "runs"):
            s3.create_bucket(bucket)
        s3.put_objects("digits", digits())

        with (
            LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster,
            Client(cluster) as client,
        ):
            results = DaskResultsHandler()
            job = launch(client, train, args=("s3://digits/", options.epochs, results))
            print(job, flush=True)
            results.process_results(TeeSink([options.results, "s3://runs/digits"]), job)
            ranks = job.result()

        run = open_run(options.results)
        checkpoint = run.latest_checkpoint()
        run.plot("loss", options.results / "loss.png")
        print(f"accuracy    {ranks[0]['accuracy']:.1%} on images not trained on")
        print(f"throughput  {ranks[0]['images_per_s']:.0f} images/s")
        print(
            f"results     {options.results}/ and {len(s3.list_keys('runs'))} objects in s3://runs"
        )
        if checkpoint is not None:
            print(f"checkpoint  {options.results / checkpoint.path}")
        print(f"loss curve  {options.results / 'loss.png'}")


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGHUP):  # a closed terminal ends it as Ctrl-C does
        signal.signal(number, signal.default_int_handler)
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted; the cluster and the S3 server have ended")
