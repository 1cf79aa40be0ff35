from __future__ import annotations

import pytest

from ddp_core._ranks import (
    WorkerInfo,
    choose_workers,
    device_indices,
    host_port,
    natural,
    plan_ranks,
    workers_of,
)
from ddp_core.errors import NotEnoughWorkersError


def worker(host: str, port: int, name: str | None = None, busy: bool = False) -> WorkerInfo:
    return WorkerInfo(f"tcp://{host}:{port}", host, name or f"w-{port}", busy)


def test_ranks_are_numbered_host_by_host_in_natural_order() -> None:
    workers = [worker("h10", 1), worker("h9", 10), worker("h9", 9), worker("h10", 2)]
    plan = plan_ranks(workers)
    assert [(r.rank, r.worker, r.local_rank, r.node_rank) for r in plan] == [
        (0, "tcp://h9:9", 0, 0),
        (1, "tcp://h9:10", 1, 0),
        (2, "tcp://h10:1", 0, 1),
        (3, "tcp://h10:2", 1, 1),
    ]
    assert {r.world_size for r in plan} == {4}
    assert {r.local_world_size for r in plan} == {2}


def test_the_plan_does_not_depend_on_the_order_of_the_workers() -> None:
    workers = [worker("a", 3), worker("b", 1), worker("a", 20)]
    assert plan_ranks(workers) == plan_ranks(workers[::-1])


def test_ranks_per_worker_share_the_worker_and_its_agent() -> None:
    plan = plan_ranks([worker("a", 1), worker("b", 2)], ranks_per_worker=2)
    assert [(r.rank, r.agent, r.local_rank) for r in plan] == [
        (0, 0, 0),
        (1, 0, 1),
        (2, 1, 0),
        (3, 1, 1),
    ]


def test_an_odd_number_of_ranks_leaves_the_last_worker_part_full() -> None:
    plan = plan_ranks([worker("a", 1), worker("b", 2)], n_ranks=3, ranks_per_worker=2)
    assert [r.local_world_size for r in plan] == [2, 2, 1]


def test_fewer_ranks_prefer_free_workers_then_few_hosts() -> None:
    workers = [worker("a", 1, busy=True), worker("b", 1), worker("c", 1), worker("c", 2)]
    assert [r.worker for r in plan_ranks(workers, 2)] == ["tcp://c:1", "tcp://c:2"]


@pytest.mark.parametrize("n_ranks", [None, 1, 3])
def test_too_few_workers_is_said_with_what_there_is(n_ranks: int | None) -> None:
    with pytest.raises(NotEnoughWorkersError, match=r"running: 0 .*wait_timeout_s="):
        plan_ranks([], n_ranks)


def test_workers_that_are_not_running_get_no_rank() -> None:
    info = {
        "workers": {
            "tcp://a:1": {"name": 0, "status": "running"},
            "tcp://a:2": {"name": 1, "status": "closing_gracefully"},
            "tls://[::1]:3": {"name": 2, "status": "running"},
        }
    }
    found = workers_of(info, busy=["tcp://a:1"])
    assert [(w.host, w.name, w.busy) for w in found] == [("a", "0", True), ("::1", "2", False)]
    assert [w.name for w in workers_of(info, gone=["tcp://a:1"])] == ["2"]


def test_workers_are_chosen_by_address_name_or_host() -> None:
    workers = [worker("a", 1, "gpu-1"), worker("b", 2, "gpu-2"), worker("b", 3, "7")]
    assert choose_workers(workers, ["tcp://a:1", "a:1", "gpu-1"]) == workers[:1]
    assert choose_workers(workers, ["b"]) == workers[1:]
    assert choose_workers(workers, [7]) == workers[2:]
    with pytest.raises(ValueError, match=r"no worker is called 'gpu-9'; there are: gpu-1"):
        choose_workers(workers, ["gpu-9"])


def test_rotated_devices_give_every_rank_its_first() -> None:
    assert device_indices([("a", "0,1"), ("a", "1,0"), ("b", "0,1"), ("b", "1,0")]) == [0, 0, 0, 0]


def test_shared_devices_are_taken_in_turn_on_each_host() -> None:
    assert device_indices([("a", None), ("a", None), ("b", None), ("b", None)]) == [0, 1, 0, 1]


def test_several_ranks_of_a_rotated_worker_take_its_devices_in_turn() -> None:
    seen = [("a", "0,1,2,3"), ("a", "0,1,2,3"), ("a", "2,3,0,1"), ("a", "2,3,0,1")]
    assert device_indices(seen) == [0, 1, 0, 1]


def test_natural_order_counts() -> None:
    assert sorted(["w10", "w9", "w1"], key=natural) == ["w1", "w9", "w10"]


def test_an_ipv6_address_has_brackets_before_its_port() -> None:
    assert host_port("::1", 80) == "[::1]:80"
    assert host_port("10.0.0.1", 80) == host_port("10.0.0.1", "80") == "10.0.0.1:80"
