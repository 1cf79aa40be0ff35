"""Checkpoints: a file by `torch.save`, and a manifest that is written last.

Layout below the run: `checkpoints/<name>/<digest>.pt` and `checkpoints/<name>/manifest.json` with
`{"version": 1, "name", "file", "size_bytes", "sha256", "step", "time", "metrics"}`. Saving a name
again writes a new file beside the old one, then the manifest; the manifest always names a file
that is whole.
"""

from __future__ import annotations

import hashlib
import io
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ddp_results._metrics import Scalar, check_step, from_json, scalars, to_json
from ddp_results._paths import check_path
from ddp_results._payload import result_records
from ddp_results._record import Kind, Record
from ddp_results.errors import CheckpointError, PathError
from ddp_results.sinks.base import ReadableSink

PREFIX = "checkpoints/"
MANIFEST = "manifest.json"
_VERSION = 1


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

        Raises:
            CheckpointError: if it is not what the manifest describes.
        """
        if self._sink is None:
            raise CheckpointError(f"checkpoint {self.name!r} does not know its run")
        data = self._sink.read(self.path)
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
        torch = _torch()
        return torch.load(io.BytesIO(self.read()), map_location=map_location, weights_only=True)


def checkpoint_records(
    name: str, state: Any, *, step: int | None, metrics: Mapping[str, Any] | None
) -> list[Record]:
    """Return the records that store a checkpoint: the file, then the manifest.

    Raises:
        PathError, MetricError: for a name that is no path segment, and for bad metrics.
        CheckpointError: if torch is missing, or the state cannot be saved or read back.
    """
    directory = PREFIX + _check_name(name)
    described = {key: to_json(value) for key, value in scalars(metrics or {}).items()}
    number = check_step(step)
    data = _serialise(name, state)
    digest = hashlib.sha256(data).hexdigest()
    file = f"{digest[:16]}.pt"
    manifest = {
        "version": _VERSION,
        "name": name,
        "file": file,
        "size_bytes": len(data),
        "sha256": digest,
        "step": number,
        "time": time.time(),
        "metrics": described,
    }
    text = json.dumps(manifest, indent=1, ensure_ascii=False, allow_nan=False).encode()
    return [
        *result_records(f"{directory}/{file}", data),
        *result_records(f"{directory}/{MANIFEST}", text),
    ]


def read_manifest(sink: ReadableSink, path: str) -> Checkpoint:
    """Return the checkpoint whose manifest is at `path`.

    Raises:
        CheckpointError: if that is no manifest of a version that this program reads.
    """
    try:
        row = json.loads(sink.read(path))
        if row["version"] != _VERSION:
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


def delete_records(name: str, file: str) -> list[Record]:
    """Return the records that remove a checkpoint: the manifest first, so it is never half."""
    directory = PREFIX + _check_name(name)
    now = time.time()
    return [
        Record(Kind.DELETE, now, (f"{directory}/{MANIFEST}",), 0),
        Record(Kind.DELETE, now, (f"{directory}/{file}",), 0),
    ]


def _check_name(name: str) -> str:
    if not isinstance(name, str) or "/" in name:
        raise PathError(f"checkpoint name {name!r} must be a single path segment, as 'step-100'")
    return check_path(name)


def _serialise(name: str, state: Any) -> bytes:
    torch = _torch()
    buffer = io.BytesIO()
    try:
        torch.save(state, buffer)
    except Exception as error:
        raise CheckpointError(f"checkpoint {name!r}: torch cannot save it: {error!r}") from error
    data = buffer.getvalue()
    try:
        torch.load(io.BytesIO(data), map_location="meta", weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"checkpoint {name!r} could not be read back with weights_only=True: {error}; save"
            " tensors, numbers, text, lists and dicts, for example model.state_dict()"
        ) from error
    return data


def _torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise CheckpointError("checkpoints need torch: pip install torch") from error
    return torch
