"""The outbox under threads that race: with the lock, without it, and with its end."""

from __future__ import annotations

import sys
import threading
from collections import defaultdict
from collections.abc import Iterator

import pytest

from ddp_results._outbox import RECORD_OVERHEAD_BYTES, SMALL_BYTES, Outbox, Retired
from ddp_results._record import Kind, Record

THREADS = 4
EACH = 3000


@pytest.fixture(autouse=True)
def eager_switching() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def _record(thread: int, n: int, size_bytes: int = 10) -> Record:
    return Record(Kind.METRICS, 0.0, (thread, n), size_bytes)


def _by_thread(records: list[Record]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = defaultdict(list)
    for record in records:
        thread, n = record.fields
        found[thread].append(n)
    return found


def test_put_and_add_keep_each_threads_order_and_lose_nothing() -> None:
    box = Outbox(2**20)

    def submit(thread: int) -> None:
        for n in range(EACH):
            record = _record(thread, n)
            if n % 7 == 0 or not box.put(record):
                box.add([record])

    threads = [threading.Thread(target=submit, args=(n,), daemon=True) for n in range(THREADS)]
    for thread in threads:
        thread.start()
    received: list[Record] = []
    while len(received) < THREADS * EACH:
        batch = box.next_records(2**16, 100)
        if batch is None:
            assert any(t.is_alive() for t in threads) or box.submitted > box.sent
            continue
        first, records = batch
        assert first == len(received) + 1
        received += records
        box.acknowledge(durable=len(received), taken=len(received))
    for thread in threads:
        thread.join(10)

    assert _by_thread(received) == {n: list(range(EACH)) for n in range(THREADS)}
    assert box.submitted == box.durable == THREADS * EACH


def test_what_a_closing_outbox_has_accepted_is_sent() -> None:
    """An owner that closes as soon as nothing is under way, against threads that go on."""
    accepted: list[list[Record]] = [[] for _ in range(THREADS)]
    sent: list[Record] = []
    current = [Outbox(2**20)]
    over = threading.Event()
    n_retired = 0

    def submit(thread: int) -> None:
        for n in range(EACH):
            record = _record(thread, n)
            while True:
                box = current[0]
                try:
                    if not box.put(record):
                        box.add([record])
                except Retired:
                    while current[0] is box:
                        over.wait(1e-4)
                    continue
                accepted[thread].append(record)
                break

    threads = [threading.Thread(target=submit, args=(n,), daemon=True) for n in range(THREADS)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) or current[0].submitted > current[0].sent:
        box = current[0]
        batch = box.next_records(2**20, 1000)
        if batch is not None:
            sent += batch[1]
            box.acknowledge(durable=box.sent, taken=box.sent)
        if box.retire():
            n_retired += 1
            assert box.next_records(2**20, 1000) is None
            current[0] = Outbox(2**20)

    assert n_retired > 10, "the race was not run"
    assert [len(each) for each in accepted] == [EACH] * THREADS
    assert _by_thread(sent) == {n: list(range(EACH)) for n in range(THREADS)}


def test_put_leaves_room_for_what_it_accepts() -> None:
    window = 2**18
    box = Outbox(window)
    n = 0
    while box.put(_record(0, n, SMALL_BYTES)) or box.add([_record(0, n, SMALL_BYTES)]):
        n += 1
        box.next_records(0, 1)  # the owner numbers what was put, and nothing is taken
        if not box.has_room:
            break
    size = SMALL_BYTES + RECORD_OVERHEAD_BYTES
    assert window < (n + 1) * size <= window + 2 * size  # the last one was added, and would wait
    assert not box.put(_record(0, n))


def test_put_refuses_after_a_failure() -> None:
    box = Outbox(2**20)
    assert box.put(_record(0, 0))
    box.fail(OSError("gone"))
    box.next_records(2**20, 10)  # what was put before is numbered, and changes nothing
    assert not box.put(_record(0, 1))
    with pytest.raises(OSError, match="gone"):
        box.add([_record(0, 1)])
