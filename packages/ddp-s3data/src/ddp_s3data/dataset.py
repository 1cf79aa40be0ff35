"""Objects of a bucket as a map-style dataset."""

from __future__ import annotations

import operator
import os
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, TypeVar

from torch.utils.data import Dataset

from ._address import address, split_address
from ._contract import Reply
from ._decoding import made
from ._engine import keep_inherited
from ._index import Index, KeyView
from ._listing import find_index
from ._reader import Reader
from ._routes import exported, imported
from ._stats import Counters, summary
from .errors import (
    AccessDeniedError,
    BadSampleLimitError,
    DecodeError,
    EmptyDatasetError,
    ObjectArchivedError,
    ObjectNotFoundError,
    RequestRefusedError,
    S3DataError,
)
from .options import S3Options

__all__ = ["OnError", "S3Dataset", "S3Object"]

_T = TypeVar("_T")
OnError = Literal["raise", "replace"] | Callable[[S3DataError], Any]
OF_ONE_OBJECT = (
    AccessDeniedError,
    DecodeError,
    ObjectArchivedError,
    ObjectNotFoundError,
    RequestRefusedError,
)
_REPLACEMENTS = 16  # positions tried for one bad sample


@dataclass(frozen=True, slots=True)
class S3Object:
    """One object, read in full.

    Attributes:
        bucket: where it lies.
        key: its whole key.
        data: its bytes.
        etag: as the server sent it with the bytes, without quotes.
        index: its position in the dataset.
    """

    bucket: str
    key: str
    data: bytes
    etag: str
    index: int

    @property
    def address(self) -> str:
        """`s3://bucket/key`."""
        return address(self.bucket, self.key)

    def __repr__(self) -> str:
        return f"S3Object({self.address!r}, {len(self.data)} bytes, index={self.index})"


class BucketDataset(Dataset[_T], Generic[_T]):
    """What all datasets here have in common; `_sample` makes a sample of an object.

    Map-style, picklable, usable in DataLoader workers started by fork, spawn or forkserver, also
    after this process has read. Reading from several threads is safe when the transform is.
    Nothing is connected until the first sample is read; each process opens its own connections.
    """

    def __init__(
        self,
        index: Index,
        options: S3Options,
        *,
        on_error: OnError = "raise",
        bad_sample_limit: int = 100,
    ) -> None:
        if on_error not in ("raise", "replace") and not callable(on_error):
            raise ValueError(f"on_error must be 'raise', 'replace' or callable, not {on_error!r}")
        self._index = index
        self.options = options
        self.on_error = on_error
        self.bad_sample_limit = bad_sample_limit
        self._live: tuple[Reader, Counters] | None = None
        self._bad = 0
        self._report: Callable[[list[float]], None] | None = None

    @property
    def bucket(self) -> str:
        """The bucket."""
        return self._index.bucket

    @property
    def prefix(self) -> str:
        """The prefix, with its final slash."""
        return self._index.prefix

    @property
    def root(self) -> str:
        """`s3://bucket/prefix/`."""
        return address(self.bucket, self.prefix)

    @property
    def all_files(self) -> Sequence[str]:
        """The keys of all samples, in the order of the samples; a read-only list."""
        return KeyView(self._index)

    def size(self, index: int) -> int:
        """Return the size of the object at this position, in bytes, as listed."""
        return self._index.size(self._place(index))

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, index: int) -> _T:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[_T]:
        """Return the samples at these positions, in this order.

        All are requested at once; each is decoded and transformed in the order of `indices`, so
        that random transforms draw as they would for single samples (unless a loader has asked for
        threads). Called by torch's DataLoader.

        Raises:
            IndexError: when a position is out of range.
            S3DataError: when an object cannot be read or decoded, and `on_error` is `raise`.
        """
        places = [self._place(index) for index in indices]
        ahead = getattr(indices, "ahead", ())
        lane = getattr(indices, "lane", 0)
        threads = getattr(indices, "threads", 0)
        reader, counters = self._reading()
        samples = []
        with closing(made(reader.read(places, ahead, lane), self._sample, threads)) as attempts:
            for place, attempt in attempts:
                started = time.perf_counter()
                try:
                    samples.append(attempt())
                except S3DataError as error:
                    samples.append(self._instead(place, error, counters))
                except Exception as error:
                    error.add_note(f"while making a sample of {self._where(place)}")
                    raise
                counters.decode_s += time.perf_counter() - started
        counters.samples += len(samples)
        if self._report is not None:
            self._report(counters.vector())
        return samples

    def stats(self) -> dict[str, Any]:
        """Return what this process has read of this dataset; see `S3DataLoader.stats`."""
        return summary([self._reading()[1].vector()])

    def report_to(self, report: Callable[[list[float]], None]) -> None:
        """Call this with all counters of this process after each batch; `S3DataLoader` does."""
        self._report = report

    def _sample(self, place: int, reply: Reply) -> _T:
        raise NotImplementedError

    def _place(self, index: int) -> int:
        count = len(self._index)
        place = operator.index(index)
        if not -count <= place < count:
            raise IndexError(f"sample {place} of {count} in {self.root}")
        return place + count if place < 0 else place

    def _where(self, place: int) -> str:
        return f"{self._index.address(place)} (sample {place})"

    def _reading(self) -> tuple[Reader, Counters]:
        """Return the reader of this process, a new one after fork."""
        live = self._live
        if live is None or live[0].pid != os.getpid():
            if live is not None:
                keep_inherited(live)
            counters = Counters()
            live = self._live = (Reader(self._index, self.options, counters), counters)
        return live

    def _instead(self, place: int, error: BaseException, counters: Counters) -> Any:
        """Return the sample that stands in for a bad one, as `on_error` says, or raise."""
        if not isinstance(error, S3DataError):
            raise error
        error.index = place
        if self.on_error == "raise" or not isinstance(error, OF_ONE_OBJECT):
            raise error  # with the server or the way to it the neighbours would fare no better
        self._bad += 1
        if self._bad > self.bad_sample_limit:
            raise BadSampleLimitError(
                f"{self._bad} samples of {self.root} cannot be used, more than "
                f"bad_sample_limit={self.bad_sample_limit}; the last: {error}",
                address=error.address,
                index=place,
            ) from error
        counters.replaced += 1
        if callable(self.on_error):
            return self.on_error(error)
        return self._neighbour(place, error)

    def _neighbour(self, place: int, error: S3DataError) -> Any:
        """Return the nearest following sample that is good, the same on every rank."""
        reader, _ = self._reading()
        for step in range(1, min(_REPLACEMENTS, len(self))):
            other = (place + step) % len(self)
            for _, found in reader.read([other]):
                if isinstance(found, Reply):
                    try:
                        return self._sample(other, found)
                    except OF_ONE_OBJECT:
                        continue
                if not isinstance(found, OF_ONE_OBJECT):
                    raise found
        raise error

    def __getstate__(self) -> dict[str, Any]:
        route = exported(self.bucket, self.options)
        return {**self.__dict__, "_live": None, "_bad": 0, "_report": None, "_route": route}

    def __setstate__(self, state: dict[str, Any]) -> None:
        route = state.pop("_route", None)
        self.__dict__.update(state)
        imported(self.bucket, self.options, route)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.root!r}: {len(self)} objects, "
            f"{self._index.total_bytes / 1e6:.1f} MB)"
        )


class S3Dataset(BucketDataset[Any]):
    """All objects below a prefix, in the order of their keys, each as an `S3Object`.

    Args:
        bucket_or_url: a bucket, or `s3://bucket/prefix`, which is not parsed as a URL.
        prefix: a directory; `train` and `train/` are the same and never match `train2/`.
        transform: called with the `S3Object`; its result is the sample. None: the object itself.
        anon: send no credentials; for public buckets.
        options: how to reach S3, and limits.
        extensions: endings (without case) of the keys to take; None takes all.
        is_valid_file: called with `s3://bucket/key`; which to take. Not together with `extensions`.
        index: an index, or a file for it: read if it exists, written if not.
        on_error: what to do with an object that is gone, denied, archived or refused: `raise`;
            `replace` it by the next good one, so that batches keep their size; or call this with
            the error and take what it returns. When the server or the way to it fails, that is
            raised in any case.
        bad_sample_limit: how many such objects one process accepts.

    Raises:
        EmptyDatasetError: when nothing is there.
        S3DataError: when the bucket cannot be listed; each kind says what to do.
    """

    def __init__(
        self,
        bucket_or_url: str,
        prefix: str = "",
        transform: Callable[[S3Object], Any] | None = None,
        anon: bool = False,
        *,
        options: S3Options | None = None,
        extensions: str | tuple[str, ...] | None = None,
        is_valid_file: Callable[[str], bool] | None = None,
        index: Index | str | os.PathLike[str] | None = None,
        on_error: OnError = "raise",
        bad_sample_limit: int = 100,
    ) -> None:
        accepts = chooser(extensions, is_valid_file)
        bucket, prefix = split_address(bucket_or_url, prefix)
        options = with_anon(options, anon)
        found = find_index(bucket, prefix, options, index)
        where = address(bucket, found.prefix)
        root = found.prefix
        chosen = [
            place
            for place, rest in enumerate(found.relative_keys())
            if rest and not rest.endswith("/") and accepts(address(bucket, root + rest))
        ]
        if not chosen:
            wanted = f" that end in {extensions}" if extensions else ""
            raise EmptyDatasetError(
                f"listing {where}: none of {len(found)} objects there is a file{wanted}; "
                "check prefix and extensions",
                address=where,
            )
        super().__init__(
            found.take(chosen), options, on_error=on_error, bad_sample_limit=bad_sample_limit
        )
        self.transform = transform

    def _sample(self, place: int, reply: Reply) -> Any:
        index = self._index
        found = S3Object(index.bucket, index.key(place), reply.body, reply.etag, place)
        return found if self.transform is None else self.transform(found)


def chooser(
    extensions: str | tuple[str, ...] | None, is_valid_file: Callable[[str], bool] | None
) -> Callable[[str], bool]:
    """Return which addresses to take.

    Raises:
        ValueError: when both rules are given.
    """
    if is_valid_file is not None:
        if extensions is not None:
            raise ValueError("give extensions or is_valid_file, not both")
        return is_valid_file
    if extensions is None:
        return lambda _: True
    endings = (extensions,) if isinstance(extensions, str) else tuple(extensions)
    return lambda name: name.lower().endswith(endings)


def with_anon(options: S3Options | None, anon: bool) -> S3Options:
    """Return the options, with `anon` as it was given beside them."""
    options = options or S3Options()
    return replace(options, anon=True) if anon and not options.anon else options
