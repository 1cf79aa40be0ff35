"""What the owner of a job is told while nothing seems to happen."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from ddp_core import LaunchOptions
from ddp_core._watch import Watch, patiently


def view(state: str, *ranks: str, **more: Any) -> dict[str, Any]:
    states = [[number, {"state": s}] for number, s in enumerate(ranks)]
    return {
        "state": state, "ranks": states, "cause": None, "missing": ["tcp://a:1"],
        "address": None, **more,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("seen", "text"),
    [
        (view("waiting", "queued"), "waits for its workers: no agent on tcp://a:1"),
        (view("starting", "running", "ready"), "waits for the ranks to join: rank 1 is ready"),
        (
            view("stopping", "left", "returned", "left", "running"),
            "is stopping: ranks 1, 3 do not exit",
        ),
        (view("stopping", "left", "failed", "queued"), "is stopping: rank 1 does not exit"),
        (
            view("stopping", "left"),
            "is stopping: its ranks have left, its workers have not said so",
        ),
    ],
)
def test_each_wait_names_whom_it_is_for(seen: dict[str, Any], text: str) -> None:
    assert Watch(LaunchOptions()).why(seen) == text


def test_very_many_ranks_are_counted_not_listed() -> None:
    text = Watch(LaunchOptions()).why(view("stopping", *["running"] * 1000))
    assert "and 984 more" in text
    assert len(text) < 200


def test_a_silent_worker_is_told_once_though_its_seconds_count_up() -> None:
    watch = Watch(LaunchOptions())
    first = view("running", silent=["worker a has said nothing for 20 s, but its host answers"])
    later = view("running", silent=["worker a has said nothing for 23 s, but its host answers"])
    assert watch.silences(first) == first["silent"]
    assert watch.silences(later) == []
    assert watch.silences(view("running")) == []
    assert watch.silences(later) == later["silent"]


def test_workers_that_stay_busy_give_an_error_with_the_remedies() -> None:
    watch = Watch(LaunchOptions(start_timeout_s=0.01))
    seen = view("waiting", "queued")
    time.sleep(0.02)
    failure = watch.check(seen)
    assert failure is not None
    for word in ("free these workers", "workers=", "start_timeout_s="):
        assert word in failure["text"]


def test_the_address_of_a_store_is_written_as_it_may_be_copied() -> None:
    watch = Watch(LaunchOptions(rendezvous_timeout_s=0.01))
    seen = view("starting", "ready", address=["::1", 1234])
    watch.check(seen)
    time.sleep(0.02)
    failure = watch.check(seen)
    assert failure is not None
    assert "[::1]:1234" in failure["text"]


def test_waiting_patiently_gives_the_value_or_the_error() -> None:
    async def fail() -> None:
        raise ValueError("boom")

    said: list[int] = []
    assert asyncio.run(patiently(asyncio.sleep(0, 3), lambda: said.append(1))) == 3
    with pytest.raises(ValueError, match="boom"):
        asyncio.run(patiently(fail(), lambda: said.append(1)))
    assert said == []
