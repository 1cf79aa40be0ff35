import pytest

from ddp_s3data import S3DataLoader, S3Dataset, S3Options
from ddp_s3data._bench import Fetched, Settings, choose


def fetched(per_s, p50, p90, p99):
    return Fetched(per_s, 1e6, 0.0002, {"p50": p50, "p90": p90, "p99": p99}, {})


def test_more_latency_asks_for_more_connections_and_further_look_ahead():
    near = choose(fetched(2000, 0.005, 0.01, 0.02), decode_s=0.002, cores=8)
    far = choose(fetched(2000, 0.05, 0.1, 0.5), decode_s=0.002, cores=8)
    assert (near.num_workers, near.lookahead, near.max_connections) == (8, 2, 16)
    assert (far.num_workers, far.lookahead, far.max_connections) == (8, 5, 100)


def test_a_worker_needs_no_more_connections_than_its_decoding_uses():
    slow = choose(fetched(2000, 0.05, 0.1, 0.5), decode_s=0.02, cores=2)
    fast = choose(fetched(2000, 0.05, 0.1, 0.5), decode_s=0.002, cores=2)
    assert slow.max_connections < fast.max_connections


def test_objects_that_are_not_decoded_need_few_workers():
    assert choose(fetched(2000, 0.05, 0.1, 0.5), decode_s=0.0, cores=64).num_workers == 4


@pytest.mark.parametrize("latency_s", [0.0, 1000.0])
def test_settings_stay_within_reason(latency_s):
    chosen = choose(fetched(2000, latency_s, latency_s, latency_s), decode_s=0.002, cores=1)
    assert 16 <= chosen.max_connections <= 256
    assert 1 <= chosen.lookahead <= 8


def test_settings_are_shown_as_code_that_runs(digits, aws):
    call, _, options = str(Settings(0, 2, 32)).partition(" with ")
    made = eval(options, {"S3Options": S3Options})
    dataset = S3Dataset(digits, "train", _key, options=made)
    loader = eval(call, {"S3DataLoader": S3DataLoader, "dataset": dataset})
    assert [len(batch) for batch in loader] == [64, 56]


def _key(found):
    return found.key
