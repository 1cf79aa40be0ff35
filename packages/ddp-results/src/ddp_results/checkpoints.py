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
from typing import Any

from ddp_results._metrics import check_step, scalars, to_json
from ddp_results._paths import check_path
from ddp_results._payload import result_records
from ddp_results._record import Kind, Record
from ddp_results.errors import CheckpointError, PathError
from ddp_results.manifests import MANIFEST, PREFIX, VERSION, import_torch


def checkpoint_records(
    name: str,
    state: Any,
    *,
    step: int | None,
    metrics: Mapping[str, Any] | None,
    keep_last: int | None,
    keep_best: str | None,
    best: str,
) -> list[Record]:
    """Return the records that store a checkpoint: the file, then the manifest.

    Raises:
        PathError, MetricError: for a name that is no path segment, and for bad metrics.
        ValueError: for other bad arguments.
        CheckpointError: if torch is missing, or the state cannot be saved or read back.
    """
    directory = PREFIX + _check_name(name)
    if best not in ("min", "max") or (keep_last is not None and keep_last < 1):
        raise ValueError(f"best must be 'min' or 'max', keep_last at least 1: {best}, {keep_last}")
    described = {key: to_json(value) for key, value in scalars(metrics or {}).items()}
    if keep_best is not None and keep_best not in described:
        raise ValueError(
            f"checkpoint {name!r}: keep_best={keep_best!r} needs the value,"
            f" metrics={{{keep_best!r}: …}} (None if it has none); log_metrics does not give it"
        )
    number = check_step(step)
    data = _serialise(name, state)
    digest = hashlib.sha256(data).hexdigest()
    file = f"{digest[:16]}.pt"
    manifest = {
        "version": VERSION,
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
        Record(Kind.RETAIN, time.time(), (name, keep_last, keep_best, best), 0),
    ]


def _check_name(name: str) -> str:
    if not isinstance(name, str) or "/" in name:
        raise PathError(f"checkpoint name {name!r} must be a single path segment, as 'step-100'")
    return check_path(name)


def _serialise(name: str, state: Any) -> bytes:
    torch = import_torch()
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
            f"checkpoint {name!r} holds something that could not be read back safely"
            " (weights_only=True); save tensors, numbers, text, lists and dicts, for example"
            " model.state_dict(), and arrays by torch.from_numpy()"
        ) from error
    return data
