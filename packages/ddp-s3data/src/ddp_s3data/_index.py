"""What a listing found, as flat arrays: a million keys without a million Python objects."""

from __future__ import annotations

import io
import itertools
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar, overload

import numpy as np
import numpy.typing as npt

from ._address import address
from .errors import IndexFileError

_MAGIC = b"ddp-s3data index 1\n"
_MD5_BYTES = 16
_BLOCK = 1 << 14
_OPAQUE = -1  # in `_parts`: the ETag is no MD5 and stands in `_other_etags`
_T = TypeVar("_T", covariant=True)


class Index:
    """Keys, sizes and ETags of objects below one prefix of one bucket, in a fixed order.

    Immutable. Memory per key beyond its text: 8 bytes of offset, 8 of size, 16 of ETag, 4 of its
    number of parts. Pickled compressed; `save` and `load` use the same form.
    """

    def __init__(
        self,
        bucket: str,
        prefix: str,
        text: npt.NDArray[np.uint8],
        offsets: npt.NDArray[np.int64],
        sizes: npt.NDArray[np.int64],
        md5: npt.NDArray[np.uint8],
        parts: npt.NDArray[np.int32],
        other_etags: dict[int, str] | None = None,
    ) -> None:
        self.bucket = bucket
        self.prefix = prefix
        self._text = text
        self._offsets = offsets
        self._sizes = sizes
        self._md5 = md5
        self._parts = parts
        self._other_etags = other_etags or {}

    def __len__(self) -> int:
        return len(self._sizes)

    def key(self, position: int) -> str:
        """Return the whole key."""
        start, end = self._offsets[position], self._offsets[position + 1]
        return self.prefix + self._text[start:end].tobytes().decode("utf-8", "surrogatepass")

    def relative_keys(self) -> Iterator[str]:
        """Yield all keys in order, without the prefix; quicker than one by one."""
        for start in range(0, len(self), _BLOCK):
            ends = self._offsets[start : start + _BLOCK + 1].tolist()
            text = self._text[ends[0] : ends[-1]].tobytes()
            for begin, end in itertools.pairwise(ends):
                yield text[begin - ends[0] : end - ends[0]].decode("utf-8", "surrogatepass")

    def address(self, position: int) -> str:
        """Return `s3://bucket/key`."""
        return address(self.bucket, self.key(position))

    def size(self, position: int) -> int:
        """Return the size in bytes."""
        return int(self._sizes[position])

    def etag(self, position: int) -> str:
        """Return the ETag without quotes; empty if the server gave none."""
        parts = int(self._parts[position])
        if parts == _OPAQUE:
            return self._other_etags.get(position, "")
        digest = self._md5[position].tobytes().hex()
        return f"{digest}-{parts}" if parts else digest

    @property
    def total_bytes(self) -> int:
        """Size of all objects together."""
        return int(self._sizes.sum())

    @property
    def nbytes(self) -> int:
        """Memory of the arrays."""
        arrays = (self._text, self._offsets, self._sizes, self._md5, self._parts)
        return sum(array.nbytes for array in arrays)

    def take(self, order: Sequence[int] | npt.NDArray[np.int64]) -> Index:
        """Return an index of these positions, in this order."""
        chosen = np.asarray(order, dtype=np.int64)
        if len(chosen) == len(self) and np.array_equal(chosen, np.arange(len(self))):
            return self
        lengths = np.diff(self._offsets)[chosen]
        offsets = np.zeros(len(chosen) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        text = np.empty(int(offsets[-1]), np.uint8)
        begins = self._offsets[:-1][chosen]
        for start in range(0, len(chosen), _BLOCK):  # in blocks: each byte costs 16 meanwhile
            part = slice(start, start + _BLOCK)
            first, last = offsets[start], offsets[min(start + _BLOCK, len(chosen))]
            shift = np.repeat(begins[part] - offsets[:-1][part], lengths[part])
            text[first:last] = self._text[shift + np.arange(first, last)]
        others = self._other_etags
        if others:
            places = enumerate(chosen.tolist())
            others = {new: others[old] for new, old in places if old in others}
        return Index(
            self.bucket,
            self.prefix,
            text,
            offsets,
            self._sizes[chosen],
            self._md5[chosen],
            self._parts[chosen],
            others,
        )

    def in_order(self) -> Index:
        """Return it sorted by UTF-8 bytes, which is S3's order but not that of every server."""
        keys = self.relative_keys()
        if all(first <= second for first, second in itertools.pairwise(keys)):
            return self
        sortable = list(self.relative_keys())
        return self.take(sorted(range(len(sortable)), key=sortable.__getitem__))

    def to_bytes(self) -> bytes:
        """Return the compressed form."""
        out = io.BytesIO()
        head = "\0".join([self.bucket, self.prefix]).encode("utf-8", "surrogatepass")
        others = "\0".join(
            f"{place}={etag}" for place, etag in sorted(self._other_etags.items())
        ).encode()
        arrays = {
            "head": np.frombuffer(head, np.uint8),
            "others": np.frombuffer(others, np.uint8),
            "text": self._text,
            "lengths": np.diff(self._offsets).astype(np.uint16),
            "sizes": self._sizes,
            "md5": self._md5,
            "parts": self._parts,
        }
        np.savez(out, **arrays)  # type: ignore[arg-type] # its stub mixes them up with allow_pickle
        return _MAGIC + zlib.compress(out.getvalue(), 1)

    @classmethod
    def from_bytes(cls, data: bytes) -> Index:
        """Return the index that `to_bytes` wrote.

        Raises:
            IndexFileError: when it is damaged or of another version.
        """
        if not data.startswith(_MAGIC):
            raise IndexFileError("this is no index of ddp-s3data, or one of another version")
        try:
            raw = io.BytesIO(zlib.decompress(data[len(_MAGIC) :]))
            with np.load(raw, allow_pickle=False) as arrays:
                head = arrays["head"].tobytes().decode("utf-8", "surrogatepass").split("\0")
                others = arrays["others"].tobytes().decode()
                lengths = arrays["lengths"]
                offsets = np.zeros(len(lengths) + 1, np.int64)
                np.cumsum(lengths, out=offsets[1:])
                pairs = (each.partition("=") for each in others.split("\0") if each)
                return cls(
                    head[0],
                    head[1],
                    arrays["text"],
                    offsets,
                    arrays["sizes"],
                    arrays["md5"],
                    arrays["parts"],
                    {int(place): etag for place, _, etag in pairs},
                )
        except (zlib.error, ValueError, KeyError, OSError, IndexError, EOFError) as error:
            raise IndexFileError(f"the index is damaged: {error}") from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write to a file: whole or not at all."""
        target = Path(path)
        part = target.with_name(f"{target.name}.{os.getpid()}.part")
        try:
            part.write_bytes(self.to_bytes())
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Index:
        """Read what `save` wrote.

        Raises:
            IndexFileError: when it is damaged or of another version.
        """
        try:
            return cls.from_bytes(Path(path).read_bytes())
        except IndexFileError as error:
            raise IndexFileError(
                f"reading {os.fspath(path)}: {error}; write it anew: python -m ddp_s3data index"
            ) from error

    def __reduce__(self) -> tuple[Any, ...]:
        return Index.from_bytes, (self.to_bytes(),)


class IndexBuilder:
    """Collects pages of a listing into an `Index`."""

    def __init__(self, bucket: str, prefix: str) -> None:
        self._bucket = bucket
        self._prefix = prefix
        self._texts: list[bytes] = []
        self._lengths: list[npt.NDArray[np.int64]] = []
        self._sizes: list[npt.NDArray[np.int64]] = []
        self._digests: list[bytes] = []
        self._parts: list[npt.NDArray[np.int32]] = []
        self._others: dict[int, str] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, keys: Sequence[str], sizes: Sequence[int], etags: Sequence[str]) -> None:
        """Append objects; every key begins with the prefix."""
        skip = len(self._prefix)
        texts = [key[skip:].encode("utf-8", "surrogatepass") for key in keys]
        self._texts.append(b"".join(texts))
        self._lengths.append(np.fromiter(map(len, texts), np.int64, len(texts)))
        self._sizes.append(np.asarray(sizes, np.int64))
        digests, parts = bytearray(), []
        for place, etag in enumerate(etags, self._count):
            digest, part = _split_etag(etag)
            if part == _OPAQUE:
                self._others[place] = etag
            digests += digest
            parts.append(part)
        self._digests.append(bytes(digests))
        self._parts.append(np.asarray(parts, np.int32))
        self._count += len(keys)

    def extend(self, other: IndexBuilder) -> None:
        """Append what another builder of the same prefix has collected."""
        self._texts += other._texts
        self._lengths += other._lengths
        self._sizes += other._sizes
        self._digests += other._digests
        self._parts += other._parts
        shifted = {place + self._count: etag for place, etag in other._others.items()}
        self._others.update(shifted)
        self._count += other._count

    def build(self) -> Index:
        """Return the index."""
        offsets = np.zeros(self._count + 1, np.int64)
        if self._count:
            np.cumsum(np.concatenate(self._lengths), out=offsets[1:])
        return Index(
            self._bucket,
            self._prefix,
            np.frombuffer(b"".join(self._texts), np.uint8),
            offsets,
            np.concatenate(self._sizes) if self._count else np.zeros(0, np.int64),
            np.frombuffer(b"".join(self._digests), np.uint8).reshape(-1, _MD5_BYTES),
            np.concatenate(self._parts) if self._count else np.zeros(0, np.int32),
            self._others,
        )


def _split_etag(etag: str) -> tuple[bytes, int]:
    digest, dash, parts = etag.partition("-")
    if len(digest) == 2 * _MD5_BYTES and (not dash or (parts.isascii() and parts.isdigit())):
        try:
            if digest == digest.lower():
                return bytes.fromhex(digest), int(parts or 0)
        except ValueError:
            pass
    return bytes(_MD5_BYTES), _OPAQUE


class View(Sequence[_T], Generic[_T]):
    """A read-only list whose items are made when they are asked for."""

    def __len__(self) -> int:
        raise NotImplementedError

    def _item(self, position: int) -> _T:
        raise NotImplementedError

    @overload
    def __getitem__(self, position: int) -> _T: ...
    @overload
    def __getitem__(self, position: slice) -> list[_T]: ...
    def __getitem__(self, position: int | slice) -> _T | list[_T]:
        if isinstance(position, slice):
            return [self._item(each) for each in range(*position.indices(len(self)))]
        count = len(self)
        if not -count <= position < count:
            raise IndexError(f"position {position} in a list of {count}")
        return self._item(position + count if position < 0 else position)

    def __iter__(self) -> Iterator[_T]:
        return (self._item(position) for position in range(len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Iterable):
            return NotImplemented
        return list(self) == list(other)

    __hash__ = None  # type: ignore[assignment] # as a list has none

    def __repr__(self) -> str:
        first = ", ".join(repr(each) for each in self[:3])
        return f"[{first}{', …' if len(self) > 3 else ''}]  # {len(self)} items"


class KeyView(View[str]):
    """The keys of an index."""

    def __init__(self, index: Index) -> None:
        self._index = index

    def __len__(self) -> int:
        return len(self._index)

    def _item(self, position: int) -> str:
        return self._index.key(position)


class SampleView(View[tuple[str, int]]):
    """Pairs of address and class number, as torchvision's `samples`."""

    def __init__(self, index: Index, targets: npt.NDArray[np.int32]) -> None:
        self._index = index
        self._targets = targets

    def __len__(self) -> int:
        return len(self._index)

    def _item(self, position: int) -> tuple[str, int]:
        return self._index.address(position), int(self._targets[position])
