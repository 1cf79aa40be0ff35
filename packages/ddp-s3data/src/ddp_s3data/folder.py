"""An image folder that lies in S3."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, BinaryIO, Literal

import numpy as np
import numpy.typing as npt

from ._address import address, split_address
from ._contract import Reply
from ._index import Index, SampleView
from ._listing import find_index
from .dataset import BucketDataset, OnError, chooser, with_anon
from .errors import DecodeError, EmptyDatasetError
from .images import IMG_EXTENSIONS, S3File, load_rgb
from .options import S3Options

__all__ = ["S3ImageFolder"]

_log = logging.getLogger("ddp_s3data")


class S3ImageFolder(BucketDataset[tuple[Any, Any]]):
    """Images in S3, one directory for each class: `torchvision.datasets.ImageFolder` of a bucket.

    With `class_from="first"` classes, filter, order and errors are those of torchvision's
    ImageFolder on the same tree: a class is a directory right below the prefix, files beside them
    are ignored, samples are sorted by class, then directory, then name. With `"parent"` they are
    those of dask-pytorch-ddp 0.2.2: a class is the directory that holds the file, and samples are
    in the order of S3; files that are no images are left out, and the log says how many.

    Args:
        bucket_or_url: a bucket, or `s3://bucket/prefix`, which is not parsed as a URL.
        prefix: a directory; `train` and `train/` are the same and never match `train2/`.
        transform: called with what `loader` returns (a PIL image).
        target_transform: called with the number of the class.
        anon: send no credentials; for public buckets.
        class_from: which directory is the class, see above.
        options: how to reach S3, and limits.
        loader: makes an image of a binary file with the object's bytes, whose `name` is the
            address; RGB by Pillow unless given.
        is_valid_file: called with `s3://bucket/key`; which to take, instead of by extension.
        extensions: endings (without case) of the files to take.
        allow_empty: accept classes without a valid file.
        index: an index, or a file for it: read if it exists, written if not.
        on_error: what to do with an image that is gone, denied, archived, refused or cannot be
            decoded: `raise`; `replace` it by the next good one, so that batches keep their size; or
            call this with the error and take what it returns as the sample. When the server or the
            way to it fails, that is raised in any case.
        bad_sample_limit: how many such images one process accepts.

    Attributes:
        classes: names of the classes, sorted.
        class_to_idx: number of each class.
        samples: pairs of address and class number; a read-only list, made on demand.
        imgs: the same.
        targets: class number of each sample; a list.

    Raises:
        EmptyDatasetError: when nothing is there, or a class has no valid file; a FileNotFoundError,
            as torchvision raises.
        S3DataError: when the bucket cannot be listed; each kind says what to do.
    """

    def __init__(
        self,
        bucket_or_url: str,
        prefix: str = "",
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[int], Any] | None = None,
        anon: bool | None = False,
        *,
        class_from: Literal["first", "parent"] = "first",
        options: S3Options | None = None,
        loader: Callable[[BinaryIO], Any] = load_rgb,
        is_valid_file: Callable[[str], bool] | None = None,
        extensions: str | tuple[str, ...] | None = None,
        allow_empty: bool = False,
        index: Index | str | os.PathLike[str] | None = None,
        on_error: OnError = "raise",
        bad_sample_limit: int = 100,
    ) -> None:
        if class_from not in ("first", "parent"):
            raise ValueError(f"class_from must be 'first' or 'parent', not {class_from!r}")
        if extensions is None and is_valid_file is None:
            extensions = IMG_EXTENSIONS
        accepts = chooser(extensions, is_valid_file)
        bucket, prefix = split_address(bucket_or_url, prefix)
        options = with_anon(options, bool(anon))
        found = find_index(bucket, prefix, options, index)
        choose = _by_first if class_from == "first" else _by_parent
        classes, order, targets = choose(found, accepts)
        where = address(bucket, found.prefix)
        if class_from == "first":
            _check_classes(classes, targets, where, extensions, allow_empty)
        elif not len(order):
            raise EmptyDatasetError(
                f"none of {len(found)} objects in {where} is an image.{_endings(extensions)}",
                address=where,
            )
        super().__init__(
            found.take(order), options, on_error=on_error, bad_sample_limit=bad_sample_limit
        )
        self.classes = classes
        self.class_to_idx = {name: number for number, name in enumerate(classes)}
        self.class_from = class_from
        self.extensions = extensions
        self.loader = loader
        self.transform = transform
        self.target_transform = target_transform
        self._targets = targets
        self._target_list: list[int] | None = None

    @property
    def samples(self) -> Sequence[tuple[str, int]]:
        """Pairs of address and class number, in order."""
        return SampleView(self._index, self._targets)

    @property
    def imgs(self) -> Sequence[tuple[str, int]]:
        """The same as `samples`, as torchvision has it."""
        return self.samples

    @property
    def targets(self) -> list[int]:
        """The class number of each sample."""
        if self._target_list is None:
            self._target_list = self._targets.tolist()
        return self._target_list

    @property
    def s3_bucket(self) -> str:
        """The bucket, under the name that 0.2.2 gave it."""
        return self.bucket

    @property
    def s3_prefix(self) -> str:
        """The prefix, under the name that 0.2.2 gave it."""
        return self.prefix

    @property
    def anon(self) -> bool:
        """Whether no credentials are sent."""
        return self.options.anon

    def _sample(self, place: int, reply: Reply) -> tuple[Any, Any]:
        file = S3File(reply.body, self._index.address(place))
        if self.loader is load_rgb:
            image: Any = self._decoded(file, place)
        else:
            image = self.loader(file)
        if self.transform is not None:
            image = self.transform(image)
        target: Any = int(self._targets[place])
        if self.target_transform is not None:
            target = self.target_transform(target)
        return image, target

    def _decoded(self, file: S3File, place: int) -> Any:
        try:
            return load_rgb(file)
        except Exception as error:
            raise DecodeError(
                f"decoding {file.name} (sample {place}, {len(file.getvalue())} bytes): "
                f"{type(error).__name__}: {_brief(error)}; remove the object, leave it out with "
                "is_valid_file, or choose on_error='replace'",
                address=file.name,
                index=place,
            ) from error

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_target_list": None}

    def __repr__(self) -> str:
        head = (
            f"Dataset {type(self).__name__}\n    Number of datapoints: {len(self)}\n"
            f"    Root location: {self.root}\n    Classes: {len(self.classes)}"
        )
        return head if self.transform is None else f"{head}\n    Transform: {self.transform!r}"


def _by_first(
    index: Index, accepts: Callable[[str], bool]
) -> tuple[list[str], npt.NDArray[np.int64], npt.NDArray[np.int32]]:
    """Return classes, positions and targets by torchvision's rule.

    S3's order is that of whole keys, in which `a-b/` stands before `a/`, and `a/b/c` before `a/d`;
    torchvision's is by class, then by directory, then by name.
    """
    begin = address(index.bucket, index.prefix)
    places: dict[str, list[int]] = {}
    nested: dict[str, list[tuple[str, str, int]]] = {}
    for place, rest in enumerate(index.relative_keys()):
        name, slash, inner = rest.partition("/")
        if not slash:
            continue  # a file beside the class directories
        members = places.setdefault(name, [])
        if not inner or inner.endswith("/") or not accepts(begin + rest):
            continue
        if "/" in inner:
            where, _, base = inner.rpartition("/")
            nested.setdefault(name, []).append((where, base, place))
        else:
            members.append(place)
    classes = sorted(places)
    order: list[int] = []
    counts = []
    for name in classes:
        deep = [place for _, _, place in sorted(nested.get(name, ()))]
        order += places[name]
        order += deep
        counts.append(len(places[name]) + len(deep))
    targets = np.repeat(np.arange(len(classes), dtype=np.int32), np.asarray(counts, np.int64))
    return classes, np.asarray(order, np.int64), targets


def _by_parent(
    index: Index, accepts: Callable[[str], bool]
) -> tuple[list[str], npt.NDArray[np.int64], npt.NDArray[np.int32]]:
    """Return classes, positions and targets by the rule of 0.2.2: the directory of the file."""
    begin = address(index.bucket, index.prefix)
    order: list[int] = []
    parents: list[str] = []
    others = 0
    for place, rest in enumerate(index.relative_keys()):
        if not rest or rest.endswith("/"):
            continue
        if not accepts(begin + rest):
            others += 1
            continue
        order.append(place)
        parents.append((index.prefix + rest).rpartition("/")[0].rpartition("/")[2])
    if others:
        _log.info("%s: %d files are no images and are left out", begin, others)
    classes = sorted(set(parents))
    number = {name: position for position, name in enumerate(classes)}
    targets = np.fromiter((number[name] for name in parents), np.int32, len(parents))
    return classes, np.asarray(order, np.int64), targets


def _check_classes(
    classes: Iterable[str],
    targets: npt.NDArray[np.int32],
    where: str,
    extensions: str | tuple[str, ...] | None,
    allow_empty: bool,
) -> None:
    names = list(classes)
    if not names:
        raise EmptyDatasetError(
            f"Couldn't find any class folder in {where}; put the images of each class into a "
            "directory of its own, or use S3Dataset",
            address=where,
        )
    filled = set(np.unique(targets).tolist())
    empty = [name for number, name in enumerate(names) if number not in filled]
    if empty and not allow_empty:
        raise EmptyDatasetError(
            f"Found no valid file for the classes {', '.join(empty)} in {where}."
            f"{_endings(extensions)} Pass allow_empty=True to accept empty classes.",
            address=where,
        )


def _endings(extensions: str | tuple[str, ...] | None) -> str:
    if extensions is None:
        return ""
    shown = extensions if isinstance(extensions, str) else ", ".join(extensions)
    return f" Supported extensions are: {shown}."


def _brief(error: Exception) -> str:
    text = str(error)
    return text if len(text) <= 200 else text[:200] + "…"
