from __future__ import annotations

import contextlib
import io
import logging
import os
from collections.abc import Callable
from contextlib import redirect_stderr
from typing import TextIO

import pytest

from ddp_core._output import Output


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def screen(written: str) -> list[str]:
    """What a terminal shows after these characters: lines, and erasing to the start of one."""
    rows = [""]
    for part in written.split("\n"):
        rows[-1] = part.rsplit("\r\x1b[K", 1)[-1]
        rows.append("")
    return rows[:-1]


def shown(output: Output, *lines: tuple[int, str], on: io.StringIO) -> str:
    """Everything on a stream after so many more lines, given one by one."""
    with redirect_stderr(on):
        for line in lines:
            output.show([line], output._n_lines + 1)
    return on.getvalue()


def test_lines_come_in_order_with_their_rank() -> None:
    text = shown(Output("stderr"), (0, "a"), (1, "b"), (0, "c"), on=io.StringIO())
    assert text == "[rank 0] a\n[rank 1] b\n[rank 0] c\n"


def test_lines_that_were_missed_are_counted() -> None:
    output = Output("stderr")
    with redirect_stderr(io.StringIO()) as stream:
        output.show([(0, "a")], 1)
        output.show([(0, "d")], 4)
    assert "2 lines were too fast" in stream.getvalue()


def test_on_a_terminal_the_bar_of_the_lowest_rank_stays_below_the_lines() -> None:
    output, terminal = Output("stderr"), Terminal()
    text = shown(output, (1, "10%\r"), (0, "20%\r"), on=terminal)
    assert screen(text) == ["[rank 0] 20%"]
    text = shown(output, (1, "a line"), (0, "30%\r"), on=terminal)
    assert screen(text) == ["[rank 1] a line", "[rank 0] 30%"]
    text = shown(output, (0, "done"), on=terminal)
    assert screen(text) == ["[rank 1] a line", "[rank 0] done", ""]


def test_a_bar_is_never_wider_than_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert len(shown(Output("stderr"), (0, "#" * 500 + "\r"), on=Terminal())) < 80


@pytest.mark.parametrize("stream", [Terminal(), io.StringIO()], ids=["terminal", "file"])
def test_a_bar_that_stops_is_left_as_a_line(stream: io.StringIO) -> None:
    output = Output("stderr")
    shown(output, (0, "80%\r"), (0, "90%\r"), on=stream)
    with redirect_stderr(stream):
        output.close()
        output.close()
    assert screen(stream.getvalue())[-2:] == ["[rank 0] 90%", ""]


def test_in_a_file_a_bar_is_a_line_now_and_then() -> None:
    bars = [(0, f"{percent}%\r") for percent in range(100)]
    text = shown(Output("stderr"), *bars, (0, "100%"), on=io.StringIO())
    assert text == "[rank 0] 0%\n[rank 0] 100%\n"


def test_the_logger_gets_lines_without_carriage_returns(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "ddp_core.ranks"):
        Output("logger").show([(0, "100 %s\r"), (1, "text")], 2)
    assert [r.getMessage() for r in caplog.records] == ["[rank 0] 100 %s", "[rank 1] text"]


@pytest.mark.parametrize("logs", ["worker", "off"])
def test_what_is_shown_elsewhere_is_not_shown_here(logs: str) -> None:
    assert not shown(Output(logs), (0, "text"), (0, "1%\r"), on=Terminal())


def closed() -> TextIO:
    stream = io.StringIO()
    stream.close()
    return stream


def full_disk() -> TextIO:
    return open(os.open("/dev/full", os.O_WRONLY), "w")


def pipe_without_reader() -> TextIO:
    readable, writable = os.pipe()
    os.close(readable)
    return open(writable, "w")


@pytest.mark.parametrize("broken", [closed, full_disk, pipe_without_reader, lambda: None])
def test_where_nobody_can_read_showing_does_nothing(broken: Callable[[], TextIO | None]) -> None:
    """A job must not fail because the terminal of its client has gone."""
    output, stream = Output("stderr"), broken()
    with redirect_stderr(stream):
        output.show([(0, "text"), (0, "1%\r"), (0, "2%\r")], 3)
        output.close()
    if stream is not None:
        with contextlib.suppress(OSError):
            stream.close()
    assert shown(output, (0, "later"), on=io.StringIO()) == "[rank 0] later\n"
