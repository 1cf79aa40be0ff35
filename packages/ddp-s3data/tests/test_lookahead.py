import itertools
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, SequentialSampler

from ddp_s3data._lookahead import Batch, Depth, LookAheadSampler


@given(st.integers(0, 60), st.integers(1, 5), st.integers(1, 4), st.integers(1, 3))
def test_each_batch_carries_what_the_same_worker_gets_next(count, size, stride, depth):
    batches = list(BatchSampler(SequentialSampler(range(count)), size, drop_last=False))
    dealt = list(LookAheadSampler(batches, stride, depth))
    assert dealt == batches
    for place, batch in enumerate(dealt):
        later = batches[place + stride : place + stride * depth + 1 : stride]
        assert list(batch.ahead) == later
    assert len({batch.lane for batch in dealt}) <= 1


def test_two_iterations_have_two_lanes():
    sampler = LookAheadSampler([[1], [2]], 1, 1)
    assert {batch.lane for batch in sampler} != {batch.lane for batch in sampler}


def test_the_wrapped_sampler_shows_through():
    inner = BatchSampler(SequentialSampler(range(10)), 3, drop_last=True)
    sampler = LookAheadSampler(inner, 2, 2)
    assert len(sampler) == 3
    assert sampler.batch_size == 3
    with pytest.raises(AttributeError):
        _ = sampler.nothing


def test_an_endless_sampler_is_not_read_to_its_end():
    def endless():
        while True:
            yield [1, 2]

    iterator = iter(LookAheadSampler(endless(), 3, 4))
    assert [next(iterator) for _ in range(50)] == [[1, 2]] * 50


def test_a_batch_survives_the_index_queue():
    batch = pickle.loads(pickle.dumps(Batch([1, 2], ([3], [4]), 7)))
    assert (batch, batch.ahead, batch.lane) == ([1, 2], ([3], [4]), 7)
    assert isinstance(batch, list)


def test_depth_rises_while_readers_wait():
    depth = Depth(4)
    for _ in range(10):
        depth.saw(waited_s=0.5, took_s=1.0)
    assert depth.now == 4


def test_depth_falls_to_zero_while_nothing_waits():
    depth = Depth(4)
    depth.now = 4
    for _ in range(4 * Depth.PATIENCE):
        depth.saw(waited_s=0.0, took_s=1.0)
    assert depth.now == 0


def test_depth_tries_less_and_less_often_to_fall_when_that_was_wrong():
    depth = Depth(4)
    falls = []
    for step in range(1000):
        depth.saw(waited_s=0.0 if depth.now >= 2 else 0.5, took_s=1.0)
        if depth.now < 2:
            falls.append(step)
    gaps = [after - before for before, after in itertools.pairwise(falls[1:])]
    assert gaps == sorted(gaps)
    assert gaps[-1] >= Depth.MOST_PATIENCE / 2


def test_depth_may_start_where_another_stopped():
    assert Depth(4).now == 1
    assert Depth(4, 3).now == 3
    assert Depth(2, 3).now == 2
