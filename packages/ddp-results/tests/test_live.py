"""What is shown while results come in."""

from __future__ import annotations

import io
import sys
import threading
import time

import pytest

from ddp_results import DaskResultsHandler, MemorySink


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Pending:
    """A future that ends when the test says so."""

    def __init__(self) -> None:
        self.ended = threading.Event()

    def done(self) -> bool:
        return self.ended.is_set()

    def exception(self, timeout: float) -> None:
        del timeout


def test_table_shows_names_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    terminal, future = Terminal(), Pending()
    for name, value in (("COLUMNS", "200"), ("TERM", "xterm")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stderr", terminal)
    handler = DaskResultsHandler()
    handler.log_metrics({"loss[/val]": 0.5, "[red]": 1, ":smile:": 2})
    run = threading.Thread(target=handler.process_results, args=(MemorySink(), future))
    run.start()
    try:
        deadline = time.monotonic() + 30
        while "loss[/val] 0.5  [red] 1  :smile: 2" not in terminal.getvalue():
            assert time.monotonic() < deadline, terminal.getvalue()
            time.sleep(0.05)
    finally:
        future.ended.set()
        run.join()
