import random

import pytest
from conftest import png

from ddp_s3data import S3Dataset, S3Options
from ddp_s3data._hedges import Hedges
from fault_proxy import Fault


def test_nothing_is_late_before_something_is_known():
    assert Hedges(True).late_after_s == 2.0


def test_late_is_far_beyond_the_usual():
    hedges, draw = Hedges(True), random.Random(1)
    for _ in range(500):
        hedges.saw(draw.choices([0.04, 0.10, 0.48], [90, 9, 1])[0])
    assert 0.2 <= hedges.late_after_s < 0.48


def test_second_requests_are_few():
    hedges = Hedges(True)
    for _ in range(1000):
        hedges.saw(0.05)
    assert sum(hedges.take() for _ in range(1000)) <= 21
    assert not Hedges(False).take()


@pytest.mark.parametrize("hedge", [True, False])
def test_a_late_object_is_asked_for_twice_and_the_first_answer_wins(fill, aws, proxy, hedge):
    objects = {f"{i:03d}.png": png(i) for i in range(100)}
    options = S3Options(endpoint_url=proxy.endpoint_url, hedge=hedge)
    dataset = S3Dataset(fill(objects), options=options)
    dataset.__getitems__(range(100))
    proxy.script([Fault(delay_s=30.0 if hedge else 1.0)], path="/050.png")
    assert [found.data for found in dataset.__getitems__(range(100))] == list(objects.values())
    assert dataset.stats()["hedges"] == int(hedge)
    assert dataset[50].data == objects["050.png"]
