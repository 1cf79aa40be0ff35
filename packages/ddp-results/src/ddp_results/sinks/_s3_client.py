"""The only module that talks to aiobotocore: a client on its own thread, errors in our words."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncIterator, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from ddp_results.errors import SinkError, SinkUnavailableError

T = TypeVar("T")
CONNECTIONS = 32

_ABSENT = {"NoSuchKey", "404", "NotFound"}
REMEDIES = {
    "NoSuchUpload": "its parts have been removed, by a lifecycle rule perhaps",
    "NoSuchBucket": "the bucket does not exist; create it, or check the name and endpoint_url",
    "AccessDenied": "the credentials need s3:PutObject, s3:GetObject and s3:ListBucket there",
    "InvalidAccessKeyId": "the server does not know these credentials",
    "SignatureDoesNotMatch": "the secret key does not belong to the access key",
    "ExpiredToken": "the credentials have expired; renew them",
    "PermanentRedirect": "the bucket is in another region; set region=",
}
# What no repetition will cure.
_PERMANENT = {
    "NoSuchUpload",
    "KeyTooLongError",
    "EntityTooLarge",
    "InvalidRequest",
    "MethodNotAllowed",
}


@dataclass(frozen=True, slots=True)
class S3Options:
    """How to reach S3; the names and defaults are those of ddp-s3data.

    Attributes:
        endpoint_url: None for `AWS_ENDPOINT_URL_S3`, `AWS_ENDPOINT_URL` or Amazon.
        region: None for `AWS_REGION`, `AWS_DEFAULT_REGION` or the profile's.
        profile: name in `~/.aws/config`.
        anon: send no credentials.
        requester_pays: agree to pay for requests.
        addressing: `path` for `host/bucket/key`, `virtual` for `bucket.host/key`, `auto` for what
            botocore would choose.
    """

    endpoint_url: str | None = None
    region: str | None = None
    profile: str | None = None
    anon: bool = False
    requester_pays: bool = False
    addressing: str = "auto"

    def __post_init__(self) -> None:
        if self.addressing not in ("auto", "path", "virtual"):
            raise ValueError(
                f"addressing must be 'auto', 'path' or 'virtual', not {self.addressing!r}"
            )


def _report(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Report what nobody awaited, except aiohttp's writer on a lost connection.

    The request of that writer has raised already, and is tried again.
    """
    if not isinstance(context.get("exception"), ConnectionError):
        loop.default_exception_handler(context)


class S3Client:
    """Runs coroutines on thread `ddp-results-s3` with one client; usable from any thread.

    Raises:
        SinkUnavailableError: if aiobotocore is not installed.
    """

    def __init__(self, options: S3Options) -> None:
        try:
            import aiobotocore.session
        except ImportError as error:
            raise SinkUnavailableError(
                "S3 needs aiobotocore: pip install 'ddp-results[s3]'"
            ) from error
        self.pid = os.getpid()
        self._session = aiobotocore.session.AioSession(profile=options.profile)
        self._options = options
        self._client: Any = None
        self._stack = contextlib.AsyncExitStack()
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(_report)
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="ddp-results-s3", daemon=True
        )
        self._thread.start()
        self._lock: asyncio.Lock | None = None

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin to run on the client's loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run on the client's loop and return the result."""
        future = self.start(coroutine)
        try:
            return future.result()
        except BaseException:  # Ctrl-C here must not leave it running there
            future.cancel()
            raise

    async def call(self, operation: str, **arguments: Any) -> Any:
        """Call an operation of S3; botocore's exceptions pass, see `translated`."""
        if self._lock is None:
            self._lock = asyncio.Lock()
        async with self._lock:
            if self._client is None:
                self._client = await self._stack.enter_async_context(self._new_client())
        if self._options.requester_pays:
            arguments["RequestPayer"] = "requester"
        return await getattr(self._client, operation)(**arguments)

    async def pages(self, bucket: str, prefix: str) -> AsyncIterator[dict[str, Any]]:
        """Yield the entries of a listing."""
        token: dict[str, str] = {}
        while True:
            page = await self.call("list_objects_v2", Bucket=bucket, Prefix=prefix, **token)
            for entry in page.get("Contents", ()):
                yield entry
            if not page.get("IsTruncated"):
                return
            token = {"ContinuationToken": page["NextContinuationToken"]}

    def close(self) -> None:
        """Close the client and its thread; a second call does nothing, nor one in a fork."""
        if self._loop.is_closed() or self.pid != os.getpid():
            return
        if threading.current_thread() is self._thread:  # by the garbage collector
            self._loop.stop()
            return
        with contextlib.suppress(Exception):
            self.run(self._shut_down())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5.0)
        if not self._thread.is_alive():
            self._loop.close()

    async def _shut_down(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._stack.aclose()
        await self._loop.shutdown_default_executor()

    def _new_client(self) -> Any:
        from aiobotocore.config import AioConfig
        from botocore import UNSIGNED

        options = self._options
        config: dict[str, Any] = {
            "max_pool_connections": CONNECTIONS,
            "retries": {"mode": "standard", "total_max_attempts": 4},
            "connect_timeout": 10,
            "read_timeout": 60,
            "request_checksum_calculation": "when_required",  # as other servers expect
            "response_checksum_validation": "when_required",
        }
        if options.addressing != "auto":
            config["s3"] = {"addressing_style": options.addressing}
        if options.anon:
            config["signature_version"] = UNSIGNED
        region = options.region or os.environ.get("AWS_REGION")
        return self._session.create_client(
            "s3", endpoint_url=options.endpoint_url, region_name=region, config=AioConfig(**config)
        )


def translated(error: Exception, doing: str) -> Exception:
    """Return the error to raise for one of aiobotocore's: `SinkError`, or FileNotFoundError."""
    from botocore.exceptions import (
        ClientError,
        EndpointConnectionError,
        NoCredentialsError,
        ProfileNotFound,
    )

    if isinstance(error, ClientError):
        code = str(error.response.get("Error", {}).get("Code", ""))
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        if code in _ABSENT:
            return FileNotFoundError(f"{doing}: {code}")
        remedy = REMEDIES.get(code, error.response.get("Error", {}).get("Message", ""))
        text = f"{doing}: {code or status}; {remedy}"
        return SinkError(text, transient=code not in _PERMANENT)
    if isinstance(error, NoCredentialsError):
        return SinkError(
            f"{doing}: no credentials were found; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY,"
            " or profile=, or give the machine a role",
            transient=True,
        )
    if isinstance(error, EndpointConnectionError):
        return SinkError(
            f"{doing}: {error}; check endpoint_url, AWS_ENDPOINT_URL and the network",
            transient=True,
        )
    if isinstance(error, ProfileNotFound):
        return SinkUnavailableError(f"{doing}: {error}; check ~/.aws/config")
    return SinkError(f"{doing}: {error!r}", transient=True)


def is_overload(error: BaseException | None) -> bool:
    """Whether the server has answered that it cannot answer now."""
    response = getattr(error, "response", None) or {}
    return int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)) >= 500
