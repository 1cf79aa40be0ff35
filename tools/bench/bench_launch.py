"""Compare ddp-core with torchrun: cold launch, warm launch, and the time of a training step.

python tools/bench/bench_launch.py [--ranks 2] [--repeats 5]

What disturbs a machine comes and goes, so both are measured in turns, and each turn gives a ratio.
torchrun takes its turns beside the same idle Dask cluster: the question is what the launcher adds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from distributed import Client, LocalCluster

from ddp_core import LaunchOptions, launch

STEPS = 120
WIDTH, DEPTH, BATCH = 512, 4, 256


def reduce_once() -> None:
    """One all-reduce, the least that a job can do."""
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.ones(1))


def step_time() -> float:
    """Median seconds of a DDP training step."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data, times = torch.rand(BATCH, WIDTH), []
    for _ in range(STEPS):
        began = time.perf_counter()
        optimizer.zero_grad()
        model(data).pow(2).mean().backward()
        optimizer.step()
        times.append(time.perf_counter() - began)
    return statistics.median(times[STEPS // 4 :])


def torchrun(ranks: int, name: str) -> tuple[float, str]:
    """Seconds that torchrun needs for a function of this file, and what rank 0 printed."""
    script = (
        "import os, sys, torch.distributed as dist\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        f"dist.init_process_group('gloo')\nfrom bench_launch import {name}\n"
        f"value = {name}()\nif os.environ['RANK'] == '0': print('value', value)\n"
        "dist.destroy_process_group()\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "script.py")
        path.write_text(script)
        began = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--standalone",
             "--nproc-per-node", str(ranks), str(path)],
            capture_output=True, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        return time.perf_counter() - began, done.stdout


def seconds(action: Callable[[], object]) -> float:
    """How long ``action`` takes."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def measure(ranks: int) -> dict[str, tuple[float, float]]:
    """One turn: seconds of ddp-core and of torchrun, by what was measured."""
    options = LaunchOptions(backend="gloo", env={"OMP_NUM_THREADS": "1"})
    with (
        LocalCluster(n_workers=ranks, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        cold = seconds(lambda: launch(client, reduce_once, options=options).result())
        warm = seconds(lambda: launch(client, reduce_once, options=options).result())
        plain = torchrun(ranks, "reduce_once")[0]
        step = launch(client, step_time, options=options).result()[0]
        step_plain = float(torchrun(ranks, "step_time")[1].split()[-1])
    return {
        "cold launch": (cold, plain),
        "second launch": (warm, plain),
        "training step": (step, step_plain),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    turns = []
    for n in range(given.repeats):
        turns.append(measure(given.ranks))
        shown = ", ".join(f"{name} {a / b:.2f}" for name, (a, b) in turns[-1].items())
        print(f"turn {n + 1} of {given.repeats}: {shown}", file=sys.stderr)
    print(f"| {given.ranks} ranks | ddp-core | torchrun | ratio | smallest | largest |")
    print("|---|---|---|---|---|---|")
    for name in turns[0]:
        ours, theirs = zip(*(turn[name] for turn in turns), strict=True)
        ratios = sorted(a / b for a, b in zip(ours, theirs, strict=True))
        print(
            f"| {name} | {statistics.median(ours):.3f} s | {statistics.median(theirs):.3f} s "
            f"| {statistics.median(ratios):.2f} | {ratios[0]:.2f} | {ratios[-1]:.2f} |"
        )


if __name__ == "__main__":
    main()
