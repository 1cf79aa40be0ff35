from __future__ import annotations

import pickle

import pytest

from ddp_core import errors

KINDS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, errors.DDPCoreError)
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.__name__)
def test_every_error_survives_pickling_and_rebuilding(kind: type[errors.DDPCoreError]) -> None:
    cause = pickle.dumps(ValueError("boom"))
    error = kind("text", rank=3, host="h", cause=cause, cause_text="Traceback: x", results={1: 2})
    error.add_note("and more")
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), copy.rank, copy.results) == (kind, "text", 3, {1: 2})
    assert copy.__notes__ == ["and more"]
    assert repr(copy.__cause__) == "ValueError('boom')"
    assert "Traceback: x" in str(copy.__cause__.__cause__)
    assert str(kind("text")) == "text"


def test_a_cause_that_cannot_be_rebuilt_leaves_its_traceback() -> None:
    error = errors.RankFailedError("text", cause=b"garbage", cause_text="Traceback: y")
    assert isinstance(error.__cause__, errors.RemoteTraceback)
    assert "Traceback: y" in str(error.__cause__)
