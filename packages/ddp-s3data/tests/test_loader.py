import gc
import multiprocessing
import multiprocessing.util
import os
import socket
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
import torch
from conftest import pixel
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    random_split,
)

from ddp_s3data import DaemonicProcessError, S3DataLoader, S3ImageFolder, S3Options
from fault_proxy import Fault


@pytest.fixture
def folder(digits, aws):
    return S3ImageFolder(digits, "train", transform=pixel)


def epoch(loader):
    """Pixels and targets of all batches."""
    return [(pixels.tolist(), targets.tolist()) for pixels, targets in loader]


SETTINGS = [
    {"batch_size": 7},
    {"batch_size": 7, "drop_last": True},
    {"batch_size": 7, "shuffle": True},
    {"batch_size": 500},
    {"batch_size": 7, "sampler": lambda ds: SubsetRandomSampler(range(0, 120, 3))},
    {"batch_size": 7, "sampler": lambda ds: RandomSampler(ds, replacement=True, num_samples=60)},
    {"batch_sampler": lambda ds: BatchSampler(SequentialSampler(ds), 11, drop_last=False)},
    {"batch_size": None},
]


WITH_WORKERS = [SETTINGS[2], SETTINGS[4], SETTINGS[7]]


@pytest.mark.parametrize(
    ("given", "num_workers"),
    [
        *((given, 0) for given in SETTINGS),
        *((given, 2) for given in WITH_WORKERS),
    ],
    ids=lambda value: "" if isinstance(value, int) else "-".join(value),
)
def test_batches_are_exactly_torchs(folder, given, num_workers):
    def loader(kind):
        made = {name: v(folder) if callable(v) else v for name, v in given.items()}
        return kind(folder, num_workers=num_workers, **made)

    torch.manual_seed(3)
    wanted = [(np.asarray(p).tolist(), np.asarray(t).tolist()) for p, t in loader(DataLoader)]
    torch.manual_seed(3)
    ours = [(np.asarray(p).tolist(), np.asarray(t).tolist()) for p, t in loader(S3DataLoader)]
    assert ours == wanted
    assert len(loader(S3DataLoader)) == len(loader(DataLoader))


def test_every_sample_comes_once_and_right(folder):
    loader = S3DataLoader(folder, batch_size=16, shuffle=True, num_workers=2)
    seen = {p: t for pixels, targets in epoch(loader) for p, t in zip(pixels, targets, strict=True)}
    assert seen == {i: i % 3 for i in range(120)}


def test_attributes_are_those_that_were_given(folder):
    loader = S3DataLoader(folder, batch_size=16, shuffle=True, drop_last=True)
    assert (loader.batch_size, loader.drop_last, loader.dataset) == (16, True, folder)
    assert isinstance(loader.sampler, RandomSampler)
    assert isinstance(loader, DataLoader)


def test_look_ahead_fetches_the_next_batch_before_it_is_asked_for(digits, aws, proxy):
    options = S3Options(endpoint_url=proxy.endpoint_url)
    folder = S3ImageFolder(digits, "train", transform=pixel, options=options)
    proxy.plan = lambda request: Fault(delay_s=0.03)
    loader = S3DataLoader(folder, batch_size=10, lookahead=3)
    batches = iter(loader)
    next(batches)
    next(batches)
    asked = 20
    for _ in range(500):
        if folder.stats()["objects"] > asked:
            break
        proxy_wait()
    assert folder.stats()["objects"] > asked
    rest = sum(len(targets) for _, targets in batches)
    assert rest == 100
    assert folder.stats()["requests"] == 120  # none of it twice


def proxy_wait():
    import time

    time.sleep(0.01)


def test_without_look_ahead_nothing_is_fetched_early(digits, aws, proxy):
    options = S3Options(endpoint_url=proxy.endpoint_url)
    folder = S3ImageFolder(digits, "train", transform=pixel, options=options)
    next(iter(S3DataLoader(folder, batch_size=10, lookahead=0)))
    assert folder.stats()["requests"] == 10


def test_an_index_that_comes_again_soon_is_fetched_ahead_too(digits, aws, proxy):
    options = S3Options(endpoint_url=proxy.endpoint_url)
    folder = S3ImageFolder(digits, "train", transform=pixel, options=options)
    loader = S3DataLoader(folder, batch_sampler=[[0, 1], [1, 2], [3]], lookahead=1)
    batches = iter(loader)
    next(batches)
    for _ in range(500):
        if folder.stats()["objects"] == 4:
            break
        proxy_wait()
    assert folder.stats()["objects"] == 4  # 0, 1, and already 1, 2
    assert [len(targets) for _, targets in batches] == [2, 1]


def test_an_epoch_begins_with_the_depth_at_which_the_last_ended(digits, aws, proxy):
    options = S3Options(endpoint_url=proxy.endpoint_url)
    folder = S3ImageFolder(digits, "train", transform=pixel, options=options)
    proxy.plan = lambda request: Fault(delay_s=0.03)
    loader = S3DataLoader(folder, batch_size=4, lookahead=3)
    epoch(loader)
    assert loader.stats()["depth"] == 3
    proxy.forget()
    next(iter(loader))
    assert loader.stats()["depth"] >= 2


def test_look_ahead_sees_through_subsets(digits, aws, proxy):
    options = S3Options(endpoint_url=proxy.endpoint_url)
    folder = S3ImageFolder(digits, "train", transform=pixel, options=options)
    proxy.plan = lambda request: Fault(delay_s=0.03)
    part = Subset(Subset(folder, list(range(119, 19, -1))), torch.arange(80))
    loader = S3DataLoader(part, batch_size=10)
    assert isinstance(loader.dataset, Subset)
    assert [p for pixels, _ in epoch(loader) for p in pixels] == [
        folder[i][0] for i in range(119, 39, -1)
    ]
    stats = loader.stats()
    assert stats["requests"] == 160
    assert stats["depth"] > 0


def test_statistics_of_workers_add_up_over_epochs(folder):
    loader = S3DataLoader(folder, batch_size=10, num_workers=2)
    assert loader.stats()["samples"] == 0
    for _ in range(2):
        epoch(loader)
    stats = loader.stats()
    assert (stats["samples"], stats["objects"]) == (240, 240)
    assert stats["limited_by"] in ("network", "decode")


def test_the_users_worker_init_is_called(folder):
    def init(worker_id):
        torch.utils.data.get_worker_info().dataset.transform = lambda image: worker_id

    loader = S3DataLoader(folder, batch_size=10, num_workers=2, worker_init_fn=init)
    assert [pixels[0] for pixels, _ in epoch(loader)] == [0, 1] * 6


def test_an_early_break_leaves_the_dataset_usable(folder):
    loader = S3DataLoader(folder, batch_size=10, num_workers=2, persistent_workers=True)
    for _ in range(3):
        for _ in loader:
            break
    assert len(epoch(loader)) == 12
    for _ in S3DataLoader(folder, batch_size=10):
        break
    assert pixel_at(folder, 7) == folder[7][0]


@pytest.mark.parametrize("end", ["in mid-epoch", "after an epoch"])
@pytest.mark.parametrize("persistent", [False, True])
def test_workers_end_by_themselves_when_their_iterator_is_garbage_in_a_cycle(
    folder, persistent, end, monkeypatch, tmp_path
):
    """As an exception makes one. Workers that torch cannot tell get a SIGTERM after 5 s each.

    Torch's handler of it exits with 0, and at once: nothing that is due at the end is run. Workers
    also look every 5 s whether they are still wanted; these do not.
    """
    monkeypatch.setattr("torch.utils.data._utils.worker.MP_STATUS_CHECK_INTERVAL", 1000)
    loader = S3DataLoader(
        folder,
        batch_size=40,
        num_workers=2,
        persistent_workers=persistent,
        multiprocessing_context="fork",
        worker_init_fn=partial(tell_at_the_end, tmp_path),
    )
    batches = iter(loader)
    next(batches)
    workers = [*batches._workers]
    if end == "after an epoch":
        list(batches)
    cycle = [loader, batches]
    cycle.append(cycle)
    del loader, batches, cycle
    gc.collect()
    for worker in workers:
        worker.join(30)
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


def tell_at_the_end(directory, worker_id):
    multiprocessing.util.Finalize(None, (directory / str(worker_id)).touch, exitpriority=0)


def pixel_at(folder, place):
    return int(folder.all_files[place].rpartition("/")[2].removesuffix(".png"))


def test_persistent_workers_last_five_epochs(folder):
    loader = S3DataLoader(
        folder, batch_size=16, shuffle=True, num_workers=2, persistent_workers=True
    )
    for _ in range(5):
        assert sorted(p for pixels, _ in epoch(loader) for p in pixels) == list(range(120))


def test_parts_of_the_dataset_work(folder):
    first, second = random_split(folder, [100, 20], torch.Generator().manual_seed(1))
    both = [
        p for part in (first, second) for pixels, _ in epoch(S3DataLoader(part, 9)) for p in pixels
    ]
    assert sorted(both) == list(range(120))
    assert [p for p, _ in Subset(folder, [3, 1])] == [folder[3][0], folder[1][0]]


@pytest.mark.parametrize("kind", [DataLoader, S3DataLoader])
def test_the_error_of_a_worker_is_the_same_error(folder, s3, kind, fill):
    bucket = fill({f"a/{i}.png": b"no image" for i in range(4)})
    broken = S3ImageFolder(bucket)
    with pytest.raises(OSError, match=rf"decoding s3://{bucket}/a/0.png") as caught:
        list(kind(broken, batch_size=2, num_workers=1, collate_fn=list))
    assert type(caught.value).__name__ == "DecodeError"


def test_in_order_false_works_without_look_ahead(folder):
    loader = S3DataLoader(folder, batch_size=10, num_workers=2, in_order=False)
    assert loader.lookahead == 0
    assert sorted(p for pixels, _ in epoch(loader) for p in pixels) == list(range(120))


def test_a_wrong_look_ahead_is_an_error(folder):
    with pytest.raises(ValueError, match="lookahead"):
        S3DataLoader(folder, lookahead=-1)


def _in_a_daemon(folder, out):
    try:
        S3DataLoader(folder, num_workers=2)
    except DaemonicProcessError as error:
        out.put(str(error))
    else:
        out.put("no error")
    out.put(len(list(S3DataLoader(folder, batch_size=40))))


def test_a_daemonic_process_is_told_to_use_no_workers(folder):
    context = multiprocessing.get_context("spawn")
    out = context.Queue()
    process = context.Process(target=_in_a_daemon, args=(folder, out), daemon=True)
    process.start()
    said = out.get(timeout=60)
    assert "use num_workers=0" in said
    assert "decode_threads=os.cpu_count()" in said
    assert out.get(timeout=60) == 3
    process.join(30)
    process.close()
    out.close()
    out.join_thread()


RANK = """
import sys
import torch.distributed as dist
from conftest import pixel
from ddp_s3data import S3DataLoader, S3ImageFolder

rank, port, bucket = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
folder = S3ImageFolder(bucket, "train", transform=pixel)
loader = S3DataLoader(folder, batch_size=16, shuffle=True, num_workers=rank)
for _ in range(2):
    print([pixels.tolist() for pixels, _ in loader], flush=True)
dist.destroy_process_group()
"""


def test_ranks_share_one_permutation_and_have_equally_many_batches(digits, aws):
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = str(sock.getsockname()[1])
    path = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), port, digits],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]
    out = [rank.communicate(timeout=100)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    epochs = [[eval(line) for line in text.splitlines()] for text in out]
    for number in range(2):
        batches = [epochs[rank][number] for rank in range(2)]
        assert [len(part) for part in batches] == [4, 4]
        seen = [p for part in batches for batch in part for p in batch]
        assert sorted(seen) == list(range(120))
    assert epochs[0][0] != epochs[0][1]
