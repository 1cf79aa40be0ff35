"""What the rest of the package asks of a store of objects, and what a store answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer of the server. `headers` have lower-case names."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    code: str = ""
    detail: str = ""

    @property
    def request_id(self) -> str:
        """The server's name for the request."""
        return self.headers.get("x-amz-request-id", "")

    @property
    def etag(self) -> str:
        """ETag without its quotes."""
        return self.headers.get("etag", "").strip('"')


@dataclass(frozen=True, slots=True)
class Page:
    """A page of a listing: parallel lists, and where the next page begins."""

    keys: list[str]
    sizes: list[int]
    etags: list[str]
    prefixes: list[str] = field(default_factory=list)
    token: str | None = None


class RefusedError(Exception):
    """The server answered, and not with what was asked for."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(f"{reply.status} {reply.code}")
        self.reply = reply


class FaultError(Exception):
    """No (whole) answer came.

    Args:
        cause: `stale`, `reset`, `truncated`, `stalled`, `connect`, `name`, `tls` or `protocol`.
        detail: what happened, for people.
    """

    def __init__(self, cause: str, detail: str) -> None:
        super().__init__(f"{cause}: {detail}")
        self.cause = cause
        self.detail = detail


class ObjectStore(Protocol):
    """One bucket, used from one event loop.

    Every call makes one request and no retry: it returns, or raises `RefusedError`, or
    `FaultError`. Cancelling a call is always allowed and leaves nothing behind.
    """

    async def get(self, key: str) -> Reply:
        """Return status 200 and the whole body, as long as its Content-Length says."""

    async def list(
        self, prefix: str, *, delimiter: str = "", token: str | None = None, limit: int = 1000
    ) -> Page:
        """Return one page of what begins with `prefix`, in an order that stays the same."""

    async def refresh(self) -> bool:
        """Get credentials anew from their source; return whether they changed."""

    async def reroute(self, region: str) -> bool:
        """Use this region from now on; return whether that is a change."""

    async def close(self) -> None:
        """Give up all connections."""
