"""What an implementation of `Sink` must do, as a check that any test suite can call."""

from __future__ import annotations

from collections.abc import Callable

from ddp_results._record import Point, Source
from ddp_results.sinks._jsonl import METRICS_PREFIX, decode_lines
from ddp_results.sinks.base import ReadableSink, Sink

_BINARY = bytes(range(256)) * (20 * 2**10)
_SOURCE = Source(uid="c0ffee", rank=3, attempt=0, host="here", pid=1, job="")


def check_sink(make: Callable[[], Sink]) -> None:
    """Run a sink through its contract.

    Args:
        make: returns a new sink on the same, at first empty, place each time it is called.

    Raises:
        AssertionError: naming the promise that is not kept.
    """
    sink = make()
    sink.open()
    sink.write("a/b.txt", b"old")
    sink.write("a/b.txt", b"new")
    sink.write("a/b.txt", b"new")
    sink.write("empty", b"")
    sink.write("binary", _BINARY)
    sink.write("gone", b"x")
    sink.delete("gone")
    sink.delete("never-there")
    large = sink.writer("large", 2 * len(_BINARY) + 1)
    for piece in (_BINARY, memoryview(_BINARY), b"!"):
        large.append(piece)
    large.commit()
    large.abort()
    given_up = sink.writer("given-up", 5)
    given_up.append(b"12")
    given_up.abort()
    given_up.abort()
    points = [Point(n, 1e9 + n, n * 10, {"loss": 1.0 / n, "note": "é"}) for n in (1, 2, 5)]
    sink.append(_SOURCE, points[:2])
    sink.append(_SOURCE, points[1:])  # the second comes again, as after a lost answer
    sink.flush()
    sink.close()
    sink.close()
    if isinstance(sink, ReadableSink):
        fresh = make()
        assert isinstance(fresh, ReadableSink), "make() must return the same kind each time"
        _check_content(fresh)
        fresh.close()


def _check_content(sink: ReadableSink) -> None:
    _equal(sink.read("a/b.txt"), b"new", "the last write to a path counts")
    _equal(sink.read("empty"), b"", "an empty result exists")
    assert sink.read("binary") == _BINARY, "a result of 5 MiB comes back as it was"
    assert sink.read("large") == 2 * _BINARY + b"!", "the pieces of a large result are joined"
    names = sink.names()
    for absent in ("gone", "given-up"):
        assert absent not in names, f"{absent!r} must not exist"
        try:
            sink.read(absent)
        except FileNotFoundError:
            continue
        raise AssertionError("reading what does not exist must raise FileNotFoundError")
    _equal(sink.names("a/"), ["a/b.txt"], "names() keeps to its prefix")
    lines = [row for name in sink.names(METRICS_PREFIX) for row in decode_lines(sink.read(name))]
    stored = {row["seq"]: (row["step"], row["metrics"]["note"]) for row in lines}
    _equal(stored, {1: (10, "é"), 2: (20, "é"), 5: (50, "é")}, "every point is stored")
    assert len(lines) == len(stored), "a point that comes again must not be stored twice"


def _equal(found: object, wanted: object, promise: str) -> None:
    assert found == wanted, f"{promise}: found {found!r}, wanted {wanted!r}"
