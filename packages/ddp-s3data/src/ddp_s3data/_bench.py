"""How fast this machine reads a bucket, what limits it, and which settings to choose."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ._index import Index
from .dataset import S3Dataset, S3Object
from .images import IMG_EXTENSIONS, S3File, load_rgb
from .loader import S3DataLoader
from .options import S3Options

BATCH = 64
_DECODED = 200
_LEAST_CONNECTIONS, _MOST_CONNECTIONS = 16, 256
_MOST_BATCHES = 8


@dataclass(frozen=True)
class Fetched:
    """What one process reads when nothing is decoded.

    Attributes:
        per_s: objects in a second.
        bytes_per_s: bytes in a second.
        cpu_s: processor time of an object.
        latency_s: quantiles `p50 p90 p99` of a request.
        retries: by cause.
    """

    per_s: float
    bytes_per_s: float
    cpu_s: float
    latency_s: dict[str, float]
    retries: dict[str, int]


@dataclass(frozen=True)
class Settings:
    """What to give to `S3DataLoader` and `S3Options`."""

    num_workers: int
    lookahead: int
    max_connections: int

    def __str__(self) -> str:
        return (
            f"S3DataLoader(dataset, batch_size={BATCH}, num_workers={self.num_workers}, "
            f"lookahead={self.lookahead}) with S3Options(max_connections={self.max_connections})"
        )


def fetch(index: Index, options: S3Options, chosen: Sequence[int]) -> Fetched:
    """Read these objects in this process with look-ahead, and decode none."""
    dataset = S3Dataset(index.bucket, index.prefix, options=options, index=index)
    dataset.__getitems__(chosen[:1])  # connects
    before = dataset.stats()["bytes"]
    started, cpu = time.perf_counter(), time.process_time()
    for _ in _loader(dataset, chosen, 0, _MOST_BATCHES):
        pass
    took, cpu = time.perf_counter() - started, time.process_time() - cpu
    stats = dataset.stats()
    return Fetched(
        per_s=len(chosen) / took,
        bytes_per_s=(stats["bytes"] - before) / took,
        cpu_s=cpu / len(chosen),
        latency_s=stats["latency_s"],
        retries=stats["retries"],
    )


def decoding_s(index: Index, options: S3Options, chosen: Sequence[int]) -> float:
    """Return the seconds that one core decodes an image, or 0 if none of these is one."""
    images = [place for place in chosen if index.key(place).lower().endswith(IMG_EXTENSIONS)]
    if not images:
        return 0.0
    dataset = S3Dataset(index.bucket, index.prefix, options=options, index=index)
    found = dataset.__getitems__(images[:_DECODED])
    started = time.perf_counter()
    good = sum(_decoded(each) for each in found)
    return (time.perf_counter() - started) / good if good else 0.0


def choose(fetched: Fetched, decode_s: float, cores: int) -> Settings:
    """Return settings with which a worker's fetching keeps up with its decoding.

    A worker decodes `1 / decode_s` images in a second, and cannot use more. By Little's law so
    many need that rate times the latency of requests in flight; twice that, and the latency of the
    slow ones, leave room. Look-ahead reaches as far as the slowest hundredth of requests.
    """
    need_per_s = min(1.0 / decode_s, fetched.per_s) if decode_s else fetched.per_s
    connections = math.ceil(2.0 * need_per_s * fetched.latency_s["p90"])
    return Settings(
        num_workers=cores if decode_s else min(4, cores),
        lookahead=min(1 + math.ceil(fetched.latency_s["p99"] * need_per_s / BATCH), _MOST_BATCHES),
        max_connections=min(max(connections, _LEAST_CONNECTIONS), _MOST_CONNECTIONS),
    )


def try_out(
    index: Index, options: S3Options, chosen: Sequence[int], settings: Settings
) -> tuple[float, str]:
    """Read and decode with these settings; return samples a second and what limits them."""
    options = replace(options, max_connections=settings.max_connections)
    dataset = S3Dataset(index.bucket, index.prefix, _decoded, options=options, index=index)
    loader = _loader(dataset, chosen, settings.num_workers, settings.lookahead)
    batches = iter(loader)
    seen, started = 0, 0.0
    for batch in batches:  # what comes with the first has started workers and connections
        if started:
            seen += len(batch)
        else:
            started = time.perf_counter()
    took = time.perf_counter() - started
    return (seen / took if seen else 0.0), loader.stats()["limited_by"]


def _loader(
    dataset: S3Dataset, chosen: Sequence[int], num_workers: int, lookahead: int
) -> S3DataLoader:
    return S3DataLoader(
        dataset,
        batch_size=BATCH,
        sampler=list(chosen),
        num_workers=num_workers,
        lookahead=lookahead,
        shard=False,
        collate_fn=_as_it_is,
    )


def _as_it_is(samples: list[Any]) -> list[Any]:
    return samples


def _decoded(found: S3Object) -> bool:
    """Decode an image and drop it; return whether it was one."""
    if not found.key.lower().endswith(IMG_EXTENSIONS):
        return False
    try:
        load_rgb(S3File(found.data, found.address))
    except Exception:  # noqa: BLE001 - a benchmark passes over what is no image
        return False
    return True
