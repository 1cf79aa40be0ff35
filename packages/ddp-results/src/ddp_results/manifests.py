"""Read checkpoints: what their manifests say, and the files that these name."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ddp_results._metrics import Scalar, from_json
from ddp_results.errors import CheckpointError
from ddp_results.sinks.base import ReadableSink

PREFIX = "checkpoints/"
MANIFEST = "manifest.json"
VERSION = 1


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint of a run, as its manifest describes it.

    Attributes:
        name: as given to `save_checkpoint`.
        path: of the file, within the run.
        size_bytes: of the file.
        sha256: of the file, in hexadecimal.
        step: as given, or None.
        time_s: when it was saved, in seconds since 1970.
        metrics: as given.
    """

    name: str
    path: str
    size_bytes: int
    sha256: str
    step: int | None
    time_s: float
    metrics: dict[str, Scalar] = field(default_factory=dict)
    _sink: ReadableSink | None = field(default=None, repr=False, compare=False)

    @property
    def age_key(self) -> tuple[int, float]:
        """Orders checkpoints, latest last: by step, then by time."""
        return (-1 if self.step is None else self.step, self.time_s)

    def read(self) -> bytes:
        """Return the content of the file, checked against its hash.

        If the same name was saved again since the manifest was read, this is the newer content.

        Raises:
            CheckpointError: if the checkpoint was removed, or is not what the manifest describes.
        """
        if self._sink is None:
            raise CheckpointError(f"checkpoint {self.name!r} does not know its run")
        try:
            data = self._sink.read(self.path)
        except FileNotFoundError:
            return self._read_newer()
        if len(data) != self.size_bytes or hashlib.sha256(data).hexdigest() != self.sha256:
            raise CheckpointError(
                f"{self.path!r} in {self._sink!r} differs from its manifest: {len(data)} bytes of"
                f" {self.size_bytes}; it was changed after it was written"
            )
        return data

    def load(self, map_location: Any = None) -> Any:
        """Return the state, read by `torch.load(weights_only=True)`; needs torch.

        Raises:
            CheckpointError: if torch is missing, or the file is damaged.
        """
        torch = import_torch()
        return torch.load(io.BytesIO(self.read()), map_location=map_location, weights_only=True)

    def _read_newer(self) -> bytes:
        sink = self._sink
        path = f"{PREFIX}{self.name}/{MANIFEST}"
        try:
            newer = None if sink is None else read_manifest(sink, path)
        except FileNotFoundError:
            newer = None
        if newer is None or newer.path == self.path:
            raise CheckpointError(f"checkpoint {self.name!r} in {sink!r} has been removed")
        return newer.read()


def read_manifests(sink: ReadableSink) -> list[Checkpoint]:
    """Return all checkpoints, oldest first: by step, then by time."""
    found = []
    for path in sink.names(PREFIX):
        if path.endswith(f"/{MANIFEST}"):
            try:
                found.append(read_manifest(sink, path))
            except FileNotFoundError:  # removed since it was listed
                continue
    return sorted(found, key=lambda checkpoint: checkpoint.age_key)


def best_of(checkpoints: Sequence[Checkpoint], metric: str, mode: str) -> Checkpoint:
    """Return the one with the lowest (`min`) or highest (`max`) metric.

    Raises:
        ValueError: for another mode.
        CheckpointError: if none has that metric as a number.
    """
    if mode not in ("min", "max"):
        raise ValueError(f"mode must be 'min' or 'max', not {mode!r}")
    rated = []
    for checkpoint in checkpoints:
        value = checkpoint.metrics.get(metric)
        if isinstance(value, int | float) and value == value:  # NaN is no best
            rated.append((float(value), checkpoint))
    if not rated:
        known = sorted({name for checkpoint in checkpoints for name in checkpoint.metrics})
        raise CheckpointError(
            f"none of {len(checkpoints)} checkpoints has the number {metric!r}, only {known}: give"
            f" save_checkpoint metrics={{{metric!r}: …}}"
        )
    choose = min if mode == "min" else max
    return choose(rated, key=lambda pair: pair[0])[1]


def read_manifest(sink: ReadableSink, path: str) -> Checkpoint:
    """Return the checkpoint whose manifest is at `path`.

    Raises:
        CheckpointError: if that is no manifest of a version that this program reads.
    """
    try:
        row = json.loads(sink.read(path))
        if row["version"] != VERSION:
            raise ValueError(f"version {row['version']}")
        return Checkpoint(
            name=row["name"],
            path=f"{path.rpartition('/')[0]}/{row['file']}",
            size_bytes=row["size_bytes"],
            sha256=row["sha256"],
            step=row["step"],
            time_s=row["time"],
            metrics={key: from_json(value) for key, value in row["metrics"].items()},
            _sink=sink,
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path!r} in {sink!r} is no checkpoint manifest: {error}") from error


def import_torch() -> Any:
    """Return torch.

    Raises:
        CheckpointError: if it is not installed.
    """
    try:
        import torch
    except ImportError as error:
        raise CheckpointError("checkpoints need torch: pip install torch") from error
    return torch
