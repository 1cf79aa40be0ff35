"""One measurement of one peer, in a process of its own: JSON comes in, JSON goes out."""

from __future__ import annotations

import gc
import json
import os
import pickle
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from bench.s3_peers import OURS, Shuffled, Task, imported, loader, reader

Result = dict[str, float]


def cpu_of_a_get(task: Task) -> Result:
    """CPU seconds and seconds of one GET."""
    read = reader(task)
    keys = task.keys
    read(keys[: task.warm])
    wanted = (keys * (task.count // len(keys) + 1))[: task.count]
    gc.collect()
    wall, cpu = time.perf_counter(), time.process_time()
    read(wanted)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {"cpu_ms": 1000 * cpu / task.count, "per_s": task.count / wall}


def images(task: Task) -> Result:
    """Images per second of one epoch, after a short one, and CPU per image of both sides."""
    sampler = Shuffled(1, task.warm)
    source = loader(task, sampler, transform())
    for _ in source:
        pass
    sampler.count = task.count
    servers = [psutil.Process(pid) for pid in task.servers]
    before, served, started = _cpu(_family()), _cpu(servers), time.perf_counter()
    seen = 0
    for batch in source:
        seen += len(batch[0])
    took = time.perf_counter() - started
    cpu, served = _cpu(_family()) - before, _cpu(servers) - served
    assert seen == task.count, f"{seen} images came, {task.count} were asked for"
    return {"per_s": seen / took, "cpu_ms": 1000 * cpu / seen, "server_ms": 1000 * served / seen}


def listing(task: Task) -> Result:
    """CPU seconds of listing the prefix."""
    find = _list_ours if task.peer == OURS else _list_aiobotocore
    find(task)
    cpu = time.process_time()
    found = find(task)
    cpu = time.process_time() - cpu
    assert found == task.count, f"{found} keys listed, {task.count} are there"
    return {"cpu_ms": 1000 * cpu, "per_1000_ms": 1_000_000 * cpu / found}


def million(task: Task) -> Result:
    """What an index of so many synthetic keys needs beside the text of its keys."""
    module = imported("ddp_s3data._index")
    builder = module.IndexBuilder("bucket", "train/")
    text = 0
    for group in range(task.count // 1000):
        numbers = [group * 1000 + each for each in range(1000)]
        keys = [f"train/n{group:08d}/n{group:08d}_{n * 7919 % 10**6}.JPEG" for n in numbers]
        etags = [f"{n * 0x9E3779B97F4A7C15F39CC0605CEDC835 % 2**128:032x}" for n in numbers]
        builder.add(keys, [110_000 + n % 50_000 for n in numbers], etags)
        text += sum(map(len, keys)) - 6 * len(keys)
    index = builder.build()
    started = time.perf_counter()
    packed = pickle.dumps(index, protocol=5)
    loaded = pickle.loads(packed)
    pickled = time.perf_counter() - started
    assert loaded.key(task.count - 1) == keys[-1]
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "index"
        started = time.perf_counter()
        index.save(path)
        saved, size = time.perf_counter() - started, path.stat().st_size
        started = time.perf_counter()
        module.Index.load(path)
        read = time.perf_counter() - started
    return {
        "bytes_per_key": (index.nbytes - text) / task.count,
        "text_per_key": text / task.count,
        "pickled_per_key": len(packed) / task.count,
        "pickle_and_load_s": pickled,
        "save_s": saved,
        "load_s": read,
        "file_bytes_per_key": size / task.count,
    }


def epochs(task: Task) -> Result:
    """Resident memory of all processes after each of five epochs, in MB."""
    sampler = Shuffled(1, task.count)
    source = loader(task, sampler, transform())
    sizes = []
    for _ in range(5):
        for _ in source:
            pass
        gc.collect()
        sizes.append(_family_rss() / 1e6)
    return {f"epoch_{number + 1}": size for number, size in enumerate(sizes)}


def large(task: Task) -> Result:
    """The highest resident memory beyond the start while large objects are read, in MB."""
    package = imported("ddp_s3data")
    options = package.S3Options(inflight_bytes=task.settings["inflight_bytes"])
    dataset = package.S3Dataset(task.bucket, task.prefix, _length, options=options)
    with _peak() as peak:
        for batch in package.S3DataLoader(dataset, batch_size=4, num_workers=0):
            assert len(batch) == min(4, len(dataset))
    return {"peak_mb": peak[0] / 1e6, "budget_mb": task.settings["inflight_bytes"] / 1e6}


def transform() -> Callable[[Any], Any]:
    """Return the transform of the README of dask-pytorch-ddp 0.2.2."""
    transforms = imported("torchvision.transforms")
    made: Callable[[Any], Any] = transforms.Compose(
        [transforms.Resize(256), transforms.CenterCrop(250), transforms.ToTensor()]
    )
    return made


def _length(found: Any) -> int:
    return len(found.data)


def _list_ours(task: Task) -> int:
    listing = imported("ddp_s3data._listing")
    options = imported("ddp_s3data").S3Options()
    return len(listing.list_index(task.bucket, task.prefix, options))


def _list_aiobotocore(task: Task) -> int:
    import asyncio

    session = imported("aiobotocore.session").get_session()

    async def find() -> int:
        async with session.create_client("s3") as client:
            pages = client.get_paginator("list_objects_v2")
            found = 0
            async for page in pages.paginate(Bucket=task.bucket, Prefix=task.prefix):
                found += len([each["Key"] for each in page["Contents"]])
            return found

    return asyncio.run(find())


def _family() -> Sequence[psutil.Process]:
    me = psutil.Process()
    return [me, *me.children(recursive=True)]


def _cpu(processes: Sequence[psutil.Process]) -> float:
    times = [each.cpu_times() for each in processes]
    return float(sum(each.user + each.system for each in times))


def _family_rss() -> float:
    """Memory of all processes, what they share counted once (`uss`)."""
    total = 0.0
    for each in _family():
        with suppress(psutil.Error):
            total += each.memory_full_info().uss
    return total


@contextmanager
def _peak() -> Iterator[list[float]]:
    me, stop = psutil.Process(), threading.Event()
    base = me.memory_info().rss
    highest = [0.0]

    def watch() -> None:
        while not stop.wait(0.01):
            highest[0] = max(highest[0], float(me.memory_info().rss - base))

    thread = threading.Thread(target=watch, name="ddp-bench-memory")
    thread.start()
    try:
        yield highest
    finally:
        stop.set()
        thread.join()


MEASURES: dict[str, Callable[[Task], Result]] = {
    each.__name__: each for each in (cpu_of_a_get, images, listing, million, epochs, large)
}


def main() -> None:
    """Read a task, do it, print the result on the last line."""
    task = Task(**json.load(sys.stdin))
    try:
        result: dict[str, Any] = dict(MEASURES[task.measure](task))
    except ModuleNotFoundError as error:
        result = {"absent": str(error)}
    sys.stdout.flush()
    print("\n" + json.dumps(result), flush=True)
    os._exit(0)  # some clients' threads would keep the process


if __name__ == "__main__":
    main()
