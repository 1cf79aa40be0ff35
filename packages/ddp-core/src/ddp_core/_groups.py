"""The process group of a rank: kept while models may refer to it, left with a bound."""

from __future__ import annotations

import contextlib
import functools
import threading
from typing import Any

_kept: list[Any] = []


def keep_destroyed_groups() -> None:
    """Make the process groups that the user's code destroys last as long as this process.

    When ``destroy_process_group()`` is called while a DDP model lives, the model's reducer is the
    last owner of the group. The group is then freed with the GIL held and joins gloo's threads,
    one of which may wait for the GIL to free the last collective: the rank hangs, under torchrun
    too (seen on torch 2.13). A rank ends without destructors, so nothing is lost by keeping it.
    """
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    destroy = dist.destroy_process_group

    @functools.wraps(destroy)
    def keep_and_destroy(group: Any = None) -> None:
        if group in (None, dist.group.WORLD) and dist.is_initialized():
            _kept.append(dist.group.WORLD)
        destroy(group)

    dist.destroy_process_group = distributed_c10d.destroy_process_group = keep_and_destroy


def leave_group(bound_s: float) -> None:
    """Destroy the process group, which may wait for a peer that never comes."""
    import torch.distributed as dist

    if not dist.is_initialized():
        return
    thread = threading.Thread(
        target=_quietly, args=(dist.destroy_process_group,), name="ddp-destroy", daemon=True
    )
    thread.start()
    thread.join(bound_s)


def _quietly(action: Any) -> None:
    with contextlib.suppress(Exception):
        action()
