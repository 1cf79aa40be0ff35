from __future__ import annotations

import time

import pytest
import torch.distributed as dist
from distributed import Client

from ddp_core import JobStalledError, LaunchOptions, launch

pytestmark = [
    pytest.mark.xdist_group("cluster"),
    pytest.mark.usefixtures("untouched"),
    pytest.mark.timeout(240),
]


def test_a_stall_is_told_with_the_stack_of_every_rank(client: Client) -> None:
    def deadlock() -> None:
        if dist.get_rank() == 0:
            dist.barrier()
        time.sleep(1000)

    options = LaunchOptions(stall_timeout_s=3, grace_s=2)
    with pytest.raises(JobStalledError, match="rank 0") as caught:
        launch(client, deadlock, options=options).result(120)
    text = str(caught.value)
    assert "barrier" in text
    assert text.count("in deadlock") == 2


def test_work_is_no_stall(client: Client) -> None:
    def work() -> int:
        ends = time.monotonic() + 4
        while time.monotonic() < ends:
            sum(range(10_000))
        return dist.get_rank()

    options = LaunchOptions(stall_timeout_s=2)
    assert launch(client, work, options=options).result(120) == [0, 1]
