"""Sinks: where results end up, and how to add one.

A *sink* stores named results and metrics; `Sink` is the contract, `ddp_results.testing.check_sink`
checks an implementation. `open_sink` finds one for an address.
"""

from importlib import import_module

from ddp_results.sinks._jsonl import encode_points, metrics_name
from ddp_results.sinks.base import BufferedWriter, Point, ReadableSink, Sink, Source, Writer
from ddp_results.sinks.local import LocalSink
from ddp_results.sinks.memory import MemorySink
from ddp_results.sinks.opening import open_sink
from ddp_results.sinks.tee import TeeSink

__all__ = [
    "BufferedWriter",
    "LocalSink",
    "MLflowSink",
    "MemorySink",
    "Point",
    "ReadableSink",
    "S3Sink",
    "Sink",
    "Source",
    "TeeSink",
    "TensorBoardSink",
    "Writer",
    "encode_points",
    "metrics_name",
    "open_sink",
]


_WITH_EXTRAS = {"S3Sink": "s3", "TensorBoardSink": "tensorboard", "MLflowSink": "mlflow"}


def __getattr__(name: str) -> object:
    """Import what needs an extra only when it is asked for."""
    if name in _WITH_EXTRAS:
        return getattr(import_module(f"ddp_results.sinks.{_WITH_EXTRAS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
