import pickle

import pytest

from ddp_s3data import CredentialsError, S3Dataset, S3Options
from ddp_s3data._routes import Route, exported, imported, known_route, remember_route

ROUTE = Route("host", 80, "host", "/bucket/", False, "us-east-1", ())


def test_a_route_is_known_until_the_settings_change(monkeypatch):
    options = S3Options(region="of-this-test")
    assert known_route("b", options) is None
    remember_route("b", options, ROUTE)
    assert known_route("b", options) == ROUTE
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://elsewhere")
    assert known_route("b", options) is None


def test_a_route_travels_with_a_pickle_and_holds_no_secret(monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "the-secret-one")
    options = S3Options(region="of-that-test")
    remember_route("b", options, ROUTE)
    data = pickle.dumps(exported("b", options))
    assert b"the-secret-one" not in data
    imported("c", options, pickle.loads(data))
    assert known_route("c", options) == ROUTE


def test_keys_corrected_in_the_environment_are_taken_at_once(fill, aws, s3, monkeypatch):
    bucket = fill({"a": b"x"})
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "mistyped")
    with pytest.raises(CredentialsError):
        S3Dataset(bucket)
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    with pytest.raises(CredentialsError, match="no AWS credentials"):
        S3Dataset(bucket)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3.secret_key)
    assert S3Dataset(bucket)[0].data == b"x"


def test_a_copy_reads_by_the_route_without_a_client(fill, aws):
    copy = pickle.loads(pickle.dumps(S3Dataset(fill({"a": b"x"}))))
    assert known_route(copy.bucket, copy.options) is not None
    assert copy[0].data == b"x"
