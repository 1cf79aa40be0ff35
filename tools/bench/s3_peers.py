"""How each peer reads objects, and how each makes a DataLoader of images; run in child processes.

No peer needs to be installed: whoever asks for one that is not gets `ModuleNotFoundError`.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import io
import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REGION = "us-east-1"
CONCURRENT = 32
OURS = "ddp-s3data"
OLD = "dask-pytorch-ddp 0.2.2"

Read = Callable[[Sequence[str]], int]


@dataclass
class Task:
    """What a child process is to measure; its environment says how to reach the server."""

    measure: str
    peer: str
    bucket: str = ""
    prefix: str = ""
    keys: list[str] = field(default_factory=list)
    endpoint_url: str = ""
    local: str = ""
    old: str = ""
    servers: list[int] = field(default_factory=list)
    workers: int = 2
    batch: int = 64
    warm: int = 256
    count: int = 1024
    settings: dict[str, Any] = field(default_factory=dict)


def imported(name: str) -> Any:
    """Return a module that may be absent."""
    return importlib.import_module(name)


def reader(task: Task) -> Read:
    """Return a function that reads keys and returns how many bytes that were."""
    return _READERS[task.peer](task)


def loader(task: Task, sampler: Any, transform: Callable[[Any], Any]) -> Any:
    """Return a DataLoader over transformed images of `task.prefix`."""
    return _LOADERS[task.peer](task, sampler, transform)


class Shuffled:
    """A sampler: so many positions in a new order each time. May be told another number."""

    def __init__(self, length: int, count: int) -> None:
        self.length, self.count = length, count
        self._random = random.Random(0)

    def __iter__(self) -> Iterator[int]:
        order: list[int] = []
        while len(order) < self.count:
            order += self._random.sample(range(self.length), self.length)
        return iter(order[: self.count])

    def __len__(self) -> int:
        return self.count


def _ours_reads(task: Task) -> Read:
    package = imported("ddp_s3data")
    dataset = package.S3Dataset(task.bucket, task.prefix)
    places = {key: place for place, key in enumerate(dataset.all_files)}

    def read(keys: Sequence[str]) -> int:
        wanted = [places[key] for key in keys]
        batches = (wanted[start : start + 64] for start in range(0, len(wanted), 64))
        return sum(len(found.data) for batch in batches for found in dataset.__getitems__(batch))

    return read


def _on_loop(open_client: Callable[[], Any], get: Callable[[Any, str], Any]) -> Read:
    """Read with an asynchronous client, `CONCURRENT` at a time."""
    runner = asyncio.Runner(loop_factory=imported("uvloop").new_event_loop)
    client = runner.run(open_client())

    async def read_all(keys: Sequence[str]) -> int:
        left = iter(keys)

        async def some() -> int:
            return sum([len(await get(client, key)) for key in left])

        return sum(await asyncio.gather(*(some() for _ in range(CONCURRENT))))

    return lambda keys: runner.run(read_all(keys))


def _obstore_reads(task: Task) -> Read:
    obstore, store = imported("obstore"), imported("obstore.store")

    async def open_client() -> Any:
        options = {"allow_http": True}
        endpoint = os.environ["AWS_ENDPOINT_URL"]
        return store.S3Store(task.bucket, endpoint=endpoint, region=REGION, client_options=options)

    async def get(client: Any, key: str) -> Any:
        return await (await obstore.get_async(client, key)).bytes_async()

    return _on_loop(open_client, get)


def _aiobotocore_reads(task: Task) -> Read:
    session = imported("aiobotocore.session").get_session()
    config = imported("aiobotocore.config").AioConfig(max_pool_connections=CONCURRENT)

    async def open_client() -> Any:
        return await session.create_client("s3", config=config).__aenter__()

    async def get(client: Any, key: str) -> Any:
        response = await client.get_object(Bucket=task.bucket, Key=key)
        async with response["Body"] as body:
            return await body.read()

    return _on_loop(open_client, get)


def _boto3_reads(task: Task) -> Read:
    client = imported("boto3").client("s3")
    return lambda keys: sum(
        len(client.get_object(Bucket=task.bucket, Key=key)["Body"].read()) for key in keys
    )


def _s3torchconnector_reads(task: Task) -> Read:
    dataset = _s3torchconnector_dataset(task, lambda found: len(found.read()))
    places = {key: place for place, key in enumerate(task.keys)}
    return lambda keys: sum(dataset[places[key]] for key in keys)


def _litdata_reads(task: Task) -> Read:
    dataset = _litdata_dataset(task, None)
    places = {key: place for place, key in enumerate(sorted(task.keys))}

    def read(keys: Sequence[str]) -> int:
        wanted = [places[key] for key in keys]
        batches = (wanted[start : start + 64] for start in range(0, len(wanted), 64))
        return sum(len(body) for batch in batches for body in dataset.__getitems__(batch))

    return read


def _old_reads(task: Task) -> Read:
    module = _old_module(task)
    return lambda keys: sum(
        len(module._read_s3_fileobj(task.bucket, key, io.BytesIO()).read()) for key in keys
    )


def _torch_loader(task: Task, dataset: Any, sampler: Any) -> Any:
    torch = imported("torch.utils.data")
    sampler.length = len(dataset)
    return torch.DataLoader(dataset, sampler=sampler, **_common(task))


def _common(task: Task) -> dict[str, Any]:
    return {
        "batch_size": task.batch,
        "num_workers": task.workers,
        "persistent_workers": task.workers > 0,
    }


def _local_loader(task: Task, sampler: Any, transform: Callable[[Any], Any]) -> Any:
    dataset = imported("torchvision.datasets").ImageFolder(task.local, transform)
    return _torch_loader(task, dataset, sampler)


def _ours_loader(task: Task, sampler: Any, transform: Callable[[Any], Any]) -> Any:
    package = imported("ddp_s3data")
    dataset = package.S3ImageFolder(task.bucket, task.prefix, transform)
    sampler.length = len(dataset)
    return package.S3DataLoader(dataset, sampler=sampler, **_common(task), **task.settings)


class _Decoded:
    """Bytes, or a file, to a transformed image; a class because it is pickled."""

    def __init__(self, transform: Callable[[Any], Any]) -> None:
        self._transform = transform

    def __call__(self, found: Any) -> Any:
        image = imported("PIL.Image")
        body = found if isinstance(found, bytes) else found.read()
        return self._transform(image.open(io.BytesIO(body)).convert("RGB")), 0


def _s3torchconnector_dataset(task: Task, transform: Callable[[Any], Any]) -> Any:
    """Return a dataset that is not listed here: after that the client may not be forked."""
    package = imported("s3torchconnector")
    return package.S3MapDataset.from_objects(
        [f"s3://{task.bucket}/{key}" for key in task.keys],
        region=REGION,
        endpoint=os.environ["AWS_ENDPOINT_URL"],
        transform=transform,
        s3client_config=package.S3ClientConfig(force_path_style=True),
    )


def _s3torchconnector_loader(task: Task, sampler: Any, transform: Callable[[Any], Any]) -> Any:
    dataset = _s3torchconnector_dataset(task, _Decoded(transform))
    return _torch_loader(task, _Known(dataset, len(task.keys)), sampler)


class _Known:
    """A map-style dataset whose length is known without asking it."""

    def __init__(self, dataset: Any, length: int) -> None:
        self._dataset, self._length = dataset, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, place: int) -> Any:
        return self._dataset[place]


def _litdata_dataset(task: Task, transform: Callable[[Any], Any] | None) -> Any:
    raw, indexer = imported("litdata.raw.dataset"), imported("litdata.raw.indexer")
    imported("litdata.streaming.downloader")._OBSTORE_CLIENT_OPTIONS["allow_http"] = "true"

    class Listed(indexer.BaseIndexer):  # type: ignore[misc, name-defined] # known at run time only
        def discover_files(self, input_dir: str, storage_options: Any) -> list[Any]:
            raise NotImplementedError

        def build_or_load_index(self, *_: Any, **__: Any) -> list[Any]:
            return [
                indexer.FileMetadata(path=f"s3://{task.bucket}/{key}", size=50_000)
                for key in sorted(task.keys)
            ]

    return raw.StreamingRawDataset(
        f"s3://{task.bucket}/{task.prefix}",
        cache_dir=os.environ["LITDATA_RAW_CACHE"],
        indexer=Listed(),
        transform=transform,
    )


def _litdata_loader(task: Task, sampler: Any, transform: Callable[[Any], Any]) -> Any:
    return _torch_loader(task, _litdata_dataset(task, _Decoded(transform)), sampler)


def _old_module(task: Task) -> Any:
    """Load the old package's `data` by its path: its import name is ours too."""
    path = Path(task.old) / "dask_pytorch_ddp" / "data.py"
    spec = importlib.util.spec_from_file_location("data_of_0_2_2", path)
    if not task.old or spec is None or spec.loader is None or not path.exists():
        raise ModuleNotFoundError(f"{OLD} is not in {task.old!r}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    spec.loader.exec_module(module)
    return module


def _old_loader(task: Task, sampler: Any, transform: Callable[[Any], Any]) -> Any:
    dataset = _old_module(task).S3ImageFolder(task.bucket, task.prefix, transform)
    return _torch_loader(task, dataset, sampler)


_READERS: dict[str, Callable[[Task], Read]] = {
    OURS: _ours_reads,
    "obstore": _obstore_reads,
    "s3torchconnector": _s3torchconnector_reads,
    "litdata raw": _litdata_reads,
    "aiobotocore": _aiobotocore_reads,
    "boto3": _boto3_reads,
    OLD: _old_reads,
}
_LOADERS: dict[str, Callable[[Task, Any, Callable[[Any], Any]], Any]] = {
    "local ImageFolder": _local_loader,
    OURS: _ours_loader,
    "litdata raw": _litdata_loader,
    "s3torchconnector": _s3torchconnector_loader,
    OLD: _old_loader,
}
