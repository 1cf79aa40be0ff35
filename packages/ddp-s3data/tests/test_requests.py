"""What goes wrong on the way, made by the proxy in front of a real server."""

import os

import pytest
from conftest import png

from ddp_s3data import (
    AccessDeniedError,
    CredentialsError,
    EndpointError,
    ObjectArchivedError,
    ObjectNotFoundError,
    ReadDeadlineError,
    S3Dataset,
    S3Options,
    TransferError,
)
from fault_proxy import Fault

BODY = os.urandom(50_000)


@pytest.fixture
def one(fill, through_proxy):
    """A dataset of one object, with its first connection already open."""
    dataset = S3Dataset(fill({"d/one.bin": BODY}), "d", options=through_proxy)
    assert dataset[0].data == BODY
    return dataset


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        (Fault(reset_after_bytes=1000), "truncated"),
        (Fault(truncate_after_bytes=1000), "truncated"),
        (Fault(truncate_after_bytes=0), "truncated"),
        (Fault(empty=True), "empty"),
        (Fault(hang_up=True), "stale"),
        (Fault(status=500, code="InternalError"), "server"),
        (Fault(status=503), "slow_down"),
    ],
)
def test_a_passing_fault_is_retried_and_counted(one, proxy, fault, cause):
    proxy.script([fault], path="/one.bin")
    assert one[0].data == BODY
    assert one.stats()["retries"] == {cause: 1}


def test_a_storm_of_slow_down_passes(one, proxy):
    proxy.script([Fault(status=503)] * 4, path="/one.bin")
    assert one[0].data == BODY
    assert one.stats()["retries"] == {"slow_down": 4}


def test_a_stalled_body_is_given_up_and_asked_for_again(fill, through_proxy, proxy):
    options = S3Options(endpoint_url=proxy.endpoint_url, stall_timeout_s=0.3)
    dataset = S3Dataset(fill({"one.bin": BODY}), options=options)
    proxy.script([Fault(stall_after_bytes=10)], path="/one.bin")
    assert dataset[0].data == BODY
    assert dataset.stats()["retries"] == {"stalled": 1}


def test_faults_without_end_are_an_error_that_tells_all(fill, through_proxy, proxy):
    options = S3Options(endpoint_url=proxy.endpoint_url, max_attempts=3)
    bucket = fill({"one.bin": BODY})
    dataset = S3Dataset(bucket, options=options)
    proxy.plan = lambda request: Fault(status=500, code="InternalError")
    with pytest.raises(TransferError) as caught:
        dataset[0]
    error = caught.value
    assert f"reading s3://{bucket}/one.bin: InternalError (500)" in str(error)
    assert "request id FAULTPROXY" in str(error)
    assert (error.index, error.attempts, error.request_id) == (0, 3, "FAULTPROXY")


def test_the_deadline_ends_an_object_that_does_not_come(fill, through_proxy, proxy):
    options = S3Options(endpoint_url=proxy.endpoint_url, deadline_s=0.5)
    dataset = S3Dataset(fill({"one.bin": BODY}), options=options)
    proxy.plan = lambda request: Fault(status=503)
    with pytest.raises(ReadDeadlineError, match=r"deadline_s=0.5 .* SlowDown; .*max_connections"):
        dataset[0]


def test_a_stall_is_bounded_by_the_deadline(fill, through_proxy, proxy):
    options = S3Options(endpoint_url=proxy.endpoint_url, deadline_s=0.5)
    dataset = S3Dataset(fill({"one.bin": BODY}), options=options)
    proxy.plan = lambda request: Fault(stall_after_bytes=10)
    with pytest.raises(ReadDeadlineError, match="deadline_s"):
        dataset[0]


def test_a_deleted_object_is_not_found_and_not_retried(one, proxy, admin):
    admin.delete_object(one.bucket, "d/one.bin")
    before = len(proxy.requests)
    with pytest.raises(ObjectNotFoundError, match="deleted after it was listed"):
        one[0]
    assert len(proxy.requests) == before + 1


def test_a_replaced_object_is_read_as_it_is_now_and_counted(one, admin):
    admin.put(one.bucket, {"d/one.bin": b"new"})
    assert one[0].data == b"new"
    assert one.stats()["changed"] == 1


def test_an_object_that_is_empty_now_is_read_as_empty(one, admin):
    admin.put(one.bucket, {"d/one.bin": b""})
    assert one[0].data == b""


def test_an_empty_object_is_no_fault(fill, aws):
    dataset = S3Dataset(fill({"empty": b""}))
    assert dataset[0].data == b""
    assert dataset.stats()["retries"] == {}


def test_a_forbidden_object_names_the_permission(one, proxy):
    proxy.script([Fault(status=403, code="AccessDenied")], path="/one.bin")
    with pytest.raises(AccessDeniedError, match=r"s3:GetObject; .*anon=True"):
        one[0]


def test_an_archived_object_says_restore(one, proxy):
    proxy.script([Fault(status=403, code="InvalidObjectState")], path="/one.bin")
    with pytest.raises(ObjectArchivedError, match="restore it"):
        one[0]


def test_an_expired_token_without_a_newer_one_is_a_clear_error(one, proxy):
    proxy.script([Fault(status=400, code="ExpiredToken")], path="/one.bin")
    with pytest.raises(CredentialsError, match="no newer"):
        one[0]


def test_rewritten_credentials_are_taken_when_the_old_ones_expire(
    fill, s3, proxy, no_credentials, tmp_path, monkeypatch
):
    file = tmp_path / "credentials"

    def write(key, secret):
        file.write_text(f"[default]\naws_access_key_id={key}\naws_secret_access_key={secret}\n")

    write(s3.access_key, s3.secret_key)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    bucket = fill({"one.bin": BODY})
    dataset = S3Dataset(bucket, options=S3Options(endpoint_url=proxy.endpoint_url))
    assert dataset[0].data == BODY
    write(s3.access_key, s3.secret_key + "x")  # stands for the credentials of the next hour
    proxy.script([Fault(status=400, code="ExpiredToken")], path="/one.bin")
    with pytest.raises(CredentialsError, match="SignatureDoesNotMatch"):
        dataset[0]  # they were used: the server does not know them


def test_another_region_is_followed_once(one, proxy):
    elsewhere = Fault(
        status=301, code="PermanentRedirect", headers=(("x-amz-bucket-region", "eu-west-1"),)
    )
    proxy.script([elsewhere], path="/one.bin")
    assert one[0].data == BODY
    scope = proxy.requests[-1].headers["authorization"]
    assert "/eu-west-1/s3/" in scope
    assert one.stats()["retries"] == {"region": 1}


def test_a_wrong_clock_is_corrected_by_the_servers(one, proxy):
    ahead = Fault(
        status=403,
        code="RequestTimeTooSkewed",
        headers=(("date", "Tue, 01 Jan 2036 00:00:00 GMT"),),
    )
    proxy.script([ahead, Fault(status=403, code="RequestTimeTooSkewed")], path="/one.bin")
    with pytest.raises(Exception, match="clock of this machine"):
        one[0]
    assert proxy.requests[-1].headers["x-amz-date"].startswith("20360101T0000")


def test_nobody_at_the_endpoint_is_a_clear_error(aws):
    with pytest.raises(EndpointError, match=r"127.0.0.1:1: .*check endpoint_url"):
        S3Dataset("bucket", options=S3Options(endpoint_url="http://127.0.0.1:1"))


def test_an_unknown_host_is_a_clear_error(aws):
    with pytest.raises(EndpointError, match=r"no address for .*check endpoint_url"):
        S3Dataset("bucket", options=S3Options(endpoint_url="http://no-such-host.invalid"))


def test_https_to_a_plain_server_is_a_clear_error(aws, s3):
    secure = s3.endpoint_url.replace("http:", "https:")
    with pytest.raises(EndpointError, match="https"):
        S3Dataset("bucket", options=S3Options(endpoint_url=secure))


def test_faults_in_aiobotocores_way_are_the_same_faults(fill, aws, proxy):
    options = S3Options(endpoint_url=proxy.endpoint_url, transport="aiobotocore")
    dataset = S3Dataset(fill({"one.bin": BODY}), options=options)
    assert dataset[0].data == BODY
    faults = [
        Fault(reset_after_bytes=1000),
        Fault(truncate_after_bytes=10),
        Fault(empty=True),
        Fault(status=500, code="InternalError"),
    ]
    for fault in faults:
        proxy.script([fault], path="/one.bin")
        assert dataset[0].data == BODY
    assert sum(dataset.stats()["retries"].values()) == len(faults)


def test_requester_pays_is_said(fill, aws, proxy):
    options = S3Options(endpoint_url=proxy.endpoint_url, requester_pays=True)
    dataset = S3Dataset(fill({"one.png": png(1)}), options=options)
    assert len(dataset[0].data) == len(png(1))
    assert {request.headers.get("x-amz-request-payer") for request in proxy.requests} == {
        "requester"
    }
