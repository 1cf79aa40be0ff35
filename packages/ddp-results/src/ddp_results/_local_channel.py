"""A channel within one process: for debugging without a cluster, and for tests."""

from __future__ import annotations

import threading
from typing import Any

from ddp_results._wire import Packed


class LocalChannel:
    """Keeps frames and notes in this process. Every instance with the same key sees the same."""

    _shared: dict[str, tuple[list[Packed], dict[str, Any]]] = {}  # noqa: RUF012 - shared on purpose
    _lock = threading.Lock()

    def __init__(self, key: str) -> None:
        with self._lock:
            self._frames, self._notes = self._shared.setdefault(key, ([], {}))

    async def open(self) -> None:
        """Do nothing: there is nothing to connect to."""

    async def put(self, frame: Packed) -> None:
        """Append a frame."""
        with self._lock:
            self._frames.append(frame)

    async def drain(self) -> list[Packed]:
        """Take all frames."""
        with self._lock:
            frames = self._frames[:]
            self._frames.clear()
        return frames

    async def read(self, *name: str) -> Any:
        """Return a note or a mapping of notes, or None."""
        with self._lock:
            notes: Any = self._notes
            for part in name:
                notes = notes.get(part) if isinstance(notes, dict) else None
            return dict(notes) if isinstance(notes, dict) else notes

    async def write(self, name: tuple[str, ...], value: bytes | dict[str, bytes]) -> None:
        """Replace a note."""
        with self._lock:
            if not name:
                self._notes.clear()
                return
            notes = self._notes
            for part in name[:-1]:
                inner = notes.get(part)
                if not isinstance(inner, dict):
                    inner = notes[part] = {}
                notes = inner
            notes[name[-1]] = value

    async def add_page(self) -> None:
        """Do nothing: there is no dashboard."""

    async def close(self) -> None:
        """Do nothing: what was put stays."""
