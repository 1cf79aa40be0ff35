import datetime

import pytest
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from ddp_s3data._address import quote_key
from ddp_s3data._sigv4 import Keys, Signer

NOW = datetime.datetime(2026, 3, 1, 12, 30, 5, tzinfo=datetime.UTC)
ID, SECRET = "an-id", "not+a/secret"
KEYS = ["a.png", "a b/ü+~%&=@:,;'(é)!*.bin", "日本語/ключ", "a//b/../c", "x" * 900]


def botocores(path, query, token, headers):
    """What botocore signs at its own time, and the date it used."""
    request = AWSRequest("GET", f"https://host.example{path}?{query}".rstrip("?"), headers=headers)
    request.context["timestamp"] = ""
    S3SigV4Auth(Credentials(ID, SECRET, token), "s3", "eu-central-1").add_auth(request)
    return request.headers["Authorization"], request.headers["X-Amz-Date"]


@pytest.mark.parametrize("token", [None, "session/token=="])
@pytest.mark.parametrize("payer", [False, True])
@pytest.mark.parametrize("key", KEYS)
def test_the_signature_is_botocores(key, payer, token):
    extra = (("x-amz-request-payer", "requester"),) if payer else ()
    path = "/bucket/" + quote_key(key)
    wanted, date = botocores(path, "", token, dict(extra))
    signer = Signer(Keys(ID, SECRET, token), "eu-central-1", "host.example", extra)
    assert signer.authorization(path, "", date) == wanted


def test_the_signature_covers_the_query():
    query = "encoding-type=url&list-type=2&prefix=a%20b%2F"
    wanted, date = botocores("/bucket/", query, None, {})
    signer = Signer(Keys(ID, SECRET), "eu-central-1", "host.example")
    assert signer.authorization("/bucket/", query, date) == wanted


def test_the_signing_key_changes_with_the_day():
    signer = Signer(Keys(ID, SECRET), "eu-central-1", "host.example")
    late = NOW.replace(hour=23, minute=59, second=59).timestamp()
    before, after = signer.headers("/k", now=late), signer.headers("/k", now=late + 1)
    assert "20260301/eu-central-1" in before
    assert "20260302/eu-central-1" in after
    fresh = Signer(Keys(ID, SECRET), "eu-central-1", "host.example")
    assert fresh.headers("/k", now=late + 1) == after


def test_a_corrected_clock_is_used():
    signer = Signer(Keys(ID, SECRET), "eu-central-1", "host.example")
    wanted = signer.headers("/k", now=NOW.timestamp() + 3600)
    signer.clock_offset_s = 3600
    assert signer.headers("/k", now=NOW.timestamp()) == wanted


def test_keys_are_in_no_repr():
    assert SECRET not in repr(Keys(ID, SECRET, SECRET))
