from __future__ import annotations

from ddp_core._lines import (
    BAR_PERIOD_S,
    BATCH_BYTES,
    LINE_BYTES,
    PERIOD_S,
    TAIL_LINES,
    Outgoing,
    Printed,
    seen,
)


def test_lines_are_whole_however_they_are_read() -> None:
    printed = Printed()
    assert printed.feed(b"a\nb") == [b"a"]
    assert printed.feed(b"c\n\nd") == [b"bc", b""]
    assert printed.tail() == "a\nbc\nd"
    assert printed.finish() == b"d"
    assert printed.finish() == b""
    assert printed.n_bytes == 7


def test_of_a_line_the_last_that_a_terminal_shows_is_seen() -> None:
    assert seen(b"windows\r") == b"windows"
    assert seen(b"\r10%\r100%") == b"100%"
    assert seen(b"10%\r100%\r") == b"100%"


def test_only_an_unfinished_line_that_was_begun_again_is_a_bar() -> None:
    printed = Printed()
    printed.feed(b"starting")
    assert printed.bar() == b""
    printed.feed(b"\r 1%")
    assert printed.bar() == b" 1%"
    printed.feed(b"\r 2%\r")
    assert printed.bar() == b" 2%"
    assert printed.feed(b" 3%\ndone") == [b"starting\r 1%\r 2%\r 3%"]
    assert printed.bar() == b""
    assert printed.tail() == " 3%\ndone"


def test_an_endless_line_keeps_its_beginning_and_an_endless_bar_its_end() -> None:
    line, bar = Printed(), Printed()
    for step in range(10_000):
        line.feed(b"%d," % step)
        bar.feed(b"\r%d" % step)
    assert line.tail().startswith("0,1,2,")
    assert len(line.tail()) == LINE_BYTES
    assert bar.bar() == b"9999"


def test_the_last_lines_are_kept() -> None:
    printed = Printed()
    printed.feed(b"".join(b"%d\n" % n for n in range(1000)))
    assert printed.tail().splitlines() == [str(n) for n in range(1000 - TAIL_LINES, 1000)]


def test_what_exceeds_a_batch_is_counted_but_not_the_last_line() -> None:
    outgoing = Outgoing()
    outgoing.add(1, [b"x" * 1000] * 100)
    outgoing.add_last(1, b"end")
    batch = outgoing.take(0.0)
    kept = len(batch) - 2
    assert kept * 1000 <= BATCH_BYTES + 1000
    assert batch[-2:] == [(1, "end"), (1, f"[... {100 - kept} lines not sent ...]")]
    assert outgoing.due_at() is None


def test_lines_leave_at_once_and_then_once_in_a_period() -> None:
    outgoing = Outgoing()
    outgoing.add(0, [b"a"])
    assert outgoing.due_at() == float("-inf")
    outgoing.take(10.0)
    outgoing.add(0, [b"b"])
    assert outgoing.due_at() == 10.0 + PERIOD_S


def test_a_bar_leaves_in_its_newest_state_once_in_a_longer_period() -> None:
    outgoing = Outgoing()
    outgoing.show(0, b"1%")
    assert outgoing.take(10.0) == [(0, "1%\r")]
    outgoing.show(0, b"2%")
    assert outgoing.take(11.0) == []
    assert outgoing.due_at() == 10.0 + BAR_PERIOD_S
    outgoing.show(0, b"3%")
    assert outgoing.take(10.0 + BAR_PERIOD_S) == [(0, "3%\r")]
    assert outgoing.due_at() is None


def test_a_bar_that_has_ended_is_a_line() -> None:
    outgoing = Outgoing()
    outgoing.show(0, b"99%")
    outgoing.show(0, b"")
    outgoing.add(0, [b"99%\r100%"])
    assert outgoing.take(0.0) == [(0, "100%")]
