"""The only module that touches the Dask queue; what it offers is the `Channel` protocol.

It calls the scheduler's queue and metadata handlers over a connection of its own, on whatever
event loop it is used, rather than through `distributed.Queue`: a `Queue` needs a `Client` or the
task of a worker, which a plain thread of a worker and a forked child do not have, and costs a
rank a client with heartbeats and threads. The operations are those of `distributed.Queue`.

Facts that it rests on (distributed 2025.4 to 2026.8): `queue_get(batch=True)` never waits, so
that nothing is swallowed by a cancelled wait and nothing times out (each time-out would log an
error on the scheduler); a queue holds whatever msgpack can hold, and bytes wrapped by
`to_serialize` pass through the scheduler without a copy; metadata is kept until it is replaced.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, Protocol

from distributed import rpc
from distributed.protocol.serialize import to_serialize

from ddp_results._locate import SchedulerAddress
from ddp_results._page import ResultsPage, travelling
from ddp_results._wire import Packed
from ddp_results.errors import ChannelLostError, ChannelResetError

logger = logging.getLogger("ddp_results")

SCHEDULER_BUDGET_BYTES = 192 * 2**20  # what all sources of a run may leave on the scheduler
_WRAP_FROM_BYTES = 32 * 2**10  # below, msgpack's copy is cheaper than a frame of its own
_CALL_TIMEOUT_S = 60.0
_ROOT = "ddp-results"


class Channel(Protocol):
    """Frames from many sources to one client, and small notes by name both ways.

    Used on one event loop. `put` and `drain` keep the order of each source. A frame may be lost
    between `drain` and its caller (cancellation, death): that is why there are acknowledgements.
    """

    async def open(self) -> None:
        """Connect; create what is missing."""

    async def put(self, frame: Packed) -> None:
        """Append a frame."""

    async def drain(self) -> Sequence[Packed]:
        """Take all frames that are there now, oldest first."""

    async def read(self, *name: str) -> Any:
        """Return the note `name`, or the mapping of the notes below it, or None."""

    async def write(self, name: tuple[str, ...], value: bytes | dict[str, bytes]) -> None:
        """Replace the note `name`, and whatever was below it."""

    async def add_page(self) -> None:
        """Let the note `shown` be seen, where there is a dashboard."""

    async def close(self) -> None:
        """Disconnect; what was put stays."""


class DaskChannel:
    """The queue `ddp-results-<key>` and the metadata below `ddp-results/<key>` of a scheduler.

    Raises from every call:
        ChannelLostError: the scheduler does not answer.
        ChannelResetError: the scheduler has no such queue (any more); it has been created anew.
    """

    def __init__(self, key: str, where: SchedulerAddress) -> None:
        self._key = key
        self._queue = f"ddp-results-{key}"
        self._where = where
        self._scheduler: Any = None

    async def open(self) -> None:
        """Connect, and create the queue unless it exists."""
        if self._scheduler is None:
            self._scheduler = rpc(  # type: ignore[no-untyped-call]
                self._where.address,
                connection_args=self._where.connection_args(),
                # Never unpickle what somebody else has put into our queue.
                serializers=("dask", "error"),
                deserializers=("dask", "error"),
            )
        await self._call("queue_create", name=self._queue, maxsize=0)

    async def put(self, frame: Packed) -> None:
        """Append a frame; never waits for room."""
        try:
            data: Any = [_wrapped(each) for each in frame]
            await self._call("queue_put", name=self._queue, data=data, timeout=None)
        except TypeError:  # to_serialize is not documented for queues: a copy always works
            data = [bytes(each) for each in frame]
            await self._call("queue_put", name=self._queue, data=data, timeout=None)

    async def drain(self) -> Sequence[Packed]:
        """Take all frames; never waits for one."""
        rows = await self._call("queue_get", name=self._queue, timeout=None, batch=True)
        return [row["value"] for row in rows if _is_packed(row.get("value"))]

    async def read(self, *name: str) -> Any:
        """Return a note or a mapping of notes, or None."""
        return await self._call("get_metadata", keys=[_ROOT, self._key, *name], default=None)

    async def write(self, name: tuple[str, ...], value: bytes | dict[str, bytes]) -> None:
        """Replace a note."""
        await self._call("set_metadata", keys=[_ROOT, self._key, *name], value=value)

    async def add_page(self) -> None:
        """Add the page `ddp-results` to the dashboard, if this scheduler takes plugins."""
        try:
            await self._call(
                "register_scheduler_plugin",
                plugin=travelling(),
                name=ResultsPage.name,
                idempotent=True,
            )
        except ChannelLostError:
            raise
        except Exception as error:  # noqa: BLE001 - results do not depend on it
            logger.info("no page ddp-results on the Dask dashboard: %r", error)

    async def close(self) -> None:
        """Disconnect."""
        if self._scheduler is not None:
            scheduler, self._scheduler = self._scheduler, None
            await scheduler.close_rpc()

    async def _call(self, operation: str, **arguments: Any) -> Any:
        try:
            async with asyncio.timeout(_CALL_TIMEOUT_S):
                return await getattr(self._scheduler, operation)(**arguments)
        except KeyError as error:
            await self._call("queue_create", name=self._queue, maxsize=0)
            raise ChannelResetError(f"the scheduler had no queue {self._queue!r}") from error
        except (OSError, TimeoutError) as error:  # CommClosedError is an OSError
            raise ChannelLostError(
                f"{operation} on the Dask scheduler at {self._where.address}: {error!r};"
                " is it still running, and reachable from here?"
            ) from error


def _wrapped(data: bytes | memoryview) -> Any:
    """Let large data pass through Dask as it is; as a view, for `bytes` are copied on arrival."""
    return data if len(data) < _WRAP_FROM_BYTES else to_serialize(memoryview(data))  # type: ignore[no-untyped-call]


def _is_packed(value: Any) -> bool:
    """Whether it is a frame with its parts, and not what somebody else has put there."""
    return (
        isinstance(value, list | tuple)
        and len(value) > 0
        and all(isinstance(each, bytes | memoryview) for each in value)
    )
