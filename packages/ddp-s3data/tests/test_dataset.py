import concurrent.futures
import logging
import pickle

import numpy as np
import pytest
import torch
from conftest import png

from ddp_s3data import (
    BadSampleLimitError,
    EmptyDatasetError,
    ObjectNotFoundError,
    S3DataError,
    S3Dataset,
    S3Object,
    S3Options,
    TransferError,
)
from fault_proxy import Fault

OBJECTS = {f"d/{i:03d}": f"body {i}".encode() for i in range(50)}


@pytest.fixture
def dataset(fill, aws):
    return S3Dataset(fill(OBJECTS), "d")


def test_a_dataset_is_map_style(dataset):
    assert len(dataset) == 50
    assert [dataset[i].data for i in (0, 49, -1)] == [b"body 0", b"body 49", b"body 49"]
    assert dataset[np.int64(3)].index == dataset[torch.tensor(3)].index == 3
    with pytest.raises(IndexError, match="sample 50 of 50"):
        dataset[50]
    with pytest.raises(TypeError):
        dataset["0"]


def test_iteration_by_index_ends(dataset):
    assert [found.index for found in dataset] == list(range(50))


def test_a_batch_is_in_the_order_asked_for_and_may_repeat(dataset):
    wanted = [7, 3, 7, 0, -1, 3]
    found = dataset.__getitems__(wanted)
    assert [each.index for each in found] == [7, 3, 7, 0, 49, 3]
    assert dataset.stats()["requests"] == 4
    assert dataset.__getitems__([]) == []


def test_a_batch_is_fetched_concurrently(fill, through_proxy, proxy):
    dataset = S3Dataset(fill(OBJECTS), "d", options=through_proxy)
    dataset[0]
    proxy.plan = lambda request: Fault(delay_s=0.2)
    before = proxy.most_connections
    dataset.__getitems__(range(16))
    assert proxy.most_connections >= max(before, 14)


def test_no_more_than_max_connections_are_used(fill, aws, proxy):
    proxy.drop_connections()
    dataset = S3Dataset(
        fill(OBJECTS), "d", options=S3Options(endpoint_url=proxy.endpoint_url, max_connections=3)
    )
    proxy.plan = lambda request: Fault(delay_s=0.02)
    started = proxy.connections
    dataset.__getitems__(range(30))
    assert proxy.connections - started <= 3


def test_a_sample_is_what_transform_makes_of_the_object(fill, aws):
    dataset = S3Dataset(fill(OBJECTS), "d", transform=lambda found: (found.key, len(found.data)))
    assert dataset[3] == ("d/003", 6)


def test_an_object_says_what_it_is(dataset):
    found = dataset[3]
    assert isinstance(found, S3Object)
    assert found.address == f"s3://{dataset.bucket}/d/003"
    assert "6 bytes" in repr(found)
    assert len(found.etag) == 32


def test_an_error_in_a_transform_is_the_users_own_with_a_note(fill, aws):
    def transform(found):
        raise KeyError("mine")

    dataset = S3Dataset(fill(OBJECTS), "d", transform=transform)
    with pytest.raises(KeyError, match="mine") as caught:
        dataset[3]
    assert f"s3://{dataset.bucket}/d/003 (sample 3)" in caught.value.__notes__[0]


def test_files_are_chosen_by_ending_or_by_function(fill, aws):
    bucket = fill(dict.fromkeys(["a.json", "b.JSON", "c.txt", "dir/"], b"x"))
    assert list(S3Dataset(bucket, extensions=".json").all_files) == ["a.json", "b.JSON"]
    chosen = S3Dataset(bucket, is_valid_file=lambda address: address == f"s3://{bucket}/c.txt")
    assert list(chosen.all_files) == ["c.txt"]
    with pytest.raises(ValueError, match="not both"):
        S3Dataset(bucket, extensions=".json", is_valid_file=bool)
    with pytest.raises(EmptyDatasetError, match="none of"):
        S3Dataset(bucket, extensions=".png")


def test_directory_markers_are_no_samples(fill, aws):
    bucket = fill({"d/": b"", "d/a": b"x", "d/e/": b""})
    assert list(S3Dataset(bucket, "d").all_files) == ["d/a"]


def test_a_pickled_dataset_reads_and_holds_no_secret(dataset, s3, caplog):
    dataset[0]
    with caplog.at_level(logging.DEBUG, "ddp_s3data"):
        data = pickle.dumps(dataset)
    for secret in (s3.secret_key, s3.access_key):
        assert secret.encode() not in data
        assert secret not in caplog.text
        assert secret not in repr(dataset)
    assert pickle.loads(data)[5].data == b"body 5"


def test_explicit_keys_travel_and_the_log_says_so(fill, s3, no_credentials, caplog):
    options = S3Options(access_key_id=s3.access_key, secret_access_key=s3.secret_key)
    dataset = S3Dataset(fill(OBJECTS), "d", options=options)
    assert s3.secret_key not in repr(dataset)
    with caplog.at_level(logging.WARNING, "ddp_s3data"):
        copy = pickle.loads(pickle.dumps(dataset))
    assert "keys that were given" in caplog.text
    assert copy[5].data == b"body 5"


def test_many_threads_may_read_one_dataset(dataset):
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda i: dataset[i % 50].data, range(200)))
    assert found == [f"body {i % 50}".encode() for i in range(200)]


def test_two_datasets_in_one_process_do_not_disturb_each_other(fill, aws):
    first = S3Dataset(fill({"a": b"1"}))
    second = S3Dataset(fill({"a": b"2"}))
    assert [each[0].data for each in (first, second, first)] == [b"1", b"2", b"1"]


def test_bytes_in_flight_are_bounded(fill, aws, proxy):
    bucket = fill({f"{i}": bytes(300_000) for i in range(8)})
    options = S3Options(endpoint_url=proxy.endpoint_url, inflight_bytes=500_000, hedge=False)
    dataset = S3Dataset(bucket, options=options)
    proxy.drop_connections()
    proxy.plan = lambda request: Fault(delay_s=0.01)
    before = proxy.connections
    assert [len(each.data) for each in dataset.__getitems__(range(8))] == [300_000] * 8
    assert proxy.connections - before == 1  # a second object would not fit


def test_an_object_larger_than_the_bound_is_read_alone(fill, aws):
    bucket = fill({f"{i}": bytes(300_000) for i in range(3)})
    dataset = S3Dataset(bucket, options=S3Options(inflight_bytes=1000))
    assert [len(each.data) for each in dataset.__getitems__([1, 2])] == [300_000] * 2


@pytest.fixture
def gap(dataset, admin):
    """The dataset, of which sample 5 is deleted after it was listed."""
    admin.delete_object(dataset.bucket, "d/005")
    return dataset


def test_a_bad_sample_raises_by_default_with_its_index(gap):
    with pytest.raises(ObjectNotFoundError) as caught:
        gap.__getitems__([4, 5, 6])
    assert caught.value.index == 5
    assert caught.value.address == f"s3://{gap.bucket}/d/005"


def test_a_bad_sample_is_replaced_by_the_next_good_one(gap):
    gap.on_error = "replace"
    assert [each.index for each in gap.__getitems__([4, 5, 6])] == [4, 6, 6]
    assert gap.stats()["replaced"] == 1


def test_a_function_may_stand_in_for_a_bad_sample(gap):
    gap.on_error = lambda error: error
    found = gap.__getitems__([4, 5])
    assert isinstance(found[1], S3DataError)


def test_too_many_bad_samples_are_an_error(gap):
    gap.on_error = "replace"
    gap.bad_sample_limit = 2
    gap.__getitems__([5, 5])
    with pytest.raises(BadSampleLimitError, match="bad_sample_limit=2"):
        gap[5]


@pytest.mark.parametrize("policy", ["replace", lambda error: None])
def test_an_outage_is_not_replaced_by_neighbours_that_fare_no_better(fill, aws, proxy, policy):
    options = S3Options(endpoint_url=proxy.endpoint_url, max_attempts=2)
    dataset = S3Dataset(fill(OBJECTS), "d", options=options, on_error=policy)
    proxy.plan = lambda request: Fault(status=500, code="InternalError")
    before = len(proxy.requests)
    with pytest.raises(TransferError):
        dataset[5]
    assert len(proxy.requests) == before + 2


def test_an_outage_among_the_neighbours_is_raised(fill, aws, proxy):
    options = S3Options(endpoint_url=proxy.endpoint_url, max_attempts=2)
    dataset = S3Dataset(fill(OBJECTS), "d", options=options, on_error="replace")
    gone = Fault(status=404, code="NoSuchKey")
    down = Fault(status=500, code="InternalError")
    proxy.plan = lambda request: gone if request.path.endswith("/005") else down
    with pytest.raises(TransferError, match="d/006"):
        dataset[5]


def test_a_wrong_policy_is_an_error_at_once(fill, aws):
    with pytest.raises(ValueError, match="'replace'"):
        S3Dataset(fill({"a": png(1)}), on_error="skip")


def test_statistics_say_what_was_read(dataset):
    assert dataset.stats()["limited_by"] == "nothing yet"
    dataset.__getitems__(range(50))
    stats = dataset.stats()
    assert (stats["requests"], stats["objects"], stats["samples"]) == (50, 50, 50)
    assert stats["bytes"] == sum(map(len, OBJECTS.values()))
    assert 0 < stats["latency_s"]["p50"] <= stats["latency_s"]["p99"] < 10
    assert stats["limited_by"] in ("network", "decode")
