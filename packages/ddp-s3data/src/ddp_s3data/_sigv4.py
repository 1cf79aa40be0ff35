"""AWS Signature Version 4 for requests without a body, with the signing key kept for the day.

The protocol: "Signature Version 4 signing process" in the reference of Amazon S3's API.
"""

from __future__ import annotations

import hmac
import time
from dataclasses import dataclass, field
from hashlib import sha256

EMPTY_SHA256 = sha256(b"").hexdigest()
_ALGORITHM = "AWS4-HMAC-SHA256"


@dataclass(frozen=True)
class Keys:
    """Credentials; none of them is ever shown."""

    access_key: str = field(repr=False)
    secret_key: str = field(repr=False)
    token: str | None = field(default=None, repr=False)


class Signer:
    """Signs for one set of keys, one region and one host. Not for several threads at once.

    Args:
        keys: credentials.
        region: of the bucket.
        host: value of the `Host` header.
        extra: further headers to send and sign, names in lower case.
    """

    def __init__(
        self, keys: Keys, region: str, host: str, extra: tuple[tuple[str, str], ...] = ()
    ) -> None:
        self.keys = keys
        self._region = region
        self.clock_offset_s = 0.0
        """Added to our clock; set after the server called a request too early or too late."""
        fixed = [("host", host), ("x-amz-content-sha256", EMPTY_SHA256), *extra]
        if keys.token:
            fixed.append(("x-amz-security-token", keys.token))
        self._fixed = sorted(fixed)
        self._signed = ";".join(sorted([*(name for name, _ in fixed), "x-amz-date"]))
        self._before = "".join(f"{k}:{v}\n" for k, v in self._fixed if k < "x-amz-date")
        self._after = "".join(f"{k}:{v}\n" for k, v in self._fixed if k > "x-amz-date")
        self._sent = "".join(f"{k}: {v}\r\n" for k, v in self._fixed)
        self._second = -1
        self._date = ""
        self._scope = ""
        self._key = b""

    def headers(self, path: str, query: str = "", now: float | None = None) -> str:
        """Return the header lines of a signed GET, each with its line end.

        Args:
            path: as sent, escaped.
            query: as sent: escaped, sorted by name, without the question mark.
            now: seconds since 1970; our clock if None.
        """
        self._set_time(int((time.time() if now is None else now) + self.clock_offset_s))
        return (
            f"{self._sent}x-amz-date: {self._date}\r\n"
            f"Authorization: {self._authorization(path, query)}\r\n"
        )

    def authorization(self, path: str, query: str, date: str) -> str:
        """Return the value of the header for a moment written as `YYYYMMDDTHHMMSSZ`."""
        self._second = -1
        self._set_date(date)
        return self._authorization(path, query)

    def _authorization(self, path: str, query: str) -> str:
        canonical = (
            f"GET\n{path}\n{query}\n{self._before}x-amz-date:{self._date}\n{self._after}\n"
            f"{self._signed}\n{EMPTY_SHA256}"
        )
        digest = sha256(canonical.encode()).hexdigest()
        text = f"{_ALGORITHM}\n{self._date}\n{self._scope}\n{digest}"
        signature = hmac.digest(self._key, text.encode(), "sha256").hex()
        return (
            f"{_ALGORITHM} Credential={self.keys.access_key}/{self._scope}, "
            f"SignedHeaders={self._signed}, Signature={signature}"
        )

    def _set_time(self, second: int) -> None:
        if second != self._second:
            self._set_date(time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(second)))
            self._second = second

    def _set_date(self, date: str) -> None:
        scope = f"{date[:8]}/{self._region}/s3/aws4_request"
        if scope != self._scope:
            key = f"AWS4{self.keys.secret_key}".encode()
            for part in scope.split("/"):
                key = hmac.digest(key, part.encode(), "sha256")
            self._scope, self._key = scope, key
        self._date = date
