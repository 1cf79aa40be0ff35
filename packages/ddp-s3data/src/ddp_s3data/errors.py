"""What can go wrong between a bucket and a batch, one class for each thing the user does next."""

from __future__ import annotations

from typing import Any

__all__ = [
    "AccessDeniedError",
    "BadSampleLimitError",
    "BucketNotFoundError",
    "CredentialsError",
    "DaemonicProcessError",
    "DecodeError",
    "EmptyDatasetError",
    "EndpointError",
    "IndexFileError",
    "ObjectArchivedError",
    "ObjectNotFoundError",
    "ReadDeadlineError",
    "RequestRefusedError",
    "S3DataError",
    "TransferError",
]


class S3DataError(Exception):
    """Root of all errors of this package.

    One positional text, everything else by keyword: torch's DataLoader rebuilds the exception of a
    worker as `type(error)(text)`, and Dask pickles it.

    Args:
        text: what was being done, to what, what was found, what to do.
        address: `s3://bucket/key` (or bucket and prefix), where one is concerned.
        index: position of the sample in the dataset.
        attempts: how many requests were made.
        request_id: the server's id of the last one, for its operator.
        code: the server's error code, such as `AccessDenied`.
    """

    def __init__(
        self,
        text: str = "",
        *,
        address: str = "",
        index: int | None = None,
        attempts: int = 0,
        request_id: str = "",
        code: str = "",
    ) -> None:
        super().__init__(text)
        self.text = text
        self.address = address
        self.index = index
        self.attempts = attempts
        self.request_id = request_id
        self.code = code

    def __str__(self) -> str:
        return self.text

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.text,), self.__dict__


class CredentialsError(S3DataError):
    """Raised when there are no credentials, or the server does not accept them (any more)."""


class AccessDeniedError(S3DataError, PermissionError):
    """Raised when the credentials are good but do not allow this."""


class BucketNotFoundError(S3DataError, FileNotFoundError):
    """Raised when the bucket does not exist where we asked."""


class ObjectNotFoundError(S3DataError, FileNotFoundError):
    """Raised when a listed object is gone."""


class ObjectArchivedError(S3DataError):
    """Raised when the object lies in an archive class and must be restored before it is read."""


class EmptyDatasetError(S3DataError, FileNotFoundError):
    """Raised when nothing, or no class, or no valid file is found at the address."""


class EndpointError(S3DataError, ConnectionError):
    """Raised when the server cannot be reached at all: name, port, TLS."""


class RequestRefusedError(S3DataError):
    """Raised when the server refuses a request for a reason that has no class of its own."""


class TransferError(S3DataError, OSError):
    """Raised when a request failed again and again in ways that usually pass."""


class ReadDeadlineError(S3DataError, TimeoutError):
    """Raised when a request, with all its retries, took longer than `deadline_s`."""


class DecodeError(S3DataError, OSError):
    """Raised when an object was read in full and is not what the loader can decode."""


class BadSampleLimitError(S3DataError):
    """Raised when more samples are unreadable than `bad_sample_limit` allows."""


class IndexFileError(S3DataError, ValueError):
    """Raised when an index file is damaged, of another version, or of another address."""


class DaemonicProcessError(S3DataError, RuntimeError):
    """Raised when DataLoader workers are asked for in a process that may not have children."""
