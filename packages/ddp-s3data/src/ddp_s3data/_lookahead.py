"""The indices that come next, sent along with the indices of a batch."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch.utils.data import Subset

from ._position import Position

_LANES = itertools.count(1)


class Batch(list[int]):
    """Indices of a batch; an ordinary list that carries what follows.

    torch hands it to `dataset.__getitems__` as it is, through the index queue of a worker.

    Attributes:
        ahead: the next batches of the same DataLoader worker, nearest first.
        lane: number of the iterator that dealt it, unique in the process that iterates.
        threads: how many threads make its samples; 0: the one that asks.
    """

    def __init__(
        self,
        indices: Iterable[int],
        ahead: tuple[list[int], ...] = (),
        lane: int = 0,
        threads: int = 0,
    ) -> None:
        super().__init__(indices)
        self.ahead = ahead
        self.lane = lane
        self.threads = threads

    def __reduce__(self) -> tuple[Any, ...]:
        return Batch, (list(self), self.ahead, self.lane, self.threads)


class LookAheadSampler:
    """Wraps a batch sampler: the same batches in the same order, each a `Batch`.

    Batch k goes to worker k mod n, so worker k gets k + n next. To know it, the wrapped sampler is
    read `stride * depth` batches further than was asked for.

    Args:
        batches: the batch sampler.
        stride: number of DataLoader workers, or 1.
        depth: how many batches of the same worker each batch carries.
        position: where to begin; at the first batch if None.
        threads: how many threads of a worker are to make samples.
    """

    def __init__(
        self,
        batches: Iterable[Any],
        stride: int,
        depth: int,
        position: Position | None = None,
        threads: int = 0,
    ) -> None:
        self.batches = batches
        self.stride = stride
        self.depth = depth
        self._position = position
        self._threads = threads

    def __iter__(self) -> Iterator[Batch]:
        lane = next(_LANES)
        position = self._position
        source = iter(self.batches) if position is None else position.start(self.batches)
        window: deque[list[int]] = deque()
        while True:
            missing = self.stride * self.depth + 1 - len(window)
            window.extend(list(batch) for batch in itertools.islice(source, missing))
            if not window:
                return
            ahead = tuple(itertools.islice(window, self.stride, None, self.stride))
            yield Batch(window[0], ahead, lane, self._threads)
            window.popleft()

    def __len__(self) -> int:
        return len(self.batches)  # type: ignore[arg-type] # whoever asks knows it has a length

    def __getattr__(self, name: str) -> Any:
        if name == "batches":
            raise AttributeError(name)
        return getattr(self.batches, name)


class AheadSubset(Subset[Any]):
    """A `Subset` that passes on what follows, translated to positions of what it is a part of."""

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        translated = Batch(
            self._inner(indices),
            tuple(self._inner(batch) for batch in getattr(indices, "ahead", ())),
            getattr(indices, "lane", 0),
            getattr(indices, "threads", 0),
        )
        whole: Any = self.dataset
        if hasattr(whole, "__getitems__"):
            found: list[Any] = whole.__getitems__(translated)
            return found
        return [whole[index] for index in translated]

    def _inner(self, indices: Sequence[int]) -> list[int]:
        places = self.indices
        return [int(places[index]) for index in indices]


def see_through(dataset: Any) -> Any:
    """Return the dataset, in which each plain `Subset` is an `AheadSubset` of the same part."""
    if type(dataset) is not Subset:
        return dataset
    return AheadSubset(see_through(dataset.dataset), dataset.indices)


def innermost(dataset: Any) -> Any:
    """Return what the dataset is a part of, or itself."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return dataset


class Depth:
    """How many of the offered batches to fetch ahead: none while nothing waits.

    It rises at once when a reader waits for bytes, and falls by one after a row of batches without
    a wait; when such a fall proves wrong, the next is tried after twice as many.

    Args:
        most: the largest depth.
        start: the first.
    """

    WAITING = 0.03
    """Share of its time a reader may wait before the depth rises."""
    PATIENCE = 8
    MOST_PATIENCE = 256

    def __init__(self, most: int, start: int = 1) -> None:
        self.most = most
        self.now = min(start, most)
        self._calm = 0
        self._patience = self.PATIENCE
        self._fell = False

    def saw(self, waited_s: float, took_s: float) -> None:
        """Learn from one batch: how long it took from the end of the one before, and waited."""
        if waited_s > self.WAITING * took_s:
            self._calm = 0
            if self._fell:
                self._patience = min(2 * self._patience, self.MOST_PATIENCE)
                self._fell = False
            self.now = min(self.now + 1, self.most)
            return
        self._calm += 1
        if self._calm >= self._patience and self.now > 0:
            self._calm = 0
            self._fell = True
            self.now -= 1
