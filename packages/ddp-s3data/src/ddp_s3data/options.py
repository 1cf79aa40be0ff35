"""How to reach S3 and how hard to pull."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["S3Options"]

_log = logging.getLogger("ddp_s3data")

_MIB = 1 << 20
_GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class S3Options:
    """Settings of the connection to S3, and limits of one process that reads.

    What is None comes from where every AWS tool takes it: `AWS_*` variables, `AWS_ENDPOINT_URL`
    and `AWS_ENDPOINT_URL_S3`, profiles, instance roles. Keys given here appear in no repr and no
    error. They travel when a dataset is pickled (and a warning says so); all others never do.

    Args:
        endpoint_url: address of the server; a URL.
        region: region of the bucket. A wrong one is corrected when the server names the right one.
        profile: section of the AWS configuration files.
        anon: send no credentials; for public buckets.
        requester_pays: agree to pay for requests and transfer.
        addressing: `path` for `host/bucket/key`, `virtual` for `bucket.host/key`, `auto` for what
            botocore would choose.
        access_key_id: explicit credentials, together with `secret_access_key`.
        secret_access_key: see `access_key_id`.
        session_token: of temporary credentials.
        ca_bundle: file with the certificates to trust, for servers with a CA of their own.
        transport: `auto` reads through our own HTTP client, once its signature has been compared
            with botocore's, else through aiobotocore; `aiobotocore` always does the latter.
        max_connections: requests in flight in one process, at most.
        inflight_bytes: bytes requested or waiting to be decoded in one process, at most. One
            object larger than this is still read, alone.
        connect_timeout_s: for one connection.
        stall_timeout_s: without a byte, a request is given up and retried.
        deadline_s: for one object with all retries.
        max_attempts: requests for one object, at most.
        hedge: ask a second time for an object that is late while a batch waits for it.
        checksum: ask for the stored checksum of each object, or take its ETag where that is an MD5,
            and read again what does not match. The statistics count as `unchecked` what has neither
            (or needs the package `awscrt`: CRC-32C and CRC-64).
        cache_dir: a local directory in which to keep what was read, for later epochs and other
            processes of this user; None keeps nothing. An object is kept under its ETag, so one
            that has changed is read again once it is listed again.
        cache_bytes: of all files there, at most; the least recently used ones go.
    """

    endpoint_url: str | None = None
    region: str | None = None
    profile: str | None = None
    anon: bool = False
    requester_pays: bool = False
    addressing: Literal["auto", "path", "virtual"] = "auto"
    access_key_id: str | None = field(default=None, repr=False)
    secret_access_key: str | None = field(default=None, repr=False)
    session_token: str | None = field(default=None, repr=False)
    ca_bundle: str | None = None
    transport: Literal["auto", "aiobotocore"] = "auto"
    max_connections: int = 64
    inflight_bytes: int = 256 * _MIB
    connect_timeout_s: float = 10.0
    stall_timeout_s: float = 20.0
    deadline_s: float = 120.0
    max_attempts: int = 8
    hedge: bool = True
    checksum: bool = False
    cache_dir: str | None = None
    cache_bytes: int = 16 * _GIB

    def __post_init__(self) -> None:
        if self.addressing not in ("auto", "path", "virtual"):
            raise ValueError(
                f"addressing must be 'auto', 'path' or 'virtual', not {self.addressing!r}"
            )
        if self.transport not in ("auto", "aiobotocore"):
            raise ValueError(f"transport must be 'auto' or 'aiobotocore', not {self.transport!r}")
        if (self.access_key_id is None) != (self.secret_access_key is None):
            raise ValueError("access_key_id and secret_access_key are given together or not at all")
        if self.session_token is not None and self.access_key_id is None:
            raise ValueError("session_token needs access_key_id and secret_access_key")
        if self.anon and self.access_key_id is not None:
            raise ValueError("anon=True sends no credentials, but access_key_id is given")
        if self.cache_dir is not None and not str(self.cache_dir):
            raise ValueError("cache_dir must name a directory, or be None")
        url = self.endpoint_url
        if url is not None and not url.startswith(("http://", "https://")):
            raise ValueError(f"endpoint_url must begin with http:// or https://, not {url!r}")
        for name in ("max_connections", "inflight_bytes", "max_attempts", "cache_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("connect_timeout_s", "stall_timeout_s", "deadline_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be more than 0, not {getattr(self, name)}")

    @property
    def explicit_keys(self) -> bool:
        """Whether credentials were given here."""
        return self.access_key_id is not None

    def __getstate__(self) -> dict[str, Any]:
        if self.explicit_keys:
            _log.warning(
                "pickling S3Options with the keys that were given to it: whoever reads the pickle "
                "has them; use AWS_* variables, a profile or a role instead"
            )
        return dict(self.__dict__)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
