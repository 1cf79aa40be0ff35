"""Counters of what one process has read, cheap enough to keep always."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from ._retry import RULES

_PER_OCTAVE = 4
_BUCKETS = 80  # of latency: from 1 ms, four for each doubling, to beyond 100 s


@dataclass
class Counters:
    """Numbers of one dataset in one process. Written by two threads, each its own fields."""

    # by the thread of the event loop
    requests: int = 0
    objects: int = 0
    bytes: int = 0
    hedges: int = 0
    wasted: int = 0
    """Objects that were fetched ahead and never asked for."""
    changed: int = 0
    """Objects that are no longer those that were listed."""
    unchecked: int = 0
    """Objects that came with nothing to compare them with, though that was asked for."""
    retries: Counter[str] = field(default_factory=Counter)
    latency: list[int] = field(default_factory=lambda: [0] * _BUCKETS)
    # by the thread that reads
    samples: int = 0
    cached: int = 0
    """Objects that came from the disk cache, without a request."""
    replaced: int = 0
    wait_s: float = 0.0
    decode_s: float = 0.0
    depth: int = 0
    """Batches fetched ahead at present."""

    def took(self, seconds: float) -> None:
        """Count one request of this duration."""
        place = int(_PER_OCTAVE * math.log2(seconds * 1000.0)) if seconds > 0.001 else 0
        self.latency[min(place, _BUCKETS - 1)] += 1

    def vector(self) -> list[float]:
        """Return all numbers in a fixed order, for sums over processes."""
        plain = [float(getattr(self, name)) for name in _PLAIN]
        return [
            *plain,
            *(float(self.retries[cause]) for cause in CAUSES),
            *map(float, self.latency),
        ]


_PLAIN = (
    *("requests", "objects", "bytes", "hedges", "wasted", "changed", "unchecked"),
    *("samples", "cached", "replaced", "wait_s", "decode_s", "depth"),
)
CAUSES = tuple(RULES)
WIDTH = len(_PLAIN) + len(CAUSES) + _BUCKETS


def summary(vectors: list[list[float]]) -> dict[str, Any]:
    """Return the statistics of several processes together, ready to be shown.

    `limited_by` is `network` when the readers wait longer for bytes than they decode, `decode`
    when not, and `nothing yet` before the first sample.
    """
    total = [sum(column) for column in zip(*vectors, strict=True)] or [0.0] * WIDTH
    plain = dict(zip(_PLAIN, total, strict=False))
    retries = dict(zip(CAUSES, total[len(_PLAIN) :], strict=False))
    latency = total[len(_PLAIN) + len(CAUSES) :]
    busy = plain["wait_s"] + plain["decode_s"]
    integers = (name for name in _PLAIN if not name.endswith("_s"))
    return {
        **{name: int(plain[name]) for name in integers},
        "depth": plain["depth"] / max(1, len(vectors)),
        "retries": {cause: int(count) for cause, count in retries.items() if count},
        "latency_s": {f"p{share}": _quantile(latency, share / 100) for share in (50, 90, 99)},
        "wait_s": plain["wait_s"],
        "decode_s": plain["decode_s"],
        "wait_share": plain["wait_s"] / busy if busy else 0.0,
        "limited_by": _limit(plain),
    }


def _limit(plain: dict[str, float]) -> str:
    if not plain["samples"]:
        return "nothing yet"
    return "network" if plain["wait_s"] > plain["decode_s"] else "decode"


def _quantile(latency: list[float], share: float) -> float:
    """Return the upper edge of the bucket in which the quantile lies, in seconds."""
    wanted = share * sum(latency)
    seen = 0.0
    for place, count in enumerate(latency):
        seen += count
        if count and seen >= wanted:
            return 0.001 * math.exp2((place + 1) / _PER_OCTAVE)
    return 0.0
