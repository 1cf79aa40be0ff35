"""For tests: a store in memory, and the contract that every store keeps."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from ._contract import ObjectStore, Page, RefusedError, Reply

__all__ = ["MemoryStore", "check_object_store"]


class MemoryStore:
    """An object store (see `ObjectStore`) that holds its objects in a dict."""

    def __init__(self, objects: Mapping[str, bytes]) -> None:
        self.objects = dict(objects)
        self.closed = False

    async def get(self, key: str) -> Reply:
        """Return the object, or refuse with `NoSuchKey`."""
        if key not in self.objects:
            raise RefusedError(Reply(404, {}, b"", code="NoSuchKey"))
        body = self.objects[key]
        return Reply(200, {"etag": f'"{_etag(body)}"', "content-length": str(len(body))}, body)

    async def list(
        self, prefix: str, *, delimiter: str = "", token: str | None = None, limit: int = 1000
    ) -> Page:
        """Return one page."""
        names: dict[str, bool] = {}  # to whether it is a directory
        for key in sorted(self.objects, key=lambda each: each.encode("utf-8", "surrogatepass")):
            if key.startswith(prefix):
                name, slash, _ = key[len(prefix) :].partition(delimiter or "\0")
                is_directory = bool(delimiter and slash)
                names[prefix + name + slash if is_directory else key] = is_directory
        rest = [name for name in names if token is None or name.encode() > token.encode()]
        found = rest[:limit]
        keys = [name for name in found if not names[name]]
        return Page(
            keys=keys,
            sizes=[len(self.objects[key]) for key in keys],
            etags=[_etag(self.objects[key]) for key in keys],
            prefixes=[name for name in found if names[name]],
            token=found[-1] if len(rest) > limit else None,
        )

    async def refresh(self) -> bool:
        """Return False: there are no credentials."""
        return False

    async def reroute(self, region: str) -> bool:  # noqa: ARG002
        """Return False: there are no regions."""
        return False

    async def close(self) -> None:
        """Remember it."""
        self.closed = True


async def check_object_store(store: ObjectStore, objects: Mapping[str, bytes]) -> None:
    """Check that a store keeps the contract of `ObjectStore`.

    Args:
        store: to be checked; closed at the end.
        objects: what is in it, at least three with a common directory, and nothing else.

    Raises:
        AssertionError: naming the clause that is broken.
    """
    for key, body in objects.items():
        reply = await store.get(key)
        _require(reply.status == 200 and reply.body == body, f"get returns the body of {key!r}")
        _require(reply.etag == _etag(body), f"get returns the ETag of {key!r}")
    ordered = sorted(objects, key=lambda key: key.encode("utf-8", "surrogatepass"))
    page = await store.list("")
    _require(sorted(page.keys) == sorted(ordered), f"list returns every key: {page.keys}")
    ordered = page.keys
    _require(page.sizes == [len(objects[key]) for key in ordered], "list returns sizes")
    _require(page.etags == [_etag(objects[key]) for key in ordered], "list returns ETags")
    _require(page.token is None, "a complete list has no token")
    await _check_pages(store, ordered)
    top = await store.list("", delimiter="/")
    wanted = sorted({key.partition("/")[0] + "/" for key in ordered if "/" in key})
    _require(sorted(top.prefixes) == wanted, f"a delimiter gives the directories: {top.prefixes}")
    beside = [key for key in ordered if "/" not in key]
    _require(sorted(top.keys) == sorted(beside), "and the files beside them")
    _require((await store.list("no such prefix/")).keys == [], "nothing there is an empty page")
    try:
        await store.get("no such key")
    except RefusedError as error:
        _require(error.reply.status == 404, "a missing object is a 404")
    else:
        _require(False, "a missing object is refused")
    await store.close()


async def _check_pages(store: ObjectStore, ordered: list[str]) -> None:
    keys: list[str] = []
    token = None
    while True:
        _require(len(keys) <= len(ordered), "pages come to an end")
        page = await store.list("", token=token, limit=2)
        _require(len(page.keys) <= 2, "limit bounds a page")
        keys += page.keys
        token = page.token
        if token is None:
            break
    _require(keys == ordered, f"pages together are the whole list: {keys}")


def _require(truth: bool, claim: str) -> None:
    if not truth:
        raise AssertionError(f"broken contract of an object store: {claim}")


def _etag(body: bytes) -> str:
    return hashlib.md5(body, usedforsecurity=False).hexdigest()
