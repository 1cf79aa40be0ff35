"""Whole epochs in the circumstances of real training: odd sizes, few descriptors, moving data."""

import math
import os
import subprocess
import sys

import pytest
from conftest import pixel, png
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    get_worker_info,
)

from ddp_s3data import ObjectNotFoundError, S3DataLoader, S3Dataset, S3ImageFolder, S3Options
from fault_proxy import Fault


@pytest.fixture
def folder(digits, aws):
    return S3ImageFolder(digits, "train", transform=pixel)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    ("count", "batch_size", "drop_last", "wanted"),
    [
        (1, 1, False, [1]),
        (1, 64, False, [1]),
        (1, 64, True, []),
        (10, 64, False, [10]),
        (10, 4, False, [4, 4, 2]),
        (10, 4, True, [4, 4]),
    ],
)
def test_any_size_of_dataset_and_batch_works(
    fill, aws, num_workers, count, batch_size, drop_last, wanted
):
    bucket = fill({f"c/{i}.png": png(i) for i in range(count)})
    loader = S3DataLoader(
        S3ImageFolder(bucket, transform=pixel),
        batch_size=batch_size,
        drop_last=drop_last,
        shuffle=True,
        num_workers=num_workers,
    )
    for _ in range(2):
        assert [len(targets) for _, targets in loader] == wanted
    assert len(loader) == len(wanted)


@pytest.mark.parametrize("drop_last", [False, True])
def test_uneven_shards_are_torchs(folder, drop_last):
    def epochs(kind):
        found = []
        for rank in range(7):
            sampler = DistributedSampler(folder, 7, rank, shuffle=True, drop_last=drop_last)
            loader = kind(folder, batch_size=5, sampler=sampler)
            for epoch in range(2):
                sampler.set_epoch(epoch)
                found.append([pixels.tolist() for pixels, _ in loader])
        return found

    ours = epochs(S3DataLoader)
    assert ours == epochs(DataLoader)
    assert {len(batches) for batches in ours} == {math.ceil((17 if drop_last else 18) / 5)}


class Stream(IterableDataset):
    """What people write around a map-style dataset to read it in a stream."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __iter__(self):
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for place in range(first, len(self.dataset), step):
            yield self.dataset[place]


@pytest.mark.parametrize("kind", [DataLoader, S3DataLoader])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stream_around_a_dataset_works(folder, kind, num_workers):
    loader = kind(Stream(folder), batch_size=16, num_workers=num_workers)
    assert sorted(p for pixels, _ in loader for p in pixels.tolist()) == list(range(120))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_datasets_of_several_buckets_join(folder, fill, num_workers):
    other = S3ImageFolder(fill({f"c/{i}.png": png(200 + i) for i in range(7)}), transform=pixel)
    loader = S3DataLoader(
        ConcatDataset([folder, other]), batch_size=16, shuffle=True, num_workers=num_workers
    )
    seen = sorted(p for pixels, _ in loader for p in pixels.tolist())
    assert seen == [*range(120), *range(200, 207)]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_objects_deleted_and_replaced_in_mid_epoch(fill, aws, admin, num_workers):
    bucket = fill({f"c/{i:03d}.png": png(i) for i in range(60)})
    folder = S3ImageFolder(bucket, transform=pixel, on_error="replace")
    loader = S3DataLoader(folder, batch_size=6, num_workers=num_workers, lookahead=1)
    batches = iter(loader)
    seen = next(batches)[0].tolist()
    admin.delete_object(bucket, "c/058.png")
    admin.put(bucket, {"c/057.png": png(157)})
    sizes = []
    for pixels, targets in batches:
        seen += pixels.tolist()
        sizes.append(len(targets))
    assert sizes == [6] * 9
    assert seen == [*range(57), 157, 59, 59]
    stats = loader.stats()
    assert (stats["changed"], stats["replaced"]) == (1, 1)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_object_deleted_in_mid_epoch_is_raised_by_name(fill, aws, admin, num_workers):
    bucket = fill({f"c/{i:03d}.png": png(i) for i in range(60)})
    loader = S3DataLoader(
        S3ImageFolder(bucket, transform=pixel), 6, num_workers=num_workers, lookahead=1
    )
    batches = iter(loader)
    next(batches)
    admin.delete_object(bucket, "c/058.png")
    with pytest.raises(ObjectNotFoundError, match=f"s3://{bucket}/c/058.png"):
        list(batches)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_epoch_of_every_kind_of_passing_fault_brings_every_sample(
    digits, aws, proxy, num_workers
):
    faults = [
        Fault(reset_after_bytes=10),
        Fault(truncate_after_bytes=0),
        Fault(empty=True),
        Fault(hang_up=True),
        Fault(status=500, code="InternalError"),
        Fault(status=503),
        Fault(corrupt_byte_at=40),
    ]
    options = S3Options(endpoint_url=proxy.endpoint_url, checksum=True, hedge=False)
    folder = S3ImageFolder(digits, "train", transform=pixel, options=options)
    proxy.script(faults * 4)
    loader = S3DataLoader(folder, batch_size=16, shuffle=True, num_workers=num_workers)
    assert sorted(p for pixels, _ in loader for p in pixels.tolist()) == list(range(120))
    assert sum(loader.stats()["retries"].values()) == len(faults) * 4


SCRIPT = """
import os, resource, signal, sys
from conftest import pixel
from ddp_s3data import S3DataLoader, S3ImageFolder, S3Options

def few_descriptors(bucket, workers):
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    for connections in (64, 1000):
        folder = S3ImageFolder(
            bucket, "train", transform=pixel, options=S3Options(max_connections=connections)
        )
        for _ in range(3):
            loader = S3DataLoader(folder, 60, shuffle=True, num_workers=workers, lookahead=8)
            seen = sorted(p for pixels, _ in loader for p in pixels.tolist())
            assert seen == list(range(120))
    assert len(os.listdir("/proc/self/fd")) < 200

def interrupted(bucket, workers):
    folder = S3ImageFolder(bucket, "train", transform=pixel)
    for number, _ in enumerate(S3DataLoader(folder, 5, num_workers=workers, lookahead=2)):
        if number == 2:
            os.killpg(0, signal.SIGINT)  # as a terminal does it: to all processes

if __name__ == "__main__":
    try:
        globals()[sys.argv[1]](sys.argv[2], int(sys.argv[3]))
    except KeyboardInterrupt:
        print("interrupted")
    else:
        print("done")
"""


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("what", "end"), [("few_descriptors", "done"), ("interrupted", "interrupted")]
)
def test_a_program_of_its_own(digits, aws, tmp_path, what, end, workers):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    path = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    process = subprocess.Popen(
        [sys.executable, str(script), what, digits, str(workers)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        start_new_session=True,
    )
    out, err = process.communicate(timeout=100)
    assert (out.split(), err) == ([end], "")
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 9)  # nobody of its group is left


def test_samples_of_another_kind_than_tensors_come_through_workers(fill, aws):
    dataset = S3Dataset(fill({f"{i}.json": b"{}" for i in range(9)}), transform=lambda found: found)
    loader = S3DataLoader(dataset, 4, collate_fn=list, num_workers=2)
    found = [each for batch in loader for each in batch]
    assert [(each.index, each.data) for each in found] == [(i, b"{}") for i in range(9)]
