"""From an address to a sink."""

from __future__ import annotations

import os
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from ddp_results.errors import SinkUnavailableError
from ddp_results.sinks.base import Sink
from ddp_results.sinks.local import LocalSink

ENTRY_POINTS = "ddp_results.sinks"

_OWN = {
    "s3": ("ddp_results.sinks.s3", "S3Sink"),
    "tensorboard": ("ddp_results.sinks.tensorboard", "TensorBoardSink"),
    "mlflow": ("ddp_results.sinks.mlflow", "MLflowSink"),
}

Target = str | os.PathLike[str] | Sink


def open_sink(target: Target, **options: Any) -> Sink:
    """Return the sink for an address; it is checked when it is first used, or by `open()`.

    `s3://bucket/prefix` is an `S3Sink`, `tensorboard://folder` a `TensorBoardSink`,
    `mlflow://experiment` an `MLflowSink`, `scheme://…` a sink that another package has registered
    as entry point `scheme` of the group `ddp_results.sinks` (a callable of the address and the
    options), everything else a folder. A sink is returned as it is.

    Raises:
        TypeError: for anything else.
        SinkUnavailableError: for a scheme that nobody has registered.
    """
    if isinstance(target, Sink):
        return target
    if not isinstance(target, str | os.PathLike):
        raise TypeError(
            f"results are stored in a folder, at an address such as 's3://bucket/prefix' or in a"
            f" Sink, not in {type(target).__name__}: {target!r:.80}"
        )
    address = os.fspath(target)
    scheme, separator, rest = address.partition("://")
    if not separator:
        return LocalSink(address, **options)
    scheme = scheme.lower()
    address = f"{scheme}://{rest}"
    if scheme in _OWN:
        module, name = _OWN[scheme]  # imported when asked for: they need extras
        own: Sink = getattr(import_module(module), name)(address, **options)
        return own
    for entry in entry_points(group=ENTRY_POINTS, name=scheme):
        sink: Sink = entry.load()(address, **options)
        return sink
    raise SinkUnavailableError(
        f"{address!r}: no sink for {scheme!r}; give a folder, s3://bucket/prefix, or install the"
        f" package that provides {scheme!r} (entry points {ENTRY_POINTS!r})"
    )
