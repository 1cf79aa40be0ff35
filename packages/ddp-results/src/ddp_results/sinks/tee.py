"""Several sinks as one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ddp_results._record import Point, Source
from ddp_results.sinks.base import Sink, Writer
from ddp_results.sinks.opening import Target, open_sink


class TeeSink(Sink):
    """Stores everything in every member.

    The collector looks through it and treats each member for itself: one that fails is tried
    again or given up without holding back the others.

    Args:
        targets: sinks, folders or `s3://` addresses.

    Raises:
        TypeError: if a sink cannot be told from others of its class.
    """

    def __init__(self, targets: Iterable[Target]) -> None:
        sinks = [open_sink(target) for target in targets]
        self._members = tuple(member for sink in sinks for member in sink.members)
        for member in self._members:
            if type(member).__eq__ is not object.__eq__:
                raise TypeError(
                    f"{type(member).__name__} compares its instances by value, as a dataclass does,"
                    " but each sink is one of its own: use @dataclass(eq=False)"
                )

    @property
    def members(self) -> tuple[Sink, ...]:
        """The sinks behind this one."""
        return self._members

    def open(self) -> None:
        """Check every member."""
        self._each(lambda sink: sink.open())

    def write(self, path: str, data: bytes) -> None:
        """Store a result in every member."""
        self._each(lambda sink: sink.write(path, data))

    def append(self, source: Source, points: Sequence[Point]) -> None:
        """Store metrics in every member."""
        self._each(lambda sink: sink.append(source, points))

    def writer(self, path: str, size_bytes: int) -> Writer:
        """Return a writer to every member."""
        return _TeeWriter([sink.writer(path, size_bytes) for sink in self._members])

    def delete(self, path: str) -> None:
        """Remove a result from every member."""
        self._each(lambda sink: sink.delete(path))

    def flush(self) -> None:
        """Make every member durable."""
        self._each(lambda sink: sink.flush())

    def close(self) -> None:
        """Close every member, also when one of them fails to."""
        errors: list[Exception] = []
        for sink in self._members:
            try:
                sink.close()
            except Exception as error:  # noqa: BLE001 - raised below, after the others are closed
                errors.append(error)
        if errors:
            raise errors[0]

    def _each(self, act: Callable[[Sink], None]) -> None:
        for sink in self._members:
            act(sink)

    def __repr__(self) -> str:
        return f"TeeSink({', '.join(map(repr, self._members))})"


class _TeeWriter(Writer):
    def __init__(self, writers: Sequence[Writer]) -> None:
        self._writers = writers

    def append(self, data: bytes | memoryview) -> None:
        for writer in self._writers:
            writer.append(data)

    def commit(self) -> None:
        for writer in self._writers:
            writer.commit()

    def abort(self) -> None:
        for writer in self._writers:
            writer.abort()
