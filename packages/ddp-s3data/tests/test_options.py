import logging
import pickle

import pytest

from ddp_s3data import S3Options

SECRET = "the-secret-one"


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"addressing": "dns"}, "'path'"),
        ({"transport": "curl"}, "'auto'"),
        ({"access_key_id": "a"}, "together"),
        ({"session_token": "t"}, "needs access_key_id"),
        ({"anon": True, "access_key_id": "a", "secret_access_key": "b"}, "anon=True"),
        ({"endpoint_url": "localhost:9000"}, "http://"),
        ({"max_connections": 0}, "at least 1"),
        ({"deadline_s": 0}, "more than 0"),
        ({"cache_dir": ""}, "name a directory"),
        ({"cache_bytes": 0}, "at least 1"),
    ],
)
def test_a_wrong_option_is_an_error_at_construction(wrong, text):
    with pytest.raises(ValueError, match=text):
        S3Options(**wrong)


def test_keys_are_in_no_repr():
    options = S3Options(access_key_id="key-id", secret_access_key=SECRET, session_token=SECRET)
    assert SECRET not in repr(options)
    assert "key-id" not in repr(options)


def test_pickling_keys_that_were_given_says_so(caplog):
    options = S3Options(access_key_id="key-id", secret_access_key=SECRET)
    with caplog.at_level(logging.WARNING, "ddp_s3data"):
        assert pickle.loads(pickle.dumps(options)) == options
    assert "whoever reads the pickle" in caplog.text
    assert SECRET not in caplog.text


def test_pickling_options_without_keys_says_nothing(caplog):
    with caplog.at_level(logging.WARNING, "ddp_s3data"):
        assert pickle.loads(pickle.dumps(S3Options(region="eu-west-1"))).region == "eu-west-1"
    assert not caplog.text
