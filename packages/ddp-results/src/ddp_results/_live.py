"""What `process_results` shows while it runs: a table in a terminal, else a line every 10 s."""

from __future__ import annotations

import contextlib
import sys
import time
from types import TracebackType
from typing import Any, Self

from ddp_results._collector import Collector
from ddp_results._delivery import Delivery
from ddp_results._futures import FutureWatch
from ddp_results._page import COLUMNS, pack_shown
from ddp_results._stream import Stream

_LINE_EVERY_S = 10.0
_ROWS_EVERY_S = 1.0
_MAX_ROWS = 32


class Display:
    """Call `tick` often; it looks at the clock. Writes to stderr; a table needs rich.

    The same table goes to the collector, which leaves it for the page of the Dask dashboard.
    """

    def __init__(
        self, key: str, collector: Collector, delivery: Delivery, watch: FutureWatch
    ) -> None:
        self._key = key
        self._collector = collector
        self._delivery = delivery
        self._watch = watch
        self._start = time.monotonic()
        self._rows = _Changes(self._start)
        self._lines = _Changes(self._start)
        self._live: Any = None
        self._has_shown = False

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            with contextlib.suppress(ImportError):
                from rich.console import Console
                from rich.live import Live

                self._live = Live(
                    _table([]),
                    console=Console(stderr=True, markup=False, emoji=False, highlight=False),
                    auto_refresh=False,
                    transient=True,
                    vertical_overflow="crop",
                )
                self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()
        self._show_on_page(self._make_rows(time.monotonic()), self._summary())
        if self._has_shown:
            sys.stderr.write(f"{self._summary()}\n")
            sys.stderr.flush()

    def tick(self) -> None:
        """Show the state if it is time to."""
        now = time.monotonic()
        if now - self._rows.since_s >= _ROWS_EVERY_S:
            rows = self._make_rows(now)
            self._show_on_page(rows, self._words())
            if self._live is not None:
                self._live.update(_table(rows), refresh=True)
                self._has_shown = True
        if self._live is None and now - self._lines.since_s >= _LINE_EVERY_S:
            sys.stderr.write(f"{self._line(now)}\n")
            sys.stderr.flush()
            self._has_shown = True

    def _show_on_page(self, rows: list[tuple[str, ...]], words: str) -> None:
        self._collector.shown = pack_shown(time.time(), words, rows)

    def _streams(self) -> dict[str, Stream]:
        return dict(self._collector.streams)

    def _line(self, now: float) -> str:
        streams = self._streams()
        total = sum(stream.n_records for stream in streams.values())
        rate = sum(self._lines.rates(streams, now).values())
        steps = [stream.step for stream in streams.values() if stream.step is not None]
        step = f", step {min(steps)}" if steps else ""
        losses = [s.values["loss"] for s in streams.values() if "loss" in s.values]
        loss = f", loss {losses[0]:.4g}" if losses and isinstance(losses[0], float) else ""
        return (
            f"results {self._key}: {total} records of {len(streams)} processes, {rate:.0f}/s"
            f"{step}{loss}; {self._words()}"
        )

    def _words(self) -> str:
        waiting = self._delivery.waiting_for
        return self._watch.words + (f"; waiting for {waiting}" if waiting else self._finishing())

    def _finishing(self) -> str:
        """Say for what it waits when all ranks have ended."""
        if self._watch.n_pending or not self._watch.total:
            return ""
        behind = sum(stream.received - stream.durable for stream in self._streams().values())
        return f"; storing the last {behind}" if behind else "; waiting for the last word of some"

    def _make_rows(self, now: float) -> list[tuple[str, ...]]:
        """Return the cells of `COLUMNS` for each source, by rank."""
        streams = self._streams()
        rates = self._rows.rates(streams, now)
        sources = sorted(streams.items(), key=lambda item: item[1].source.rank)
        rows: list[tuple[str, ...]] = [
            (
                stream.source.label,
                "" if stream.step is None else str(stream.step),
                "  ".join(_metric(name, value) for name, value in list(stream.values.items())[:4]),
                str(stream.n_records),
                f"{rates[uid]:.0f}",
                _lag(stream),
            )
            for uid, stream in sources[:_MAX_ROWS]
        ]
        if len(sources) > _MAX_ROWS:
            rows.append((f"and {len(sources) - _MAX_ROWS} more", "", "", "", "", ""))
        if self._delivery.waiting_for:
            rows.append((f"waiting for {self._delivery.waiting_for}", "", "", "", "", ""))
        return rows

    def _summary(self) -> str:
        streams = self._streams().values()
        records = sum(stream.n_records for stream in streams)
        size = sum(stream.n_bytes for stream in streams)
        return (
            f"results: {records} records ({size / 1e6:.1f} MB) of {len(streams)} processes in"
            f" {time.monotonic() - self._start:.0f} s"
        )


class _Changes:
    """How fast the records of each source come, from one look to the next."""

    def __init__(self, since_s: float) -> None:
        self.since_s = since_s
        self._counts: dict[str, int] = {}

    def rates(self, streams: dict[str, Stream], now: float) -> dict[str, float]:
        """Return records per second since the last look, by source."""
        passed = max(now - self.since_s, 1e-3)
        old, self._counts = self._counts, {uid: s.n_records for uid, s in streams.items()}
        self.since_s = now
        return {uid: (n - old.get(uid, 0)) / passed for uid, n in self._counts.items()}


def _table(rows: list[tuple[str, ...]]) -> Any:
    from rich.table import Table

    # No border and no title: what a rank prints into the terminal tears nothing then.
    table = Table(box=None, pad_edge=False)
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in ("process", "metrics") else "right")
    for row in rows:
        table.add_row(*row)
    return table


def _lag(stream: Stream) -> str:
    """Return for how many seconds the last record has waited, by the clocks of both sides."""
    if stream.received == stream.durable:
        return "0"
    return f"{max(0.0, time.time() - stream.sent_s):.1f}"


def _metric(name: str, value: object) -> str:
    return f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
