import threading
import time

import pytest
from conftest import pixel, png
from torch.utils.data import DataLoader, Subset

from ddp_s3data import DecodeError, S3DataLoader, S3Dataset, S3ImageFolder
from ddp_s3data._contract import Reply
from ddp_s3data._decoding import made
from ddp_s3data._lookahead import Batch

PATIENCE_S = 30


def replies(count, size=1):
    return [(place, Reply(200, {}, bytes(size))) for place in range(count)]


@pytest.mark.parametrize("threads", [0, 1, 3])
def test_samples_come_in_the_order_of_what_was_read(threads):
    def make(place, reply):
        time.sleep(0.001 * (place % 3))
        return place

    assert [(place, take()) for place, take in made(replies(30), make, threads)] == [
        (place, place) for place in range(30)
    ]


def test_without_threads_a_sample_is_made_when_it_is_taken():
    begun = []
    attempts = made(replies(3), lambda place, reply: begun.append(place), 0)
    next(attempts)
    assert begun == []


def test_as_many_samples_as_threads_are_made_at_once():
    barrier = threading.Barrier(3)

    def make(place, reply):
        barrier.wait(PATIENCE_S)
        return threading.current_thread().name

    names = {take() for _, take in made(replies(3), make, 3)}
    assert len(names) == 3
    assert all(name.startswith("ddp-") for name in names)


def test_threads_take_no_more_than_twice_their_number_ahead():
    taken = []

    def found():
        for place, reply in replies(20):
            taken.append(place)
            yield place, reply

    attempts = made(found(), lambda place, reply: place, 2)
    next(attempts)
    assert len(taken) == 5  # four wait for the caller, the fifth made room by the first
    attempts.close()


def test_threads_take_large_objects_one_by_one():
    """So that no more than 16 MiB and one object are beyond the limit of bytes in flight."""
    taken = []

    def found():
        for place, reply in replies(4, size=20 << 20):
            taken.append(place)
            yield place, reply

    attempts = made(found(), lambda place, reply: place, 4)
    next(attempts)
    assert len(taken) == 2
    attempts.close()


def test_closing_waits_for_what_runs_and_begins_nothing_more():
    running, done = threading.Event(), threading.Event()
    begun = []

    def make(place, reply):
        begun.append(place)
        if place:
            running.set()
            done.wait(PATIENCE_S)
        return place

    attempts = made(replies(8), make, 2)
    next(attempts)
    assert running.wait(PATIENCE_S)
    threading.Timer(0.1, done.set).start()
    attempts.close()
    assert done.is_set()
    assert set(begun) <= {0, 1, 2}


@pytest.fixture
def folder(digits, aws):
    return S3ImageFolder(digits, "train", transform=pixel)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_batches_made_in_threads_are_the_same(folder, num_workers):
    settings = {"batch_size": 7, "num_workers": num_workers}
    wanted = [batch[0].tolist() for batch in DataLoader(folder, batch_size=7)]
    loader = S3DataLoader(folder, decode_threads=3, **settings)
    for _ in range(2):
        assert [batch[0].tolist() for batch in loader] == wanted


def _thread_name(found):
    return threading.current_thread().name


def test_parts_are_made_in_threads_too(digits, aws):
    part = Subset(S3Dataset(digits, "train", _thread_name), range(8))
    (names,) = S3DataLoader(part, batch_size=8, decode_threads=2)
    assert all(name.startswith("ddp-s3data-decode") for name in names)


@pytest.fixture
def with_a_text(fill, aws):
    bucket = fill({**{f"c/{n:02d}.png": png(n) for n in range(9)}, "c/04.png": b"no image"})
    return S3ImageFolder(bucket, transform=pixel)


def batch(indices):
    return Batch(indices, threads=2)


def test_an_error_in_a_thread_names_key_and_index(with_a_text):
    with pytest.raises(DecodeError) as caught:
        with_a_text.__getitems__(batch(range(9)))
    assert caught.value.index == 4
    assert caught.value.address == f"s3://{with_a_text.bucket}/c/04.png"


def test_a_bad_sample_in_a_thread_is_replaced(with_a_text):
    with_a_text.on_error = "replace"
    found = [value for value, _ in with_a_text.__getitems__(batch(range(9)))]
    assert found == [0, 1, 2, 3, 5, 5, 6, 7, 8]


def test_an_error_of_a_transform_in_a_thread_is_the_users_own_with_a_note(digits, aws):
    def transform(image):
        raise ZeroDivisionError("mine")

    folder = S3ImageFolder(digits, "train", transform=transform)
    with pytest.raises(ZeroDivisionError, match="mine") as caught:
        folder.__getitems__(batch([5, 6]))
    assert "sample 5" in caught.value.__notes__[0]


def test_a_wrong_number_of_threads_is_an_error(folder):
    with pytest.raises(ValueError, match="decode_threads"):
        S3DataLoader(folder, decode_threads=-1)
