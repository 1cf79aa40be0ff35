"""Sinks: where results end up, and how to add one.

A *sink* stores named results and metrics; `Sink` is the contract, `ddp_results.testing.check_sink`
checks an implementation. `open_sink` finds one for an address.
"""

from ddp_results.sinks.base import BufferedWriter, Point, ReadableSink, Sink, Source, Writer
from ddp_results.sinks.local import LocalSink
from ddp_results.sinks.memory import MemorySink
from ddp_results.sinks.opening import open_sink
from ddp_results.sinks.tee import TeeSink

__all__ = [
    "BufferedWriter",
    "LocalSink",
    "MemorySink",
    "Point",
    "ReadableSink",
    "S3Sink",
    "Sink",
    "Source",
    "TeeSink",
    "Writer",
    "open_sink",
]


def __getattr__(name: str) -> object:
    """Import what needs an extra only when it is asked for."""
    if name == "S3Sink":
        from ddp_results.sinks.s3 import S3Sink

        return S3Sink
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
