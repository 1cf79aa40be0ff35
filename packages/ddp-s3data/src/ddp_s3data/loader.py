"""A torch DataLoader that tells its workers what comes next, and shards by rank."""

from __future__ import annotations

import logging
import multiprocessing
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler, get_worker_info

from ._lookahead import LookAheadSampler, innermost, see_through
from ._position import Counted, Position, outlive
from ._stats import WIDTH, summary
from .dataset import BucketDataset
from .errors import DaemonicProcessError

__all__ = ["S3DataLoader"]

_log = logging.getLogger("ddp_s3data")


class S3DataLoader(DataLoader[Any]):
    """A `torch.utils.data.DataLoader`, all of it, that can do three things more.

    *Look-ahead.* Each batch of indices carries the next ones for the same DataLoader worker, which
    fetches them while it decodes. The batches and their order are exactly those of torch. It works
    for every order, sampler and start method, with `num_workers=0` too, for every dataset of this
    package and every `Subset` of one. A worker uses the hints only where it would otherwise wait.

    *Sharding.* Inside a process group, unless a sampler is given, each rank gets its part of one
    permutation made from (seed, epoch), equally many batches on each; the epoch advances with every
    iteration, `set_epoch` is not needed. As with torch's DistributedSampler, so that all ranks have
    equally many samples, up to one for each rank comes twice, or with `drop_last=True` is left out:
    for an evaluation that must count every sample once, pass `shard=False` or a sampler.

    *Decode threads.* For `num_workers=0`, in a daemonic process for instance: samples of a batch
    are made in threads. Decoders release the GIL. Batches and their order stay the same, but what
    random transforms draw depends on the order in which threads come to them, and transforms must
    be safe for threads.

    Args:
        dataset: see torch.
        batch_size: see torch.
        shuffle: see torch.
        sampler: see torch; switches sharding off.
        batch_sampler: see torch; switches sharding off.
        num_workers: see torch.
        lookahead: how many batches of one worker may be fetched ahead; 0 fetches none.
        decode_threads: how many threads of this process, or of each worker, make samples; 0: none,
            the thread that reads does. `os.cpu_count()` is a good choice without workers.
        shard: give each rank its part.
        seed: of the permutation over ranks.
        settings: everything else that torch's DataLoader takes.

    Raises:
        DaemonicProcessError: when `num_workers` > 0 in a process that may not have children.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        num_workers: int = 0,
        *,
        lookahead: int = 4,
        decode_threads: int = 0,
        shard: bool = True,
        seed: int = 0,
        **settings: Any,
    ) -> None:
        if lookahead < 0:
            raise ValueError(f"lookahead must be 0 or more, not {lookahead}")
        if decode_threads < 0:
            raise ValueError(f"decode_threads must be 0 or more, not {decode_threads}")
        if num_workers > 0 and multiprocessing.current_process().daemon:
            raise DaemonicProcessError(
                f"num_workers={num_workers} in a daemonic process, which may not have children; "
                "use num_workers=0, which fetches ahead too, with decode_threads=os.cpu_count(), "
                "or run training in a process of its own"
            )
        self.lookahead = lookahead
        self.decode_threads = decode_threads
        dataset = see_through(dataset)
        self._board: torch.Tensor | None = None
        if num_workers > 0 and isinstance(innermost(dataset), BucketDataset):
            self._board = torch.zeros(num_workers, WIDTH, dtype=torch.float64)
            self._board.share_memory_()  # type: ignore[no-untyped-call] # torch has no type for it
            settings["worker_init_fn"] = _Start(self._board, settings.get("worker_init_fn"))
        self._shards: DistributedSampler[Any] | None = None
        self._position = Position(settings.get("generator"))
        self._kept: weakref.finalize[[object], Any] | None = None
        if shard and sampler is None and batch_sampler is None and _ranks() > 1:
            self._shards = sampler = DistributedSampler(
                dataset,
                shuffle=bool(shuffle),
                seed=seed,
                drop_last=bool(settings.get("drop_last", False)),
            )
            shuffle = None
        super().__init__(
            dataset,
            batch_size=batch_size,
            shuffle=shuffle,
            sampler=sampler,
            batch_sampler=batch_sampler,
            num_workers=num_workers,
            **settings,
        )
        if num_workers > 0 and not getattr(self, "in_order", True):
            _log.info("in_order=False: which worker gets which batch is open; no look-ahead")
            self.lookahead = 0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override] # torch's is a private class
        position = self._position
        position.begin()
        if self._shards is not None:
            self._shards.set_epoch(position.epoch)
        batches = super().__iter__()
        if self._kept is not None:
            self._kept.detach()
        if self.persistent_workers:
            self._kept = outlive(self, batches)
        return Counted(batches, position)

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration the one of this epoch; later ones count on from it."""
        self._position.go_to(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return where the iteration stands: epoch, batches dealt, and the sampler's randomness.

        Small, picklable, readable by `torch.load(weights_only=True)`. Each rank keeps its own.
        """
        return self._position.state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iteration go on where `state_dict` was taken; nothing seen is fetched again.

        The loader must have been made with the same arguments over the same dataset. Exact for
        torch's samplers; what random transforms draw is new.

        Raises:
            ValueError: when it is no state of such a loader.
        """
        self._position.restore(state)

    def stats(self) -> dict[str, Any]:
        """Return what all workers have read through this loader, all epochs together.

        Without workers it is what this process has read of the dataset. Counts are as of the last
        complete batch of each worker.

        Returns:
            `requests, objects, bytes, samples, replaced, changed, hedges`, `wasted`
            (fetched ahead in vain), `retries` by cause, `latency_s` of requests (`p50 p90 p99`),
            `wait_s` and `decode_s` over all workers, `wait_share`, `depth` of look-ahead in
            batches, and `limited_by`: `network` or `decode`.
        """
        if self._board is not None:
            return summary(self._board.tolist())
        whole = innermost(self.dataset)
        return whole.stats() if isinstance(whole, BucketDataset) else summary([])

    @property
    def _index_sampler(self) -> Any:
        """What torch iterates over for batches of indices: ours, round the one it would take."""
        inner = super()._index_sampler
        if self.batch_sampler is None:
            return inner
        return LookAheadSampler(
            inner, max(1, self.num_workers), self.lookahead, self._position, self.decode_threads
        )


class _Start:
    """What a worker does first: report its counters to its row of the board."""

    def __init__(self, board: torch.Tensor, then: Callable[[int], None] | None) -> None:
        self._board = board
        self._then = then

    def __call__(self, worker_id: int) -> None:
        info = get_worker_info()
        whole = innermost(info.dataset) if info is not None else None
        if isinstance(whole, BucketDataset):
            row = self._board[worker_id]
            before = row.clone()  # of the workers that had this number in earlier epochs

            def report(counters: list[float]) -> None:
                row.copy_(before + torch.tensor(counters, dtype=torch.float64))

            whole.report_to(report)
        if self._then is not None:
            self._then(worker_id)


def _ranks() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
