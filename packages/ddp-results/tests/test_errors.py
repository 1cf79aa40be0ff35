from __future__ import annotations

import pickle

import pytest

from ddp_results import errors

KINDS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, errors.ResultsError)
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_error_is_pickled_and_rebuilt_from_its_text(kind: type[errors.ResultsError]) -> None:
    error = kind("what was done, to what; what to do")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert str(copy) == str(error) == str(type(error)(str(error)))


def test_data_of_errors_survives_pickling() -> None:
    assert pickle.loads(pickle.dumps(errors.SinkError("x", transient=True))).transient
    missing = {"rank 0": [(1, 2), (5, None)]}
    error = errors.MissingRecordsError("x", missing=missing)
    assert pickle.loads(pickle.dumps(error)).missing == missing
