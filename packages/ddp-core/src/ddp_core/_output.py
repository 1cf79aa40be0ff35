"""Shows on the client what ranks print: lines, and the progress bars that overwrite themselves."""

from __future__ import annotations

import contextlib
import logging
import shutil
import sys
import time
from collections.abc import Sequence
from typing import Any

rank_logger = logging.getLogger("ddp_core.ranks")

# Where a bar cannot be drawn over itself, as in a file, it is written this often.
BAR_EVERY_S = 10.0
_ERASE = "\r\x1b[K"


class Output:
    """What the ranks of one attempt print, each line with its rank in front.

    A text that ends in a carriage return is a progress bar. On a terminal the bar of the lowest
    rank stays below the lines; elsewhere each bar becomes a line every ``BAR_EVERY_S``. Used by one
    thread.

    Args:
        logs: ``LaunchOptions.logs``.
    """

    def __init__(self, logs: str) -> None:
        self._logs = logs
        self._n_lines = 0
        self._bars: dict[Any, str] = {}
        self._written: dict[Any, float] = {}
        self._is_drawn = False

    def show(self, lines: Sequence[Sequence[Any]], n_lines: int) -> None:
        """Show the next lines, in order, with a word about what was too much.

        Args:
            lines: Pairs of rank and text.
            n_lines: How many lines there have been so far, shown or not.
        """
        missed = n_lines - self._n_lines - len(lines)
        self._n_lines = n_lines
        if missed > 0:
            lines = [("?", f"[... {missed} lines were too fast for this client ...]"), *lines]
        texts = [text for rank, line in lines for text in self._take(rank, line)]
        if self._logs == "logger":
            for text in texts:
                rank_logger.info("%s", text)
        elif self._logs == "stderr" and lines:
            self._write(texts)

    def close(self) -> None:
        """Show where the bars have stopped, as lines."""
        self.show(list(self._bars.items()), self._n_lines + len(self._bars))

    def _take(self, rank: Any, line: str) -> list[str]:
        """The lines that are now due because a rank has printed ``line``."""
        text = f"[rank {rank}] {line.rstrip(chr(13))}"
        if not line.endswith("\r"):
            self._bars.pop(rank, None)
            return [text]
        self._bars[rank] = line.rstrip("\r")
        now = time.monotonic()
        if _is_terminal(self._logs) or now - self._written.get(rank, now - 1e9) < BAR_EVERY_S:
            return []
        self._written[rank] = now
        return [text]

    def _write(self, texts: Sequence[str]) -> None:
        parts = [_ERASE] if self._is_drawn else []
        parts += [f"{text}\n" for text in texts]
        self._is_drawn = bool(self._bars) and _is_terminal(self._logs)
        if self._is_drawn:
            rank = min(self._bars)
            # A bar that is wrapped could not be erased.
            parts.append(
                f"[rank {rank}] {self._bars[rank]}"[: shutil.get_terminal_size().columns - 1]
            )
        write_stderr("".join(parts))


def write_stderr(text: str) -> None:
    """Write, if it can be: a job outlives the terminal, the pipe or the disk that is behind it."""
    with contextlib.suppress(AttributeError, OSError, ValueError):
        sys.stderr.write(text)
        sys.stderr.flush()


def _is_terminal(logs: str) -> bool:
    with contextlib.suppress(AttributeError, OSError, ValueError):
        return logs == "stderr" and sys.stderr.isatty()
    return False
