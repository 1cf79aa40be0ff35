import io
import itertools

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from ddp_s3data import S3DataLoader

DATA = TensorDataset(torch.arange(50))


def loader(**settings):
    return S3DataLoader(DATA, batch_size=4, **settings)


def numbers(batches):
    return [batch[0].tolist() for batch in batches]


CASES = [
    *itertools.product([0, 1, 5, 12], [False, True], [False, True], [0]),
    (5, False, False, 1),
    (5, True, False, 1),
]


@pytest.mark.parametrize(("taken", "shuffle", "own_generator", "num_workers"), CASES)
def test_a_loader_goes_on_where_another_stopped(taken, shuffle, own_generator, num_workers):
    def made():
        generator = torch.Generator().manual_seed(torch.randint(1000, ()).item())
        settings = {"generator": generator} if own_generator else {}
        return loader(shuffle=shuffle, num_workers=num_workers, **settings)

    torch.manual_seed(5)
    first = made()
    batches = iter(first)
    head = numbers(next(batches) for _ in range(taken))
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    rest = numbers(batches)
    assert sorted(n for batch in head + rest for n in batch) == list(range(50))

    torch.manual_seed(99)
    second = made()
    file.seek(0)
    second.load_state_dict(torch.load(file, weights_only=True))
    resumed = numbers(second)
    if taken or not shuffle:
        assert resumed == rest
    assert len(numbers(second)) == 13  # the next epoch is whole


def test_a_resumed_loader_does_not_disturb_others_randomness():
    torch.manual_seed(1)
    first = loader(shuffle=True)
    next(iter(first))
    state = first.state_dict()
    torch.manual_seed(7)
    wanted = (torch.empty((), dtype=torch.int64).random_(), torch.rand(3))[1]
    torch.manual_seed(7)
    second = loader(shuffle=True)
    second.load_state_dict(state)
    next(iter(second))  # draws its base seed, as any loader
    assert torch.equal(torch.rand(3), wanted)


def test_epochs_count_on():
    one = loader()
    assert one.state_dict() == {"epoch": 0, "batches": 0, "generator": None}
    list(one)
    assert one.state_dict()["epoch"] == 1
    next(iter(one))
    assert (one.state_dict()["epoch"], one.state_dict()["batches"]) == (1, 1)
    next(iter(one))  # the one before was broken off: this is the next epoch
    assert (one.state_dict()["epoch"], one.state_dict()["batches"]) == (2, 1)
    one.set_epoch(7)
    list(one)
    assert one.state_dict()["epoch"] == 8


def test_a_state_of_something_else_is_an_error():
    with pytest.raises(ValueError, match="no state of an S3DataLoader"):
        loader().load_state_dict({"step": 1})


def test_the_iterator_is_otherwise_torchs():
    ours, theirs = iter(loader()), iter(DataLoader(DATA, batch_size=4))
    assert len(ours) == len(theirs)
    assert ours._num_workers == 0
