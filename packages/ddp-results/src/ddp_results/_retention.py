"""Remove checkpoints that are not to be kept, after the newer ones are durable."""

from __future__ import annotations

import contextlib

from ddp_results.errors import CheckpointError
from ddp_results.manifests import MANIFEST, PREFIX, Checkpoint, best_of, read_manifests
from ddp_results.sinks.base import ReadableSink, Sink


def retain(
    sink: Sink, name: str, keep_last: int | None, metric: str | None, mode: str = "min"
) -> None:
    """Tidy up after checkpoint `name` was saved; a sink that cannot be read is left alone.

    Files of `name` that its manifest does not name any more go. With `keep_last` or `metric`, so
    do all checkpoints except it, the last so many and the best by `metric`. It is not among the
    last after a clock was set back, or when training goes on from an earlier step. Each goes
    manifest first, so that no reader finds half of one.
    """
    if not isinstance(sink, ReadableSink):
        return
    sink.flush()
    checkpoints = read_manifests(sink)
    _remove_replaced(sink, [each for each in checkpoints if each.name == name])
    if keep_last is None and metric is None:
        return
    for checkpoint in _superfluous(checkpoints, name, keep_last, metric, mode):
        directory = f"{PREFIX}{checkpoint.name}/"
        sink.delete(directory + MANIFEST)
        for path in sink.names(directory):
            if path != directory + MANIFEST:
                sink.delete(path)


def _superfluous(
    checkpoints: list[Checkpoint], saved: str, keep_last: int | None, metric: str | None, mode: str
) -> list[Checkpoint]:
    last = checkpoints[-max(1, keep_last or 1) :]
    kept = {saved, *(checkpoint.name for checkpoint in last)}
    if metric is not None:
        with contextlib.suppress(CheckpointError):  # none has the metric yet
            kept.add(best_of(checkpoints, metric, mode).name)
    return [checkpoint for checkpoint in checkpoints if checkpoint.name not in kept]


def _remove_replaced(sink: ReadableSink, named: list[Checkpoint]) -> None:
    for checkpoint in named:
        for path in sink.names(f"{PREFIX}{checkpoint.name}/"):
            if path.endswith(".pt") and path != checkpoint.path:
                sink.delete(path)
