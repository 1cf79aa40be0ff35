"""Whether the bytes that came are those that were stored, by what the server says of them.

S3 keeps a checksum with each object and sends it to who asks for it ("Checking object integrity",
Amazon S3 User Guide). Without one, the ETag of an object that was stored in one piece and is not
encrypted by KMS or with a customer's key is its MD5 (see `Object` in the API reference).
"""

from __future__ import annotations

import base64
import hashlib
import re
import zlib
from collections.abc import Callable
from functools import cache
from importlib import import_module

from ._contract import FaultError, Reply

ASK = ("x-amz-checksum-mode", "ENABLED")
"""The header that asks for checksums."""

_MD5 = re.compile("[0-9a-f]{32}")
_Digest = Callable[[bytes], bytes]


def check(reply: Reply, *, etag_is_md5: bool = True) -> bool:
    """Compare the body with the quickest checksum that came with it.

    Args:
        reply: a whole object.
        etag_is_md5: False for buckets whose ETags are never MD5, such as directory buckets.

    Returns:
        Whether there was one to compare with. A checksum of the parts of an object says nothing of
        the whole; CRC-32C and CRC-64 need the package `awscrt`.

    Raises:
        FaultError: when the two differ; the cause is `checksum`.
    """
    headers = reply.headers
    if headers.get("x-amz-checksum-type", "").upper() != "COMPOSITE":
        for name in ("crc32", "crc64nvme", "crc32c", "sha1", "sha256"):
            expected = headers.get(f"x-amz-checksum-{name}")
            digest = _digest(name) if expected and "-" not in expected else None
            if expected and digest is not None:
                _compare(name, base64.b64encode(digest(reply.body)).decode(), expected)
                return True
    if etag_is_md5 and _is_md5(reply):
        found = hashlib.md5(reply.body, usedforsecurity=False).hexdigest()
        _compare("md5", found, reply.etag)
        return True
    return False


def _is_md5(reply: Reply) -> bool:
    by_whom = reply.headers.get("x-amz-server-side-encryption", "")
    customer = "x-amz-server-side-encryption-customer-algorithm" in reply.headers
    return not customer and by_whom in ("", "AES256") and bool(_MD5.fullmatch(reply.etag))


def _compare(name: str, found: str, expected: str) -> None:
    if found != expected:
        raise FaultError("checksum", f"the body's {name} is {found}, where {expected} is stored")


@cache
def _digest(name: str) -> _Digest | None:
    """Return what computes a checksum, or None where that would take `awscrt`."""
    if name == "crc32":
        return lambda body: zlib.crc32(body).to_bytes(4, "big")
    if name.startswith("sha"):
        return lambda body: hashlib.new(name, body, usedforsecurity=False).digest()
    try:
        compute: Callable[[bytes], int] = getattr(import_module("awscrt.checksums"), name)
    except (ImportError, AttributeError):
        return None
    size = 8 if name == "crc64nvme" else 4
    return lambda body: compute(body).to_bytes(size, "big")
