"""Checksums: what S3 keeps with an object, or its ETag where that is an MD5."""

import base64
import hashlib
import os
import zlib

import pytest

from ddp_s3data import S3Dataset, S3Options, TransferError
from ddp_s3data._contract import FaultError, Reply
from ddp_s3data._integrity import check
from fault_proxy import Fault

BODY = os.urandom(50_000)
MD5 = hashlib.md5(BODY).hexdigest()


def b64(digest):
    return base64.b64encode(digest).decode()


SUMS = {
    "crc32": b64(zlib.crc32(BODY).to_bytes(4, "big")),
    "sha1": b64(hashlib.sha1(BODY).digest()),
    "sha256": b64(hashlib.sha256(BODY).digest()),
}
# The check values of the catalogue of CRC algorithms (reveng), for b"123456789".
CRT_SUMS = {"crc32c": 0xE3069283.to_bytes(4, "big"), "crc64nvme": 0xAE8B14860A799888.to_bytes(8)}


def reply(body=BODY, **headers):
    return Reply(200, {name.replace("_", "-"): value for name, value in headers.items()}, body)


def flipped(body):
    return body[:-1] + bytes([body[-1] ^ 1])


def of(name, value, body=BODY, **more):
    return reply(body, **{f"x-amz-checksum-{name}": value}, **more)


@pytest.mark.parametrize("name", SUMS)
def test_a_body_is_compared_with_the_checksum_that_came(name):
    assert check(of(name, SUMS[name]))
    with pytest.raises(FaultError, match=f"body's {name} is .* where .* is stored") as caught:
        check(of(name, SUMS[name], flipped(BODY)))
    assert caught.value.cause == "checksum"


@pytest.mark.parametrize("name", CRT_SUMS)
def test_a_checksum_that_takes_awscrt_is_compared_where_it_is_installed(name):
    pytest.importorskip("awscrt")
    assert check(of(name, b64(CRT_SUMS[name]), b"123456789"))
    with pytest.raises(FaultError, match=name):
        check(of(name, b64(CRT_SUMS[name]), b"123456788"))


def test_an_etag_that_is_an_md5_will_do():
    assert check(reply(etag=f'"{MD5}"'))
    assert check(reply(etag=f'"{MD5}"', **{"x-amz-server-side-encryption": "AES256"}))
    with pytest.raises(FaultError, match="md5"):
        check(reply(flipped(BODY), etag=f'"{MD5}"'))


@pytest.mark.parametrize(
    "headers",
    [
        {"etag": f'"{MD5}-2"'},
        {"etag": f'"{MD5}"', "x-amz-server-side-encryption": "aws:kms"},
        {"etag": f'"{MD5}"', "x-amz-server-side-encryption-customer-algorithm": "AES256"},
        {"x-amz-checksum-sha256": "abc=-3"},
        {"x-amz-checksum-crc32": "AAAAAA==", "x-amz-checksum-type": "COMPOSITE"},
        {},
    ],
)
def test_what_says_nothing_of_the_whole_body_is_not_compared(headers):
    assert not check(reply(flipped(BODY), **headers))


def test_etags_of_directory_buckets_are_not_taken_for_md5():
    assert not check(reply(flipped(BODY), etag=f'"{MD5}"'), etag_is_md5=False)


@pytest.fixture
def checked(through_proxy, proxy):
    return S3Options(endpoint_url=proxy.endpoint_url, checksum=True)


@pytest.mark.parametrize("at", [0, 25_000, 49_999])
def test_a_flipped_bit_is_read_again_and_counted(fill, checked, proxy, at):
    dataset = S3Dataset(fill({"one.bin": BODY}), options=checked)
    proxy.script([Fault(corrupt_byte_at=at)] * 2, path="/one.bin")
    assert dataset[0].data == BODY
    assert dataset.stats()["retries"] == {"checksum": 2}
    assert dataset.stats()["unchecked"] == 0
    sent = proxy.requests[-1].headers
    assert sent["x-amz-checksum-mode"] == "ENABLED"
    assert sent["user-agent"] == "ddp-s3data"  # in our own way, not in aiobotocore's


def test_without_checksum_nobody_asks_and_nobody_sees(fill, through_proxy, proxy):
    dataset = S3Dataset(fill({"one.bin": BODY}), options=through_proxy)
    proxy.script([Fault(corrupt_byte_at=7)], path="/one.bin")
    assert dataset[0].data != BODY
    assert "x-amz-checksum-mode" not in proxy.requests[-1].headers


def test_an_object_that_never_matches_is_an_error_with_the_remedy(fill, checked, proxy):
    dataset = S3Dataset(fill({"one.bin": BODY}), options=checked)
    proxy.script([Fault(corrupt_byte_at=7)] * 4, path="/one.bin")
    with pytest.raises(
        TransferError, match=r"body's \w+ is .*; the object is damaged .*4 attempts"
    ):
        dataset[0]


def test_large_objects_are_checked_too(fill, checked, proxy):
    body = os.urandom(3_000_000)
    dataset = S3Dataset(fill({"one.bin": body}), options=checked)
    proxy.script([Fault(corrupt_byte_at=2_999_999)], path="/one.bin")
    assert dataset[0].data == body
    assert dataset.stats()["retries"] == {"checksum": 1}


def test_aiobotocores_way_checks_as_well(fill, through_proxy, proxy):
    options = S3Options(endpoint_url=proxy.endpoint_url, checksum=True, transport="aiobotocore")
    dataset = S3Dataset(fill({"one.bin": BODY}), options=options)
    proxy.script([Fault(corrupt_byte_at=7)], path="/one.bin")
    assert dataset[0].data == BODY
    assert dataset.stats()["retries"] == {"checksum": 1}


def test_only_what_was_checked_is_kept_on_disk(fill, through_proxy, proxy, tmp_path):
    options = S3Options(
        endpoint_url=proxy.endpoint_url, checksum=True, cache_dir=str(tmp_path / "cache")
    )
    dataset = S3Dataset(fill({"one.bin": BODY}), options=options)
    proxy.script([Fault(corrupt_byte_at=7)], path="/one.bin")
    assert [dataset[0].data, dataset[0].data] == [BODY, BODY]
    assert dataset.stats()["cached"] == 1
