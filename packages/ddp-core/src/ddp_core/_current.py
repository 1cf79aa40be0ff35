"""What a rank knows about itself."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass

from ddp_core.errors import NotInRankError

VARIABLE = "DDP_CORE_RANK"


@dataclass(frozen=True)
class CurrentRank:
    """The rank that this process, or the process that started it, is.

    Attributes:
        rank: From 0 to ``world_size - 1``.
        world_size: Number of ranks in the job.
        local_rank: Number of the rank on its host.
        local_world_size: Number of ranks on its host.
        node_rank: Number of the host.
        host: The host, as in the Dask worker's address.
        device: ``"cuda:0"``, ``"cpu"``: what the model belongs on.
        job_id: The job.
        attempt: How often the job had been restarted.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    host: str
    device: str
    job_id: str
    attempt: int


def current_rank() -> CurrentRank:
    """The rank that runs this code; also in processes that a rank starts, as DataLoader workers.

    Raises:
        NotInRankError: Outside a rank.
    """
    text = os.environ.get(VARIABLE)
    if not text:
        raise NotInRankError(
            "current_rank() was called outside a rank; it works in a function that "
            "ddp_core.launch or ddp_core.run has started"
        )
    return CurrentRank(**json.loads(text))


def variable(rank: CurrentRank) -> dict[str, str]:
    """The environment variable that makes ``current_rank()`` work below this process."""
    return {VARIABLE: json.dumps(asdict(rank))}
