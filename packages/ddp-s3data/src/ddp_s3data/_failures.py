"""From the cause of a failed request to the error that the user sees."""

from __future__ import annotations

from ._contract import FaultError, RefusedError
from ._retry import cause_of
from .errors import (
    AccessDeniedError,
    BucketNotFoundError,
    CredentialsError,
    EndpointError,
    ObjectArchivedError,
    ObjectNotFoundError,
    ReadDeadlineError,
    RequestRefusedError,
    S3DataError,
    TransferError,
)

_KINDS: dict[str, type[S3DataError]] = {
    "connect": EndpointError,
    "name": EndpointError,
    "tls": EndpointError,
    "expired": CredentialsError,
    "credentials": CredentialsError,
    "denied": AccessDeniedError,
    "no_bucket": BucketNotFoundError,
    "no_object": ObjectNotFoundError,
    "archived": ObjectArchivedError,
    "refused": RequestRefusedError,
    "region": RequestRefusedError,
    "skew": RequestRefusedError,
}

_REMEDIES = {
    "connect": "check endpoint_url (AWS_ENDPOINT_URL), the region and the network",
    "name": "check endpoint_url (AWS_ENDPOINT_URL), the region and the network",
    "tls": "check that endpoint_url wants https; for a CA of your own set ca_bundle",
    "expired": "the credentials have expired or are unknown there, and their source has no newer "
    "ones; renew them (AWS_SESSION_TOKEN, profile, role)",
    "credentials": "the server does not accept the credentials; check the secret key",
    "no_bucket": "check the bucket's name and endpoint_url",
    "no_object": "it was deleted after it was listed, or the index is of another time; "
    "list again, or choose on_error='replace'",
    "archived": "it lies in an archive class; restore it, or choose on_error='replace'",
    "region": "the bucket lies in another region; set region (AWS_REGION)",
    "skew": "the clock of this machine is wrong",
    "slow_down": "the server asks for fewer requests; lower max_connections or num_workers, or "
    "spread the keys over more prefixes",
    "stalled": "the server stopped in the middle of an answer; see stall_timeout_s",
    "truncated": "connections break off; check the network, or a proxy between",
    "checksum": "the object is damaged where it lies, or on the way every time; write it anew, or, "
    "if this server's ETags are no MD5, leave out checksum=True",
    "empty": "the server sends no body for an object that has one",
}
_DENIED = "the credentials need {permission}; if the bucket is public pass anon=True"
_DENIED_ANON = "the bucket gives nothing to strangers; leave out anon=True and use credentials"


def failure(
    cause: str,
    error: FaultError | RefusedError,
    *,
    doing: str,
    address: str,
    attempts: int,
    anon: bool,
) -> S3DataError:
    """Return the error for a request that is given up.

    Args:
        cause: a key of the retry table.
        error: the last failure.
        doing: `reading` or `listing`.
        address: what was read or listed.
        attempts: how many requests were made.
        anon: whether they were made without credentials.
    """
    request_id = code = ""
    if isinstance(error, RefusedError):
        reply = error.reply
        request_id, code = reply.request_id, reply.code
        found = f"{reply.code or 'HTTP'} ({reply.status})"
        if reply.detail:
            found += f", {reply.detail.rstrip('.')}"
    else:
        found = error.detail
    tail = [f"{attempts} attempts"] if attempts > 1 else []
    if request_id:
        tail.append(f"request id {request_id}")
    text = f"{doing} {address}: {found}; {_remedy(cause, doing, anon)}".rstrip("; ")
    if tail:
        text += f" [{', '.join(tail)}]"
    return _KINDS.get(cause, TransferError)(
        text, address=address, attempts=attempts, request_id=request_id, code=code
    )


def too_late(
    error: FaultError | RefusedError | None,
    *,
    doing: str,
    address: str,
    attempts: int,
    limit_s: float,
) -> S3DataError:
    """Return the error for a request whose time is up."""
    last = f"; the last failure was {error}" if error is not None else ""
    remedy = _REMEDIES.get(cause_of(error), "") if error is not None else ""
    text = (
        f"{doing} {address}: not done within deadline_s={limit_s:g} and {attempts} attempts{last}; "
        f"{remedy or 'raise deadline_s, or check the network'}"
    )
    return ReadDeadlineError(text, address=address, attempts=attempts)


def _remedy(cause: str, doing: str, anon: bool) -> str:
    if cause == "denied":
        permission = "s3:ListBucket" if doing == "listing" else "s3:GetObject"
        return _DENIED_ANON if anon else _DENIED.format(permission=permission)
    return _REMEDIES.get(cause, "")
