"""What can go wrong, as one family of exceptions."""

from __future__ import annotations


class ResultsError(Exception):
    """Root of everything that this package raises on purpose.

    Every subclass is built from one message, so that Dask can pickle it and PyTorch's DataLoader
    can rebuild it as `type(error)(text)`.
    """


class PathError(ResultsError, ValueError):
    """A result was given a path that a sink must not write to."""


class MetricError(ResultsError, TypeError):
    """A metric is not a single number, text, flag or date; the message names its key."""


class NoClusterError(ResultsError):
    """A handler was used in a place from which no Dask scheduler can be found."""


class ChannelLostError(ResultsError, ConnectionError):
    """The Dask scheduler could not be reached, or stopped answering for longer than allowed."""


class ChannelResetError(ResultsError):
    """The scheduler lost its queue, because it was restarted; everything unconfirmed is resent."""


class BackPressureError(ResultsError, TimeoutError):
    """A rank waited for room longer than allowed, because nobody takes its results."""


class FlushTimeoutError(ResultsError, TimeoutError):
    """`flush` waited longer than asked; what was submitted is still on its way."""


class WireError(ResultsError, ValueError):
    """Bytes in the queue are not a frame of a version that this program reads."""


class CollectorBusyError(ResultsError):
    """Another `process_results` runs for the same key, and two would share the records."""


class MissingRecordsError(ResultsError):
    """Records that a rank submitted never arrived.

    Args:
        message: what is missing, by rank.
        missing: the same as data: source label to a list of `(first, last)` sequence numbers;
            `last` is None when the rank died before it could say how many there were.
    """

    def __init__(
        self, message: str, *, missing: dict[str, list[tuple[int, int | None]]] | None = None
    ) -> None:
        super().__init__(message)
        self.missing = missing or {}


class SinkError(ResultsError):
    """A sink could not store something.

    Args:
        message: what was being stored, where, and what to do.
        transient: whether the same call may succeed later (full disk, S3 out of reach); the
            collector then tries again, with growing pauses.
    """

    def __init__(self, message: str, *, transient: bool = False) -> None:
        super().__init__(message)
        self.transient = transient

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_sink_error, (type(self), str(self), self.transient)


class SinkUnavailableError(SinkError):
    """A sink cannot be used at all: no such bucket, no credentials, an unwritable folder."""


class CheckpointError(ResultsError):
    """A checkpoint cannot be written or read back."""


class RunNotFoundError(ResultsError, FileNotFoundError):
    """There is no run at the given place."""


def _rebuild_sink_error(kind: type[SinkError], message: str, transient: bool) -> SinkError:
    return kind(message, transient=transient)
