"""Credentials, their end and their renewal; certificates; and where secrets must not appear."""

import datetime
import ipaddress
import logging
import pickle
import traceback

import pytest
from conftest import pixel
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from ddp_s3data import (
    EndpointError,
    S3DataError,
    S3DataLoader,
    S3Dataset,
    S3ImageFolder,
    S3Options,
)
from fault_proxy import Fault, FaultProxy


@pytest.fixture
def credentials(s3, no_credentials, tmp_path, monkeypatch):
    """A credentials file with the server's keys, and a function that writes others into it."""
    file = tmp_path / "credentials"

    def write(key, secret, section="default"):
        file.write_text(f"[{section}]\naws_access_key_id={key}\naws_secret_access_key={secret}\n")

    write(s3.access_key, s3.secret_key)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    return write


def refuse(key, code):
    """A plan that knows these keys no more."""

    def plan(request):
        old = f"Credential={key}/" in request.headers.get("authorization", "")
        return Fault(status=400, code=code) if old else None

    return plan


@pytest.mark.parametrize("code", ["ExpiredToken", "InvalidAccessKeyId"])
@pytest.mark.parametrize(("num_workers", "method"), [(0, None), (2, "fork"), (2, "spawn")])
def test_keys_that_expire_in_mid_epoch_are_read_anew_and_no_sample_is_lost(
    digits, s3, proxy, credentials, num_workers, method, code
):
    options = S3Options(endpoint_url=proxy.endpoint_url)
    folder = S3ImageFolder(digits, "train", transform=pixel, options=options)
    loader = S3DataLoader(
        folder,
        batch_size=4,
        shuffle=True,
        num_workers=num_workers,
        multiprocessing_context=method,
        lookahead=1,  # so that the larger part of the epoch is still to be read
    )
    seen = []
    for number, (pixels, _) in enumerate(loader):
        seen += pixels.tolist()
        if number == 2:
            credentials(s3.next_access_key, s3.next_secret_key)
            proxy.plan = refuse(s3.access_key, code)
    assert sorted(seen) == list(range(120))
    assert f"Credential={s3.next_access_key}/" in proxy.requests[-1].headers["authorization"]


def test_many_requests_that_find_keys_expired_together_renew_them_once(
    digits, s3, proxy, credentials
):
    options = S3Options(endpoint_url=proxy.endpoint_url)
    folder = S3ImageFolder(digits, "train", transform=pixel, options=options)
    folder[0]
    credentials(s3.next_access_key, s3.next_secret_key)
    proxy.plan = refuse(s3.access_key, "ExpiredToken")
    assert [p for p, _ in folder.__getitems__(range(60))] == [folder[i][0] for i in range(60)]
    assert 0 < folder.stats()["retries"]["expired"] <= 60
    before = folder.stats()["retries"]["expired"]
    folder.__getitems__(range(60, 120))
    assert folder.stats()["retries"]["expired"] == before


@pytest.mark.parametrize("transport", ["auto", "aiobotocore"])
def test_keys_come_from_the_environment_profiles_and_options(
    fill, s3, credentials, monkeypatch, transport
):
    bucket = fill({"a": b"x"})
    assert S3Dataset(bucket, options=S3Options(transport=transport))[0].data == b"x"
    credentials(s3.access_key, s3.secret_key, "mine")
    options = S3Options(profile="mine", transport=transport)
    assert S3Dataset(bucket, options=options)[0].data == b"x"
    monkeypatch.setenv("AWS_PROFILE", "mine")
    assert S3Dataset(bucket, options=S3Options(transport=transport))[0].data == b"x"
    monkeypatch.delenv("AWS_PROFILE")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3.next_access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3.next_secret_key)
    assert S3Dataset(bucket, options=S3Options(transport=transport))[0].data == b"x"


def test_addressing_decides_about_the_host(fill, through_proxy, proxy):
    bucket = fill({"a": b"x"})
    options = S3Options(endpoint_url=proxy.endpoint_url, addressing="path")
    assert S3Dataset(bucket, options=options)[0].data == b"x"
    assert proxy.requests[-1].path == f"/{bucket}/a"
    nowhere = "http://no-such-host.invalid"
    for addressing, host in (("path", "no-such"), ("virtual", f"{bucket}.no-such")):
        with pytest.raises(EndpointError, match=f"no address for '{host}-host.invalid'"):
            S3Dataset(bucket, options=S3Options(endpoint_url=nowhere, addressing=addressing))


# certificates


def certificate(name, key, issuer, issuer_key, *, is_authority):
    now = datetime.datetime.now(datetime.UTC)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    return (
        x509.CertificateBuilder()
        .subject_name(named(name))
        .issuer_name(named(issuer))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()),
            critical=False,
        )
        .sign(issuer_key, hashes.SHA256())
    )


def named(name):
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    """Paths of an authority's certificate, and of chain and key of a server that it vouches for."""
    root = tmp_path_factory.mktemp("certificates")
    ca_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    ca = certificate("tests", ca_key, "tests", ca_key, is_authority=True)
    server = certificate("server", key, "tests", ca_key, is_authority=False)
    pem = serialization.Encoding.PEM
    (root / "ca.pem").write_bytes(ca.public_bytes(pem))
    (root / "chain.pem").write_bytes(server.public_bytes(pem))
    (root / "key.pem").write_bytes(
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return str(root / "ca.pem"), (str(root / "chain.pem"), str(root / "key.pem"))


@pytest.fixture
def secure(s3, authority):
    with FaultProxy(s3.endpoint_url, certificate=authority[1]) as proxy:
        yield proxy


@pytest.mark.parametrize("transport", ["auto", "aiobotocore"])
def test_an_authority_of_ones_own_is_trusted_when_it_is_named(
    fill, aws, secure, authority, monkeypatch, transport
):
    bucket = fill({"a": b"x", "b": b"y"})
    url = secure.endpoint_url
    assert url.startswith("https://")
    with pytest.raises(EndpointError, match=r"certificate.*for a CA of your own set ca_bundle"):
        S3Dataset(bucket, options=S3Options(endpoint_url=url, transport=transport))
    options = S3Options(endpoint_url=url, transport=transport, ca_bundle=authority[0])
    assert [each.data for each in S3Dataset(bucket, options=options)] == [b"x", b"y"]
    with monkeypatch.context() as patch:
        patch.setenv("AWS_CA_BUNDLE", authority[0])
        options = S3Options(endpoint_url=url, transport=transport)
        assert [each.data for each in S3Dataset(bucket, options=options)] == [b"x", b"y"]


def test_workers_read_over_tls(digits, aws, secure, authority):
    options = S3Options(endpoint_url=secure.endpoint_url, ca_bundle=authority[0])
    folder = S3ImageFolder(digits, "train", transform=pixel, options=options)
    for method in ("fork", "spawn"):
        loader = S3DataLoader(folder, batch_size=20, num_workers=2, multiprocessing_context=method)
        assert sorted(p for pixels, _ in loader for p in pixels.tolist()) == list(range(120))


# secrets

FAULTS = [
    Fault(status=403, code="AccessDenied"),
    Fault(status=400, code="ExpiredToken"),
    Fault(status=403, code="SignatureDoesNotMatch"),
    Fault(status=404, code="NoSuchKey"),
    Fault(status=500, code="InternalError"),
    Fault(reset_after_bytes=1),
]


def test_explicit_keys_are_in_no_log_error_repr_or_statistics(
    fill, s3, proxy, no_credentials, caplog, capfd
):
    options = S3Options(
        endpoint_url=proxy.endpoint_url,
        access_key_id=s3.access_key,
        secret_access_key=s3.secret_key,
        max_attempts=2,
    )
    said = []
    with caplog.at_level(logging.DEBUG, "ddp_s3data"), caplog.at_level(logging.DEBUG, "asyncio"):
        dataset = S3Dataset(fill({"a.png": b"no image"}), options=options)
        for fault in FAULTS:
            proxy.plan = lambda request, fault=fault: fault
            with pytest.raises(S3DataError) as caught:
                dataset[0]
            error = caught.value
            said += [repr(error), str(error.__dict__), repr(error.__cause__)]
            said += traceback.format_exception(error)
            said.append(repr(pickle.dumps(error)))
        said += [repr(dataset), repr(options), repr(dataset.stats())]
    said += [caplog.text, *capfd.readouterr()]
    for text in said:
        assert s3.secret_key not in text
        assert s3.access_key not in text
