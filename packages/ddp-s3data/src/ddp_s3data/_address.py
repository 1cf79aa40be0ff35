"""Addresses of S3: `s3://bucket/key`, which is not a URL."""

from __future__ import annotations

import re
from urllib.parse import quote

_SCHEME = "s3://"
_BUCKET = re.compile(r"[A-Za-z0-9._-]{3,255}", re.ASCII)  # what botocore accepts
_ACCESS_POINT = re.compile(r"arn:[^:]+:s3[a-z-]*:[^:]*:[^:]*:(accesspoint|outpost)")


def split_address(bucket_or_url: str, prefix: str = "") -> tuple[str, str]:
    """Return bucket and prefix of `bucket, prefix` or of `s3://bucket/prefix`.

    Characters with a meaning in URLs (`?`, `#`, `%`, `+`) are legal in keys and have none here.

    Raises:
        TypeError: when one of them is no text.
        ValueError: when there is no bucket, or a prefix is given twice.
    """
    if not isinstance(bucket_or_url, str):
        raise TypeError(
            f"expected a bucket or 's3://bucket/prefix', not {type(bucket_or_url).__name__}"
        )
    if not isinstance(prefix, str):
        raise TypeError(
            f"prefix must be text, not {type(prefix).__name__}; "
            "with an s3:// address give the transform by name: transform=..."
        )
    bucket, prefix = _split(bucket_or_url, prefix)
    if bucket.startswith("arn:"):
        if _ACCESS_POINT.match(bucket):
            return bucket, prefix
        name = bucket.rpartition(":")[2]
        raise ValueError(f"{bucket!r} is no bucket name; write {name!r}")
    if not _BUCKET.fullmatch(bucket):
        raise ValueError(
            f"{bucket!r} is no bucket name; it has 3 to 255 letters, digits, dots, hyphens and "
            "underscores"
        )
    return bucket, prefix


def _split(bucket_or_url: str, prefix: str) -> tuple[str, str]:
    if bucket_or_url.lower().startswith("arn:"):
        return bucket_or_url, prefix
    if not bucket_or_url.lower().startswith(_SCHEME):
        if "://" in bucket_or_url:
            raise ValueError(f"{bucket_or_url!r} is no S3 address; write 's3://bucket/prefix'")
        if "/" in bucket_or_url or not bucket_or_url:
            raise ValueError(
                f"{bucket_or_url!r} is no bucket name; write S3ImageFolder('bucket', 'prefix/') "
                "or S3ImageFolder('s3://bucket/prefix/')"
            )
        return bucket_or_url, prefix
    bucket, _, rest = bucket_or_url[len(_SCHEME) :].partition("/")
    if not bucket:
        raise ValueError(f"{bucket_or_url!r} names no bucket; write 's3://bucket/prefix'")
    if rest and prefix:
        raise ValueError(f"the prefix is given twice: {bucket_or_url!r} and {prefix!r}")
    return bucket, rest or prefix


def as_directory(prefix: str) -> str:
    """Return the prefix with one final slash, so that `train` never matches `train2/x`."""
    return prefix if not prefix or prefix.endswith("/") else prefix + "/"


def address(bucket: str, key: str) -> str:
    """Return `s3://bucket/key`."""
    return f"{_SCHEME}{bucket}/{key}"


def quote_key(key: str) -> str:
    """Return the key as it stands in the path of a request, as Signature Version 4 wants it."""
    return quote(key, safe="/")
