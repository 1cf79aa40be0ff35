"""Where an iteration stands, so that another one can go on from there."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch


class Position:
    """Epoch, batches dealt to the user, and the state of the generator before the first of them.

    Args:
        generator: the one from which the sampler draws; None for torch's default.
    """

    def __init__(self, generator: torch.Generator | None) -> None:
        self._generator = generator
        self.epoch = 0
        self.batches = 0
        self._began_with: torch.Tensor | None = None
        self._skip = 0
        self._resumed = False
        self._restored: torch.Tensor | None = None

    def state(self) -> dict[str, Any]:
        """Return it as plain values and one tensor."""
        began = self._began_with if self.batches else None
        return {"epoch": self.epoch, "batches": self.batches, "generator": began}

    def restore(self, state: dict[str, Any]) -> None:
        """Let the next iteration be the one of the state, without the batches already dealt.

        Raises:
            ValueError: when it is no such state.
        """
        if not {"epoch", "batches", "generator"} <= state.keys():
            raise ValueError(f"this is no state of an S3DataLoader: it has {sorted(state)}")
        self.epoch = int(state["epoch"])
        self._skip = self.batches = int(state["batches"])
        self._restored = state["generator"]
        self._resumed = True

    def begin(self) -> None:
        """Count from the first batch that is still to come; an epoch broken off is over."""
        if self.batches and not self._resumed:
            self.epoch += 1
        self.batches = self._skip
        self._resumed = False

    def go_to(self, epoch: int) -> None:
        """Let the next iteration be all of this epoch."""
        self.epoch, self.batches, self._skip, self._restored = epoch, 0, 0, None

    def end(self) -> None:
        """The epoch is complete."""
        self.epoch += 1
        self.batches = 0

    def start(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Iterate over what is left of this epoch; the sampler draws as it did the first time."""
        skip, self._skip = self._skip, 0
        restored, self._restored = self._restored, None
        if restored is None:
            self._began_with = self._get()
            return itertools.islice(batches, skip, None)
        self._began_with = restored
        if self._generator is not None:
            self._generator.set_state(restored)
            return itertools.islice(batches, skip, None)
        with torch.random.fork_rng(devices=[]):  # what else draws is not disturbed
            torch.set_rng_state(restored)
            source = iter(batches)
            first = list(itertools.islice(source, skip + 1))
        return itertools.chain(first[skip:], source)

    def _get(self) -> torch.Tensor:
        generator = self._generator
        return torch.get_rng_state() if generator is None else generator.get_state()


class Counted:
    """An iterator over batches that tells a position how far it is; otherwise the one inside."""

    def __init__(self, inside: Iterator[Any], position: Position) -> None:
        self._inside = inside
        self._position = position
        outlive(self, inside)

    def __iter__(self) -> Counted:
        return self

    def __next__(self) -> Any:
        try:
            batch = next(self._inside)
        except StopIteration:
            self._position.end()
            raise
        self._position.batches += 1
        return batch

    def __len__(self) -> int:
        return len(self._inside)  # type: ignore[arg-type] # torch's iterator has a length

    def __getattr__(self, name: str) -> Any:
        if name == "_inside":
            raise AttributeError(name)
        return getattr(self._inside, name)


def outlive(owner: object, batches: object) -> weakref.finalize[[object], Any]:
    """Keep torch's iterator until its owner is gone, out of every cycle that the owner is in.

    An exception holds the frames that hold the iterator: a cycle. In one, the garbage collector
    closes the queues to the workers before it asks the iterator to end, which then cannot tell
    them, waits 5 s for each, and kills them.
    """
    kept = weakref.finalize(owner, _let_go, batches)
    kept.atexit = False
    return kept


def _let_go(_: object) -> None:
    """The reference to it was all that there was to do."""
