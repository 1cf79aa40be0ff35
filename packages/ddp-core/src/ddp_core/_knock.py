"""Whether the host of a silent worker is still there: its address is knocked at.

The kernel of a host accepts a connection even while the worker's interpreter stands still, so an
open door tells a busy worker from a host without power. Goes to the scheduler by value: it must
import nothing of this package.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import time
from urllib.parse import urlsplit

KNOCK_S = 2.0
# An answer is believed for so long: each knock costs the worker a connection that it must refuse.
AGAIN_S = 5.0
HOST_IS_GONE = "its host does not answer"
PROCESS_IS_GONE = "nothing listens at its address any more"

# These say something about this host, not about the other.
_OURS = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL, errno.EACCES}
)


class Knocker:
    """Knocks at workers, at each at most once at a time. Lives on one event loop."""

    def __init__(self) -> None:
        self._knocks: dict[str, tuple[float, asyncio.Task[str]]] = {}

    def knock(self, address: str) -> asyncio.Task[str]:
        """The knock that goes on or was answered a moment ago, or else a new one.

        Its result is the empty string when the host answers, else a reason to give the worker up.
        """
        now = time.monotonic()
        for other, (began, task) in list(self._knocks.items()):
            if task.done() and now - began > AGAIN_S:
                del self._knocks[other]
        if address not in self._knocks:
            task = asyncio.create_task(why_gone(address), name=f"ddp-knock-{address}")
            self._knocks[address] = now, task
        return self._knocks[address][1]

    def close(self) -> None:
        """Stop knocking."""
        for _, task in self._knocks.values():
            task.cancel()


async def why_gone(address: str, bound_s: float = KNOCK_S) -> str:
    """Why the worker at ``address`` must be gone; the empty string when it may be there."""
    parts = urlsplit(address)
    if parts.scheme == "inproc" or parts.port is None:
        return ""
    try:
        _, writer = await asyncio.wait_for(
            asyncio.open_connection(parts.hostname, parts.port), bound_s
        )
    except ConnectionRefusedError:
        # The host is there; only over TCP is a port that is closed a process that has ended.
        return PROCESS_IS_GONE if parts.scheme in ("tcp", "tls") else ""
    except socket.gaierror:
        return ""
    except OSError as exc:
        return "" if exc.errno in _OURS else HOST_IS_GONE
    writer.close()
    return ""
