"""Read a run back: metrics, results and checkpoints from a folder or a bucket."""

from __future__ import annotations

import html
import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ddp_results._plot import plot_metric
from ddp_results.errors import RunNotFoundError
from ddp_results.manifests import PREFIX, Checkpoint, best_of, read_manifests
from ddp_results.sinks._jsonl import METRICS_PREFIX, decode_lines
from ddp_results.sinks.base import ReadableSink
from ddp_results.sinks.opening import Target, open_sink

NO_RUN = "is it the folder or bucket that process_results was given?"


def open_run(target: Target, **options: Any) -> Run:
    """Return the run in a folder, at `s3://bucket/prefix` or in a readable sink.

    Works while the run is being written; each call reads anew.

    Raises:
        RunNotFoundError: if nothing is there.
        TypeError, ValueError: if `target` is none of these, or empty.
    """
    if target == "":
        raise ValueError("the address of the run is empty; for the current folder give '.'")
    if isinstance(target, str | os.PathLike) and "://" not in os.fspath(target):
        folder = Path(target)
        if not folder.is_dir():
            raise RunNotFoundError(f"no folder {str(folder)!r}; was process_results given it?")
    sink = open_sink(target, **options)
    if not isinstance(sink, ReadableSink):
        raise RunNotFoundError(f"{sink!r} cannot be read; open the folder or bucket of the run")
    run = Run(sink)
    if sink is not target:
        weakref.finalize(run, sink.close)
    if "://" in str(target) and not sink.names():
        raise RunNotFoundError(f"nothing below {target}")
    return run


class Run:
    """What a run has stored. Made by `open_run`."""

    def __init__(self, sink: ReadableSink) -> None:
        self._sink = sink

    def results(self, prefix: str = "") -> list[str]:
        """Return the paths of the named results, without checkpoints, sorted."""
        return [name for name in self._sink.names(prefix) if not name.startswith(("_ddp/", PREFIX))]

    def read(self, path: str) -> bytes:
        """Return a named result.

        Raises:
            FileNotFoundError: if there is none at `path`.
        """
        return self._sink.read(path)

    def metrics(self, name: str | None = None) -> list[dict[str, Any]]:
        """Return all points, each once, ordered by attempt, step, time and rank.

        Points of one process at the same step, or without one, are in the order in which it
        logged them, whatever its clock did.

        A point is `{"src", "rank", "attempt", "seq", "time", "step", "metrics"}`; times are
        seconds since 1970.

        Args:
            name: only points that hold this metric.
        """
        points = {
            (point["src"], point["seq"]): point
            for point in self._points()
            if name is None or name in point["metrics"]
        }
        latest: dict[str, float] = {}  # a clock may be set back
        keyed: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        for point in sorted(points.values(), key=lambda each: each["seq"]):
            src, step = point["src"], point["step"]
            latest[src] = max(point["time"], latest.get(src, point["time"]))
            step = -1 if step is None else step
            key = (point["attempt"], step, latest[src], point["rank"], point["seq"])
            keyed.append((key, point))
        return [point for _, point in sorted(keyed, key=lambda each: each[0])]

    def to_pandas(self) -> Any:
        """Return the points as a DataFrame: src, rank, attempt, step, time and a column per metric.

        Raises:
            ImportError: if pandas is not installed.
        """
        try:
            import pandas as pd
        except ImportError as error:
            raise ImportError(
                "to_pandas needs pandas: pip install 'ddp-results[pandas]'"
            ) from error
        columns = ("src", "rank", "attempt", "step", "time")
        rows = [{**{c: p[c] for c in columns}, **p["metrics"]} for p in self.metrics()]
        frame = pd.DataFrame(rows, columns=None if rows else list(columns))
        frame["time"] = pd.to_datetime(frame["time"], unit="s", utc=True)
        return frame

    def checkpoints(self) -> list[Checkpoint]:
        """Return the checkpoints, oldest first: by step, then by time."""
        return read_manifests(self._sink)

    def latest_checkpoint(self) -> Checkpoint | None:
        """Return the checkpoint of the highest step, or None if there is none."""
        found = self.checkpoints()
        return found[-1] if found else None

    def best_checkpoint(self, metric: str, mode: str = "min") -> Checkpoint:
        """Return the checkpoint with the lowest (`min`) or highest (`max`) metric.

        Raises:
            ValueError: for another mode.
            CheckpointError: if no checkpoint has that metric as a number.
        """
        return best_of(self.checkpoints(), metric, mode)

    def plot(self, name: str, path: str | os.PathLike[str] | None = None) -> Any:
        """Draw a metric over the steps, a line for each rank; return the figure.

        Args:
            name: of the metric.
            path: where to save it, as the suffix says (`.png`, `.svg`, `.pdf`).

        Raises:
            ImportError: if matplotlib is not installed.
            KeyError: if the run has no such metric; it names those that there are.
        """
        points = self.metrics(name)
        if not points:
            raise KeyError(f"{self!r} has no metric {name!r}, {self._which_metrics()}")
        return plot_metric(name, points, path)

    def metric_names(self) -> list[str]:
        """Return the names of all metrics, sorted."""
        return sorted({name for point in self._points() for name in point["metrics"]})

    def _which_metrics(self) -> str:
        names = self.metric_names()
        return f"only {names}" if names else f"and no other; {NO_RUN}"

    def close(self) -> None:
        """Give back connections, as the end of the object does; the run may be used again."""
        self._sink.close()

    def __repr__(self) -> str:
        return f"Run({self._sink!r})"

    def _repr_html_(self) -> str:
        points = self.metrics()
        latest: dict[str, Any] = {}
        for point in points:
            latest.update(point["metrics"])
        rows = "".join(
            f"<tr><td>{html.escape(name)}</td><td>{html.escape(str(value))}</td></tr>"
            for name, value in sorted(latest.items())
        )
        return (
            f"<b>{html.escape(repr(self))}</b><p>{len(points)} points, {len(self.results())}"
            f" results, {len(self.checkpoints())} checkpoints</p><table><tr><th>metric</th>"
            f"<th>last value</th></tr>{rows}</table>"
        )

    def _points(self) -> Iterator[dict[str, Any]]:
        for path in self._sink.names(METRICS_PREFIX):
            if path.endswith(".jsonl"):
                yield from decode_lines(self._sink.read(path))
