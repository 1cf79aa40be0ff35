"""How metrics are stored: JSON lines, one point a line, in files below `_ddp/metrics/`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ddp_results._metrics import from_json, to_json
from ddp_results._record import Point, Source

METRICS_PREFIX = "_ddp/metrics/"
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def metrics_name(source: Source, first: int | None = None) -> str:
    """Return the path of a source's metrics, or of the segment that begins with number `first`."""
    rank = f"rank-{source.rank:05d}" if source.rank >= 0 else "process"
    stem = f"{METRICS_PREFIX}{rank}-{source.attempt:03d}-{source.uid}"
    return f"{stem}.jsonl" if first is None else f"{stem}/{first:012d}.jsonl"


def encode_points(source: Source, points: Iterable[Point]) -> bytes:
    """Return the lines of `points`.

    A line: `{"src": uid, "rank": 0, "attempt": 0, "seq": 7, "time": 1767.5, "step": 10,
    "metrics": {"loss": 0.3}}`.
    """
    head = f'"src":{_encode(source.uid)},"rank":{source.rank},"attempt":{source.attempt},'
    return "".join(
        f'{{{head}"seq":{p.seq},"time":{p.time_s!r},"step":{_encode(p.step)},"metrics":'
        f"{_values(p.values)}}}\n"
        for p in points
    ).encode()


def decode_lines(data: bytes) -> Iterator[dict[str, Any]]:
    """Return the points in `data`; what a killed writer left half-written is passed over."""
    for line in data.split(b"\n"):
        if not line.startswith(b"{"):
            continue
        try:
            row = json.loads(line)
        except ValueError:
            continue
        row["metrics"] = {name: from_json(value) for name, value in row["metrics"].items()}
        yield row


def _values(values: dict[str, Any]) -> str:
    try:
        return _encode(values)
    except ValueError:  # NaN or infinity, which JSON does not know
        return _encode({name: to_json(value) for name, value in values.items()})


def last_seq(points: Sequence[Point]) -> int:
    """Return the highest number among `points`, or 0."""
    return points[-1].seq if points else 0
