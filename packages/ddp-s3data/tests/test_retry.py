import random

import pytest

from ddp_s3data._contract import FaultError, RefusedError, Reply
from ddp_s3data._retry import RULES, cause_of, wait_s


@pytest.mark.parametrize(
    ("status", "code", "cause"),
    [
        (503, "SlowDown", "slow_down"),
        (503, "", "slow_down"),
        (429, "", "slow_down"),
        (500, "InternalError", "server"),
        (502, "", "server"),
        (400, "ExpiredToken", "expired"),
        (403, "InvalidAccessKeyId", "expired"),
        (403, "SignatureDoesNotMatch", "credentials"),
        (403, "RequestTimeTooSkewed", "skew"),
        (403, "AccessDenied", "denied"),
        (403, "", "denied"),
        (301, "PermanentRedirect", "region"),
        (400, "AuthorizationHeaderMalformed", "region"),
        (404, "NoSuchBucket", "no_bucket"),
        (404, "NoSuchKey", "no_object"),
        (404, "", "no_object"),
        (403, "InvalidObjectState", "archived"),
        (400, "SomethingNew", "refused"),
    ],
)
def test_answers_have_causes(status, code, cause):
    assert cause_of(RefusedError(Reply(status, {}, b"", code=code))) == cause


def test_every_fault_has_a_rule():
    for cause in ("stale", "reset", "truncated", "stalled", "connect", "name", "tls", "protocol"):
        assert cause_of(FaultError(cause, "")) == cause
        assert cause in RULES


def test_waits_are_full_jitter_with_a_cap():
    draw = random.Random(1)
    rule = RULES["server"]
    for attempt in range(1, 40):
        bound = min(rule.cap_s, rule.base_s * 2**attempt)
        waits = [wait_s(rule, attempt, draw) for _ in range(200)]
        assert all(0 <= wait <= bound for wait in waits)
        assert max(waits) > 0.9 * bound
        assert min(waits) < 0.1 * bound


def test_a_stale_connection_is_replaced_at_once():
    assert wait_s(RULES["stale"], 1, random.Random(1)) == 0
