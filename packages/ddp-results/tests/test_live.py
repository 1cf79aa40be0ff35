"""What is shown while results come in."""

from __future__ import annotations

import io
import sys
import threading

import pytest
from conftest import Pending, wait_for

from ddp_results import DaskResultsHandler, MemorySink


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


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
        shown = "loss[/val] 0.5  [red] 1  :smile: 2"
        wait_for(lambda: shown in terminal.getvalue(), 30, terminal.getvalue)
    finally:
        future.ended = True
        run.join()
