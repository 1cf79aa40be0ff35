"""What to do about a failed request, as a table: cause, wait, how often."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

from ._contract import FaultError, RefusedError, Reply

Action = Literal["again", "refresh", "reroute", "raise"]


@dataclass(frozen=True)
class Rule:
    """How to answer one cause.

    Args:
        action: `again` sends the request again, `refresh` gets credentials first, `reroute` changes
            the region first, `raise` gives up at once.
        base_s: the wait before attempt n is drawn from 0 to base_s * 2^n ("full jitter", see
            "Exponential Backoff And Jitter", AWS Architecture Blog, 2015).
        cap_s: upper bound of that interval.
        limit: how often this cause may come for one request.
        slow_down: whether the server asks for fewer requests.
    """

    action: Action
    base_s: float = 0.05
    cap_s: float = 5.0
    limit: int = 1000
    slow_down: bool = False


RULES: dict[str, Rule] = {
    "stale": Rule("again", base_s=0.0, limit=3),
    "reset": Rule("again"),
    "truncated": Rule("again"),
    "empty": Rule("again"),
    "checksum": Rule("again", limit=3),
    "stalled": Rule("again", base_s=0.0),
    "connect": Rule("again", base_s=0.2, limit=4),
    "name": Rule("again", base_s=0.2, limit=2),
    "tls": Rule("raise"),
    "protocol": Rule("again", base_s=0.2, limit=2),
    "server": Rule("again", base_s=0.1),
    "slow_down": Rule("again", base_s=0.25, cap_s=5.0, slow_down=True),
    "skew": Rule("again", base_s=0.0, limit=1),
    "expired": Rule("refresh", base_s=0.0, limit=1),
    "region": Rule("reroute", base_s=0.0, limit=1),
    "credentials": Rule("raise"),
    "denied": Rule("raise"),
    "no_bucket": Rule("raise"),
    "no_object": Rule("raise"),
    "archived": Rule("raise"),
    "refused": Rule("raise"),
}

_BY_CODE = {
    "SlowDown": "slow_down",
    "Throttling": "slow_down",
    "ThrottlingException": "slow_down",
    "RequestLimitExceeded": "slow_down",
    "BandwidthLimitExceeded": "slow_down",
    "TooManyRequests": "slow_down",
    "InternalError": "server",
    "ServiceUnavailable": "slow_down",
    "RequestTimeout": "server",
    "RequestTimeTooSkewed": "skew",
    "ExpiredToken": "expired",
    "ExpiredTokenException": "expired",
    "TokenRefreshRequired": "expired",
    "InvalidToken": "expired",
    "InvalidAccessKeyId": "expired",
    "SignatureDoesNotMatch": "credentials",
    "PermanentRedirect": "region",
    "TemporaryRedirect": "region",
    "AuthorizationHeaderMalformed": "region",
    "IllegalLocationConstraintException": "region",
    "AccessDenied": "denied",
    "AllAccessDisabled": "denied",
    "AccountProblem": "denied",
    "NoSuchBucket": "no_bucket",
    "InvalidBucketName": "no_bucket",
    "NoSuchKey": "no_object",
    "InvalidObjectState": "archived",
}


def cause_of(error: FaultError | RefusedError) -> str:
    """Return the cause, a key of `RULES`."""
    if isinstance(error, FaultError):
        return error.cause if error.cause in RULES else "protocol"
    return _cause_of_reply(error.reply)


def _cause_of_reply(reply: Reply) -> str:
    if reply.code in _BY_CODE:
        return _BY_CODE[reply.code]
    status = reply.status
    if status in (429, 503):
        return "slow_down"
    if status >= 500 or status == 408:
        return "server"
    if status in (301, 302, 307, 308):
        return "region"
    return {401: "credentials", 403: "denied", 404: "no_object"}.get(status, "refused")


def wait_s(rule: Rule, attempt: int, draw: random.Random) -> float:
    """Return how long to wait before the attempt after `attempt` (counted from 1)."""
    return draw.uniform(0.0, min(rule.cap_s, rule.base_s * 2.0 ** min(attempt, 30)))
