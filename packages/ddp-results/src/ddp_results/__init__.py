"""Metrics, results and checkpoints from the ranks of a training run, delivered exactly once.

A *rank* (or any process that it starts) is a *source*: it numbers what it submits. A *handler* is
what it submits to. Over Dask, records travel as msgpack *frames* through one queue of the
scheduler to `process_results` on the client, which puts them into order, gives them to a *sink*
(a folder, a bucket, …) and *acknowledges* what the sink has made durable; a source keeps what is
not acknowledged and sends it again. A *run* is what a sink holds in the end; `open_run` reads it.
"""

from importlib import import_module

from ddp_results.errors import (
    BackPressureError,
    ChannelLostError,
    CheckpointError,
    CollectorBusyError,
    FlushTimeoutError,
    MetricError,
    MissingRecordsError,
    NoClusterError,
    PathError,
    ResultsError,
    RunNotFoundError,
    SinkError,
    SinkUnavailableError,
)
from ddp_results.handler import DaskResultsHandler, Delivered
from ddp_results.manifests import Checkpoint
from ddp_results.runs import Run, open_run
from ddp_results.s3_handler import S3ResultsHandler
from ddp_results.sinks import LocalSink, MemorySink, Sink, TeeSink, open_sink

__all__ = [
    "BackPressureError",
    "ChannelLostError",
    "Checkpoint",
    "CheckpointError",
    "CollectorBusyError",
    "DaskResultsHandler",
    "Delivered",
    "FlushTimeoutError",
    "LocalSink",
    "MLflowSink",
    "MemorySink",
    "MetricError",
    "MissingRecordsError",
    "NoClusterError",
    "PathError",
    "ResultsError",
    "Run",
    "RunNotFoundError",
    "S3ResultsHandler",
    "S3Sink",
    "Sink",
    "SinkError",
    "SinkUnavailableError",
    "TeeSink",
    "TensorBoardSink",
    "open_run",
    "open_sink",
]


_WITH_EXTRAS = {"S3Sink": "s3", "TensorBoardSink": "tensorboard", "MLflowSink": "mlflow"}


def __getattr__(name: str) -> object:
    """Import what needs an extra only when it is asked for."""
    if name in _WITH_EXTRAS:
        return getattr(import_module(f"ddp_results.sinks.{_WITH_EXTRAS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
