"""List what lies below a prefix, several directories at a time, into an index."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from ._address import address, as_directory
from ._contract import Page
from ._direct import open_store
from ._engine import engine
from ._index import Index, IndexBuilder
from ._reader import scheduler_for
from ._requests import Requests
from ._scheduler import Opener
from .errors import EmptyDatasetError, IndexFileError
from .options import S3Options

_AT_ONCE = 16
_DEEPEST = 3
_MOST_DIRECTORY_PAGES = 4


def find_index(
    bucket: str, prefix: str, options: S3Options, index: Index | str | os.PathLike[str] | None
) -> Index:
    """Return the index that was given, or that lies in the file, or that a listing makes.

    A file that does not exist is written after listing.

    Raises:
        IndexFileError: when the index is damaged or of another bucket or prefix.
        EmptyDatasetError: when nothing is below the prefix.
        S3DataError: when the bucket cannot be listed.
    """
    if isinstance(index, Index):
        found = index
    elif index is not None and Path(index).exists():
        found = Index.load(index)
    else:
        if index is not None:
            _check_writable(Path(index))
        found = list_index(bucket, prefix, options)
        if index is not None:
            found.save(index)
    if (found.bucket, found.prefix) != (bucket, as_directory(prefix)):
        raise IndexFileError(
            f"the index is of {address(found.bucket, found.prefix)}, "
            f"not of {address(bucket, as_directory(prefix))}; give the index of the same address"
        )
    return found


def list_index(bucket: str, prefix: str, options: S3Options, opener: Opener = open_store) -> Index:
    """Return an index of all objects below a prefix, in the order of S3 (UTF-8 bytes).

    A prefix means a directory: `train` and `train/` are the same and never match `train2/x` or
    `train.txt`. It blocks; every request has its own deadline.

    Raises:
        EmptyDatasetError: when there is nothing.
        S3DataError: when the bucket cannot be listed.
    """
    where = as_directory(prefix)
    home = engine()
    scheduler = scheduler_for(home, bucket, options, opener)

    async def collect() -> IndexBuilder:
        return await _Lister(await scheduler.requests(), bucket, where).tree(where, 0)

    builder = home.run(collect(), f"listing {address(bucket, where)}")
    if not len(builder):
        hint = _hint(where) if where else "the bucket is empty"
        raise EmptyDatasetError(
            f"listing {address(bucket, where)}: no objects there; {hint}",
            address=address(bucket, where),
        )
    return builder.build().in_order()


def _hint(prefix: str) -> str:
    """Return what to do about a prefix below which there is nothing."""
    plain = "/".join(part for part in prefix.split("/") if part not in ("", ".")) + "/"
    if plain != prefix:
        return f"keys are no paths: did you mean {plain if plain != '/' else ''!r}?"
    return "check the prefix, which is a directory: 'train' means 'train/', not 'train2/'"


def _check_writable(path: Path) -> None:
    """Refuse a place for an index before the listing is made for it."""
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise IndexFileError(
            f"the index cannot be written to {path}: {path.parent} is no directory that may be "
            "written; give another file, or create it"
        )


class _Lister:
    def __init__(self, requests: Requests, bucket: str, root: str) -> None:
        self._requests = requests
        self._bucket = bucket
        self._root = root
        self._gate = asyncio.Semaphore(_AT_ONCE)

    async def tree(self, prefix: str, level: int) -> IndexBuilder:
        """Return all below the prefix; directory by directory if it is large and has some."""
        page = await self._page(prefix)
        if page.token is not None and level < _DEEPEST and _has_directories(page, prefix):
            top = await self._top(prefix)
            if top is not None:
                return await self._branches(top, level)
        builder = self._builder(page)
        while page.token is not None:
            page = await self._page(prefix, token=page.token)
            self._add(builder, page)
        return builder

    async def _top(self, prefix: str) -> Page | None:
        """Return files and directories right below the prefix; None if they are very many."""
        top = Page([], [], [], [])
        token = None
        for _ in range(_MOST_DIRECTORY_PAGES):
            page = await self._page(prefix, delimiter="/", token=token)
            top.keys.extend(page.keys)
            top.sizes.extend(page.sizes)
            top.etags.extend(page.etags)
            top.prefixes.extend(page.prefixes)
            token = page.token
            if token is None:
                return top
        return None

    async def _branches(self, top: Page, level: int) -> IndexBuilder:
        async with asyncio.TaskGroup() as group:
            tasks = {
                prefix: group.create_task(self.tree(prefix, level + 1), name="ddp-s3data-list")
                for prefix in top.prefixes
            }
        builder = IndexBuilder(self._bucket, self._root)
        files = dict(zip(top.keys, zip(top.sizes, top.etags, strict=True), strict=True))
        for name in sorted([*files, *tasks]):
            if name in tasks:
                builder.extend(tasks[name].result())
            else:
                size, etag = files[name]
                builder.add([name], [size], [etag])
        return builder

    async def _page(self, prefix: str, *, delimiter: str = "", token: str | None = None) -> Page:
        async with self._gate:
            return await self._requests.list(prefix, delimiter=delimiter, token=token)

    def _builder(self, page: Page) -> IndexBuilder:
        builder = IndexBuilder(self._bucket, self._root)
        self._add(builder, page)
        return builder

    def _add(self, builder: IndexBuilder, page: Page) -> None:
        """Take over a page; what does not begin with the prefix we asked for is not ours."""
        ours = [place for place, key in enumerate(page.keys) if key.startswith(self._root)]
        if len(ours) == len(page.keys):
            builder.add(page.keys, page.sizes, page.etags)
        else:
            builder.add(
                [page.keys[place] for place in ours],
                [page.sizes[place] for place in ours],
                [page.etags[place] for place in ours],
            )


def _has_directories(page: Page, prefix: str) -> bool:
    return any("/" in key[len(prefix) :] for key in page.keys)
