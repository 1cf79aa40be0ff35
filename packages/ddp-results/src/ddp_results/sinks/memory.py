"""A sink in memory: for tests, and for looking at results without storing them."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from ddp_results._record import Point, Source
from ddp_results.sinks._jsonl import encode_points, metrics_name
from ddp_results.sinks.base import ReadableSink


class MemorySink(ReadableSink):
    """Keeps everything in dictionaries.

    Attributes:
        results: path to the last data written there.
        points: source uid to its points, in order.
        history: `(path, data)` of every write, in order.
    """

    def __init__(self) -> None:
        self.results: dict[str, bytes] = {}
        self.points: dict[str, list[Point]] = {}
        self.history: list[tuple[str, bytes]] = []
        self._sources: dict[str, Source] = {}
        self._lock = threading.Lock()

    def write(self, path: str, data: bytes) -> None:
        """Store a result."""
        with self._lock:
            self.results[path] = data
            self.history.append((path, data))

    def append(self, source: Source, points: Sequence[Point]) -> None:
        """Store metrics."""
        with self._lock:
            self._sources[source.uid] = source
            stored = self.points.setdefault(source.uid, [])
            last = stored[-1].seq if stored else 0
            stored += [point for point in points if point.seq > last]

    def delete(self, path: str) -> None:
        """Remove a result."""
        with self._lock:
            self.results.pop(path, None)

    def names(self, prefix: str = "") -> list[str]:
        """Return the paths, those of the metrics included."""
        with self._lock:
            metrics = [metrics_name(source) for source in self._sources.values()]
            return sorted(name for name in [*self.results, *metrics] if name.startswith(prefix))

    def read(self, path: str) -> bytes:
        """Return a result, or the metrics of a source as JSON lines."""
        with self._lock:
            if path in self.results:
                return self.results[path]
            for source in self._sources.values():
                if metrics_name(source) == path:
                    return encode_points(source, self.points[source.uid])
        raise FileNotFoundError(path)

    def __repr__(self) -> str:
        return f"MemorySink({len(self.results)} results)"
