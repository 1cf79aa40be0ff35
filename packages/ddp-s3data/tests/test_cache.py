"""Objects on a local disk: shared, bounded, and never trusted blindly."""

import logging
import multiprocessing
import os
import resource
import time
from pathlib import Path

import pytest
from conftest import pixel

from ddp_s3data import S3DataLoader, S3Dataset, S3ImageFolder, S3Options
from ddp_s3data._cache import DiskCache

BODY = os.urandom(1000)
FILE_BYTES = 1000 + 16  # with the head


@pytest.fixture
def cache(tmp_path):
    return DiskCache(str(tmp_path), 10 * FILE_BYTES)


def files(root):
    return [path for path in Path(root).rglob("*") if path.is_file() and path.name != "total"]


def put(cache, *names):
    for name in names:
        cache.put("b", name, "etag", BODY)


def held(cache, names):
    return [name for name in names if cache.get("b", name, "etag") is not None]


def test_an_object_comes_back_as_it_was(cache):
    cache.put("b", "k", "e", BODY)
    cache.put("b", "empty", "e", b"")
    assert cache.has("b", "k", "e")
    assert cache.get("b", "k", "e") == BODY
    assert cache.get("b", "empty", "e") == b""


def test_bucket_key_and_etag_make_the_object(cache):
    cache.put("b", "k", "e", BODY)
    for other in (("b2", "k", "e"), ("b", "k2", "e"), ("b", "k", "e2"), ("bk", "", "e")):
        assert not cache.has(*other)
        assert cache.get(*other) is None


def test_without_an_etag_nothing_is_kept(cache, tmp_path):
    cache.put("b", "k", "", BODY)
    assert not cache.has("b", "k", "")
    assert not files(tmp_path)


def test_the_least_recently_used_go_first(cache, tmp_path):
    names = list("abcdefghij")
    put(cache, *names)
    assert len(files(tmp_path)) == 10
    assert held(cache, ["a", "b"]) == ["a", "b"]  # used just now
    put(cache, "k")
    assert sum(path.stat().st_size for path in files(tmp_path)) <= 10 * FILE_BYTES
    assert held(cache, [*names, "k"]) == ["a", "b", *"efghij", "k"]


def test_what_is_larger_than_the_bound_is_not_kept(tmp_path):
    cache = DiskCache(str(tmp_path), 500)
    put(cache, "a")
    assert not files(tmp_path)


def damages():
    return {
        "cut": lambda data: data[:-1],
        "longer": lambda data: data + b"x",
        "empty": lambda data: b"",
        "half a head": lambda data: data[:7],
        "a flipped bit": lambda data: data[:500] + bytes([data[500] ^ 1]) + data[501:],
        "zeros": lambda data: bytes(len(data)),
        "an endless length": lambda data: data[:8] + b"\xff" * 8 + data[16:],
    }


@pytest.mark.parametrize("damage", damages())
def test_a_damaged_file_is_removed_and_said(cache, tmp_path, caplog, damage):
    put(cache, "a")
    (path,) = files(tmp_path)
    path.write_bytes(damages()[damage](path.read_bytes()))
    with caplog.at_level(logging.WARNING, "ddp_s3data"):
        assert cache.get("b", "a", "etag") is None
    assert str(path) in caplog.text
    assert not path.exists()


def test_a_disk_that_refuses_is_said_once_and_nothing_half_written_is_left(tmp_path, caplog):
    cache = DiskCache(str(tmp_path), 10 * FILE_BYTES)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with caplog.at_level(logging.WARNING, "ddp_s3data"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (500, limits[1]))
        try:
            put(cache, "a", "b", "c")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(caplog.records) == 1
    assert "File too large" in caplog.text
    assert not files(tmp_path)


def test_a_directory_that_cannot_be_made_is_said_and_nothing_is_kept(tmp_path, caplog):
    (tmp_path / "file").write_bytes(b"")
    cache = DiskCache(str(tmp_path / "file" / "inside"), 10 * FILE_BYTES)
    with caplog.at_level(logging.WARNING, "ddp_s3data"):
        put(cache, "a")
    assert cache.get("b", "a", "etag") is None
    assert "keeps nothing" in caplog.text


def test_files_are_for_the_user_alone(cache, tmp_path):
    put(cache, "a")
    assert all(path.stat().st_mode & 0o077 == 0 for path in tmp_path.rglob("*") if path.is_file())


def test_what_a_dead_process_left_half_written_is_cleared_away(cache, tmp_path):
    put(cache, "a")
    home = files(tmp_path)[0].parent.parent
    old, new = home / "old.part", home / "new.part"
    for path in (old, new):
        path.write_bytes(BODY)
    long_ago = time.time() - 7200
    os.utime(old, (long_ago, long_ago))
    (home / "total").unlink()  # so that the next one counts
    put(cache, "b")
    assert not old.exists()
    assert new.exists()


def _fill(root, mine, limit):
    cache = DiskCache(root, limit)
    for number in range(60):
        put(cache, f"{mine}-{number}", f"both-{number}")
        cache.get("b", f"both-{number // 2}", "etag")


@pytest.mark.parametrize("limit", [30 * FILE_BYTES, 1000 * FILE_BYTES])
def test_processes_share_the_objects_and_the_bound(tmp_path, limit):
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=_fill, args=(str(tmp_path), i, limit)) for i in range(3)]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
        assert child.exitcode == 0
    found = files(tmp_path)
    assert sum(path.stat().st_size for path in found) <= limit
    if limit > 30 * FILE_BYTES:
        assert len(found) == 4 * 60
    assert not [path for path in found if path.suffix == ".part"]


# with a dataset


@pytest.fixture
def kept(tmp_path, through_proxy, proxy):
    return S3Options(endpoint_url=proxy.endpoint_url, cache_dir=str(tmp_path / "cache"))


def gets(proxy):
    return [request.path for request in proxy.requests if "list-type" not in request.target]


@pytest.mark.parametrize(("num_workers", "method"), [(0, None), (2, "fork"), (2, "spawn")])
def test_the_second_epoch_makes_no_request(digits, kept, proxy, num_workers, method):
    folder = S3ImageFolder(digits, "train", transform=pixel, options=kept)
    loader = S3DataLoader(
        folder,
        batch_size=16,
        shuffle=True,
        num_workers=num_workers,
        multiprocessing_context=method,
    )
    for _ in range(3):
        assert sorted(p for pixels, _ in loader for p in pixels.tolist()) == list(range(120))
        assert len(gets(proxy)) == 120
    assert loader.stats()["objects"] == 120
    assert loader.stats()["cached"] == 240


def test_a_damaged_file_is_read_from_s3_again(fill, kept, proxy, caplog):
    bucket = fill({"a": BODY, "b": BODY[::-1]})
    dataset = S3Dataset(bucket, options=kept)
    dataset.__getitems__([0, 1])
    for path in files(kept.cache_dir):
        path.write_bytes(path.read_bytes()[:-1])
    proxy.requests.clear()
    assert [each.data for each in dataset.__getitems__([0, 1, 0])] == [BODY, BODY[::-1], BODY]
    assert len(gets(proxy)) == 2
    assert [each.data for each in dataset.__getitems__([0, 1])] == [BODY, BODY[::-1]]
    assert len(gets(proxy)) == 2


def test_a_cached_object_has_its_etag(fill, kept):
    dataset = S3Dataset(fill({"a": BODY}), options=kept)
    assert dataset[0] == dataset[0]
    assert dataset.stats()["cached"] == 1


def test_a_replaced_object_is_not_kept_for_the_listed_one(fill, kept, admin):
    bucket = fill({"a": BODY})
    dataset = S3Dataset(bucket, options=kept)
    admin.put(bucket, {"a": b"new"})
    assert dataset[0].data == b"new"
    assert not files(kept.cache_dir)
    again = S3Dataset(bucket, options=kept)
    assert [again[0].data, again[0].data] == [b"new", b"new"]
    assert again.stats()["cached"] == 1


def test_a_disk_that_refuses_does_not_stop_reading(fill, tmp_path, through_proxy, proxy):
    (tmp_path / "file").write_bytes(b"")
    options = S3Options(
        endpoint_url=proxy.endpoint_url, cache_dir=str(tmp_path / "file" / "inside")
    )
    dataset = S3Dataset(fill({"a": BODY}), options=options)
    assert [dataset[0].data, dataset[0].data] == [BODY, BODY]
    assert dataset.stats()["cached"] == 0


def test_a_small_cache_still_gives_every_object(digits, tmp_path, through_proxy, proxy):
    options = S3Options(
        endpoint_url=proxy.endpoint_url, cache_dir=str(tmp_path / "cache"), cache_bytes=3000
    )
    folder = S3ImageFolder(digits, "train", transform=pixel, options=options)
    for _ in range(2):
        pixels = [p for batch, _ in S3DataLoader(folder, batch_size=16) for p in batch.tolist()]
        assert sorted(pixels) == list(range(120))
    assert sum(path.stat().st_size for path in files(tmp_path)) <= 3000


def test_images_are_decoded_from_the_cache_too(digits, kept):
    folder = S3ImageFolder(digits, "train", options=kept)
    assert [pixel(folder[5][0]), pixel(folder[5][0])] == [pixel(folder[5][0])] * 2
    assert folder.stats()["cached"] == 2
