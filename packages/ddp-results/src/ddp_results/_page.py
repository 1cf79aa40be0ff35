"""The page `ddp-results` of the Dask dashboard: the table of `process_results`, for every run.

Its code travels to the scheduler, which need not have ddp-results: nothing of the package is
imported here. It shows notes that the clients leave in the scheduler's metadata, and nothing else.
"""

from __future__ import annotations

import contextlib
import datetime
import html
import sys
import threading
from collections.abc import Iterable
from typing import Any

import cloudpickle
import msgpack
from distributed.diagnostics.plugin import SchedulerPlugin
from tornado.web import RequestHandler

COLUMNS = ("process", "step", "metrics", "records", "per s", "lag s")
_MAX_RUNS = 20
_HEAD = """<!DOCTYPE html><html><head><meta charset="utf-8"><title>ddp-results</title>
<meta http-equiv="refresh" content="2"><style>body {font: 14px sans-serif; margin: 2em}
td, th {text-align: right; padding: .1em 1em .1em 0} td.text, th.text {text-align: left}
h2 {font-size: 1.1em; margin: 1.5em 0 .2em}</style></head><body><a href="status">Dask</a>
"""
_pickling = threading.Lock()


class ResultsPage(SchedulerPlugin):
    """Adds the page to the scheduler's HTTP server, once."""

    name = "ddp-results-page"
    idempotent = True

    def start(self, scheduler: Any) -> None:  # type: ignore[override]
        """Add the route; `.*` is the prefix that the dashboard may have."""
        route = (r"(?:/.*)?/ddp-results", _Handler, {"metadata": scheduler.task_metadata})
        scheduler.http_application.add_handlers(".*$", [route])


class _Handler(RequestHandler):
    def initialize(self, metadata: dict[str, Any]) -> None:
        self._metadata = metadata

    def get(self) -> None:
        runs = self._metadata.get("ddp-results", {})
        notes = {str(k): run.get("shown") for k, run in runs.items() if isinstance(run, dict)}
        self.write(render(notes))


def travelling() -> bytes:
    """Return the plugin, and all the code that it needs, for `register_scheduler_plugin`."""
    module = sys.modules[__name__]
    with _pickling:
        cloudpickle.register_pickle_by_value(module)
        try:
            code: bytes = cloudpickle.dumps(ResultsPage())
            return code
        finally:
            cloudpickle.unregister_pickle_by_value(module)


def pack_shown(time_s: float, words: str, rows: Iterable[tuple[str, ...]]) -> bytes:
    """Return the note of a run: when it was written, its state in words, and rows of `COLUMNS`."""
    packed: bytes = msgpack.packb([1, time_s, words, rows], unicode_errors="backslashreplace")
    return packed


def render(notes: dict[str, Any]) -> str:
    """Return the page for the notes of the runs by name, the latest first."""
    found = []
    for key, note in notes.items():
        with contextlib.suppress(Exception):  # none, or not ours
            version, time_s, words, rows = msgpack.unpackb(note)
            found += [(time_s, _render_run(key, time_s, words, rows))] if version == 1 else []
    found.sort(reverse=True)
    runs = "".join(text for _, text in found[:_MAX_RUNS])
    more = f"<p>and {len(found) - _MAX_RUNS} earlier runs</p>" if len(found) > _MAX_RUNS else ""
    return f"{_HEAD}{runs or '<p>no results yet</p>'}{more}</body></html>"


def _render_run(key: str, time_s: float, words: str, rows: list[list[str]]) -> str:
    at = datetime.datetime.fromtimestamp(time_s, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    lines = "".join(f"<tr>{_cells('td', row)}</tr>" for row in rows)
    return (
        f"<h2>{html.escape(key)}</h2>{html.escape(words)} ({at})"
        f"<table><tr>{_cells('th', COLUMNS)}</tr>{lines}</table>"
    )


def _cells(tag: str, texts: Any) -> str:
    kinds = [" class=text" if name in ("process", "metrics") else "" for name in COLUMNS]
    return "".join(
        f"<{tag}{kind}>{html.escape(text)}</{tag}>" for kind, text in zip(kinds, texts, strict=True)
    )
