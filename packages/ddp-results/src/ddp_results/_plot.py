"""Draw a metric with matplotlib, without a display."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from typing import Any


def plot_metric(
    name: str, points: Sequence[dict[str, Any]], path: str | os.PathLike[str] | None
) -> Any:
    """Return a figure with a line for each rank and attempt; save it if there is a path."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plot needs matplotlib: pip install 'ddp-results[plot]'") from error
    lines: dict[tuple[int, int, str], tuple[list[float], list[float]]] = defaultdict(
        lambda: ([], [])
    )
    for point in points:
        value = point["metrics"][name]
        if isinstance(value, bool | int | float):
            source = "" if point["rank"] >= 0 else point["src"]
            steps, values = lines[point["attempt"], point["rank"], source]
            steps.append(len(steps) if point["step"] is None else point["step"])
            values.append(float(value))
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for (attempt, rank, source), (steps, values) in sorted(lines.items()):
        label = f"rank {rank}" if rank >= 0 else f"process {source}"
        axes.plot(steps, values, label=f"{label}, attempt {attempt}" if attempt else label)
    axes.set(xlabel="step", ylabel=name, title=name)
    axes.grid(alpha=0.3)
    if 1 < len(lines) <= 20:
        axes.legend()
    if path is not None:
        figure.savefig(path)
    return figure
