"""Compare ddp-core with torchrun: cold launch, warm launch, and the time of a training step.

python tools/bench/bench_launch.py [--ranks 2] [--repeats 3]
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

STEPS = 200


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
    layers = [torch.nn.Linear(256, 256) for _ in range(4)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data, times = torch.rand(64, 256), []
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


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    plain = statistics.median(torchrun(given.ranks, "reduce_once")[0] for _ in range(given.repeats))
    options = LaunchOptions(backend="gloo", env={"OMP_NUM_THREADS": "1"})
    cold, warm, steps, steps_plain = [], [], [], []
    for _ in range(given.repeats):
        with (
            LocalCluster(n_workers=given.ranks, threads_per_worker=1, dashboard_address=":0") as c,
            Client(c) as client,
        ):
            cold.append(seconds(lambda: launch(client, reduce_once, options=options).result()))
            warm.append(seconds(lambda: launch(client, reduce_once, options=options).result()))
            steps.append(launch(client, step_time, options=options).result()[0])
        # In turns, since what disturbs this machine comes and goes.
        steps_plain.append(float(torchrun(given.ranks, "step_time")[1].split()[-1]))
    print(f"torchrun        {plain:6.2f} s")
    for name, times in (("cold launch", cold), ("warm launch", warm)):
        took = statistics.median(times)
        print(f"{name:<15} {took:6.2f} s   ratio {took / plain:.2f}")
    step, step_plain = statistics.median(steps), statistics.median(steps_plain)
    print(f"training step   {step * 1e3:6.2f} ms  ratio {step / step_plain:.2f}")


if __name__ == "__main__":
    main()
