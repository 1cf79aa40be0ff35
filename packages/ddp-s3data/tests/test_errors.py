import pickle

import pytest
from torch._utils import ExceptionWrapper

import ddp_s3data.errors as errors

KINDS = [getattr(errors, name) for name in errors.__all__]


@pytest.mark.parametrize("kind", KINDS)
def test_every_error_survives_pickle_with_its_facts(kind):
    error = kind("what; do", address="s3://b/k", index=7, attempts=3, request_id="r", code="c")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert str(copy) == str(error) == "what; do"
    assert (copy.address, copy.index, copy.attempts) == ("s3://b/k", 7, 3)
    assert (copy.request_id, copy.code) == ("r", "c")


@pytest.mark.parametrize("kind", KINDS)
def test_every_error_is_rebuilt_by_torch_from_its_text(kind):
    try:
        raise kind("what; do", address="s3://b/k")
    except errors.S3DataError as error:
        wrapped = ExceptionWrapper((type(error), error, error.__traceback__))
    with pytest.raises(kind, match="what; do"):
        wrapped.reraise()


@pytest.mark.parametrize("kind", KINDS)
def test_every_error_has_one_root_and_says_when_it_is_raised(kind):
    assert issubclass(kind, errors.S3DataError)
    assert kind.__doc__
    assert kind is errors.S3DataError or kind.__doc__.startswith("Raised when")


def test_errors_are_also_what_a_user_of_files_expects():
    assert issubclass(errors.EmptyDatasetError, FileNotFoundError)
    assert issubclass(errors.ObjectNotFoundError, FileNotFoundError)
    assert issubclass(errors.AccessDeniedError, PermissionError)
    assert issubclass(errors.ReadDeadlineError, TimeoutError)
