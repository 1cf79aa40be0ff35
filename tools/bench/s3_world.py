"""The server, the proxies and the objects of the benchmark, all real, all on this machine."""

from __future__ import annotations

import datetime
import importlib
import ipaddress
import os
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from fault_proxy import FaultProxy, latency
from real_images import photographs
from s3_server import S3Server

BUCKET = "bench"
SMALL_BYTES = 16 * 1024
_PHOTOGRAPHS, _COPIES = 512, 4
_CACHE_MB = 256  # all images: the local disk has them in the page cache too


@dataclass(frozen=True)
class Objects:
    """Keys by what they are for."""

    images: list[str]
    small: list[str]
    many: list[str]
    large: list[str]


class World:
    """SeaweedFS with images, small, many and large objects, plain, slow, and behind TLS.

    Attributes:
        plain: address of the server itself.
        slow: address of a proxy with the latency of an S3 region.
        secure: address of a proxy that speaks TLS; None without the package cryptography.
        local: directory with the same images.
        objects: keys.
    """

    def __init__(self, many: int, large: int, large_bytes: int) -> None:
        self._counts = many, large, large_bytes
        self._stack = ExitStack()
        self.plain = self.slow = ""
        self.secure: str | None = None
        self.ca = ""

    def __enter__(self) -> Self:
        with self._stack as stack:
            self.directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            self._server = stack.enter_context(S3Server(cache_mb=_CACHE_MB))
            self.plain = self._server.endpoint_url
            slow = stack.enter_context(FaultProxy(self.plain, record=False))
            slow.plan = latency(seed=1)
            self.slow = slow.endpoint_url
            certificate = _certificate(self.directory)
            if certificate is not None:
                self.ca, *served = certificate
                secure = FaultProxy(self.plain, certificate=(served[0], served[1]), record=False)
                self.secure = stack.enter_context(secure).endpoint_url
            self.objects = self._fill()
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    @property
    def pids(self) -> list[int]:
        """The processes of the server and of the proxies: this one."""
        return [self._server.pid, os.getpid()]

    @property
    def local(self) -> str:
        """The directory of the images."""
        return str(self.directory / "images")

    def environment(self, endpoint_url: str) -> dict[str, str]:
        """Return the environment of a client that reaches the server by this address."""
        aws = self._server.environment()
        region = aws["AWS_DEFAULT_REGION"]
        trust = {"AWS_CA_BUNDLE": self.ca, "SSL_CERT_FILE": self.ca} if self.ca else {}
        return {
            **{name: value for name, value in os.environ.items() if not name.startswith("AWS_")},
            **aws,
            **(trust if endpoint_url.startswith("https") else {}),
            "AWS_ENDPOINT_URL": endpoint_url,
            "AWS_REGION": region,
            "LITDATA_RAW_CACHE": str(self.directory / "litdata"),
            "OMP_NUM_THREADS": "1",
        }

    def _fill(self) -> Objects:
        many, large, large_bytes = self._counts
        photos = photographs(_PHOTOGRAPHS, 500, 375, quality=90)
        images = {
            f"images/{name.replace('.', f'-{copy}.')}": body
            for name, body in photos.items()
            for copy in range(_COPIES)
        }
        for name, body in images.items():
            path = self.directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(body)
        small = {f"small/{n:04d}": os.urandom(SMALL_BYTES) for n in range(256)}
        listed = {f"many/c{n % 10}/{n:06d}.jpg": b"x" for n in range(many)}
        huge = {f"large/{n}": bytes(large_bytes) for n in range(large)}
        self._server.create_bucket(BUCKET)
        for objects in (images, small, listed, huge):
            self._server.put_objects(BUCKET, objects)
        return Objects(*(sorted(each) for each in (images, small, listed, huge)))


def _certificate(directory: Path) -> tuple[str, str, str] | None:
    """Make a CA and a certificate for 127.0.0.1; return the files of CA, certificate and key."""
    try:
        x509: Any = importlib.import_module("cryptography.x509")
        hazmat = "cryptography.hazmat.primitives"
        hashes: Any = importlib.import_module(f"{hazmat}.hashes")
        ec: Any = importlib.import_module(f"{hazmat}.asymmetric.ec")
        forms: Any = importlib.import_module(f"{hazmat}.serialization")
    except ModuleNotFoundError:
        return None
    now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
    names = [
        x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, f"benchmark {role}")])
        for role in ("CA", "server")
    ]
    keys = [ec.generate_private_key(ec.SECP256R1()) for _ in names]

    def signed(role: int, *extensions: Any) -> bytes:
        builder = x509.CertificateBuilder(
            names[0], names[role], keys[role].public_key(), x509.random_serial_number()
        ).not_valid_before(now - day)
        builder = builder.not_valid_after(now + day)
        for extension in extensions:
            builder = builder.add_extension(extension, critical=False)
        made: bytes = builder.sign(keys[0], hashes.SHA256()).public_bytes(forms.Encoding.PEM)
        return made

    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    secret = keys[1].private_bytes(
        forms.Encoding.PEM, forms.PrivateFormat.PKCS8, forms.NoEncryption()
    )
    bodies = {
        "ca.pem": signed(0, x509.BasicConstraints(ca=True, path_length=None)),
        "server.pem": signed(1, address, x509.BasicConstraints(ca=False, path_length=None)),
        "key.pem": secret,
    }
    for name, body in bodies.items():
        (directory / name).write_bytes(body)
    ca, server, key = (str(directory / name) for name in bodies)
    return ca, server, key
