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

_LINE_EVERY_S = 10.0
_TABLE_EVERY_S = 1.0
_MAX_ROWS = 32


class Display:
    """Call `tick` often; it looks at the clock. Writes to stderr; a table needs rich."""

    def __init__(
        self, key: str, collector: Collector, delivery: Delivery, watch: FutureWatch
    ) -> None:
        self._key = key
        self._collector = collector
        self._delivery = delivery
        self._watch = watch
        self._start = self._shown = time.monotonic()
        self._counts: dict[str, int] = {}
        self._live: Any = None
        self._has_shown = False

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            with contextlib.suppress(ImportError):
                from rich.console import Console
                from rich.live import Live

                self._live = Live(
                    self._table(1.0),
                    console=Console(stderr=True),
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
        if self._has_shown:
            sys.stderr.write(f"{self._summary()}\n")
            sys.stderr.flush()

    def tick(self) -> None:
        """Show the state if it is time to."""
        now = time.monotonic()
        passed = now - self._shown
        if self._live is not None and passed >= _TABLE_EVERY_S:
            self._live.update(self._table(passed), refresh=True)
        elif self._live is None and passed >= _LINE_EVERY_S:
            sys.stderr.write(f"{self._line(passed)}\n")
            sys.stderr.flush()
        else:
            return
        self._shown = now
        self._has_shown = True
        self._counts = {uid: s.n_records for uid, s in self._streams().items()}

    def _streams(self) -> dict[str, Any]:
        return dict(self._collector.streams)

    def _line(self, passed: float) -> str:
        streams = self._streams()
        total = sum(stream.n_records for stream in streams.values())
        rate = (total - sum(self._counts.values())) / passed
        steps = [stream.step for stream in streams.values() if stream.step is not None]
        step = f", step {min(steps)}" if steps else ""
        losses = [s.values["loss"] for s in streams.values() if "loss" in s.values]
        loss = f", loss {losses[0]:.4g}" if losses and isinstance(losses[0], float) else ""
        waiting = self._delivery.waiting_for
        return (
            f"results {self._key}: {total} records of {len(streams)} processes, {rate:.0f}/s"
            f"{step}{loss}; {self._watch.words}"
            + (f"; waiting for {waiting}" if waiting else self._finishing())
        )

    def _finishing(self) -> str:
        """Say for what it waits when all ranks have ended."""
        if self._watch.n_pending or not self._watch.total:
            return ""
        behind = sum(stream.received - stream.durable for stream in self._streams().values())
        return f"; storing the last {behind}" if behind else "; waiting for the last word of some"

    def _table(self, passed: float) -> Any:
        from rich.table import Table

        # No border and no title: what a rank prints into the terminal tears nothing then.
        table = Table(box=None, pad_edge=False)
        for column in ("process", "step", "metrics", "records", "per s", "lag s"):
            table.add_column(
                column, justify="left" if column in ("process", "metrics") else "right"
            )
        streams = sorted(self._streams().items(), key=lambda item: item[1].source.rank)
        for uid, stream in streams[:_MAX_ROWS]:
            behind = stream.received - stream.durable
            table.add_row(
                stream.source.label,
                "" if stream.step is None else str(stream.step),
                "  ".join(_metric(name, value) for name, value in list(stream.values.items())[:4]),
                str(stream.n_records),
                f"{(stream.n_records - self._counts.get(uid, 0)) / passed:.0f}",
                f"{max(0.0, time.time() - stream.sent_s):.1f}" if behind else "0",
            )
        if len(streams) > _MAX_ROWS:
            table.add_row(f"and {len(streams) - _MAX_ROWS} more", *[""] * 5)
        if self._delivery.waiting_for:
            table.add_row(f"waiting for {self._delivery.waiting_for}", *[""] * 5)
        return table

    def _summary(self) -> str:
        streams = self._streams().values()
        records = sum(stream.n_records for stream in streams)
        size = sum(stream.n_bytes for stream in streams)
        return (
            f"results: {records} records ({size / 1e6:.1f} MB) of {len(streams)} processes in"
            f" {time.monotonic() - self._start:.0f} s"
        )


def _metric(name: str, value: object) -> str:
    return f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
