"""The only module that talks to aiobotocore: credentials, endpoint, and a store made of it."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, TypeVar
from urllib.parse import urlsplit

import aiohttp
from aiobotocore.config import AioConfig
from aiobotocore.session import AioSession
from botocore import UNSIGNED, exceptions
from botocore.httpsession import get_cert_path
from botocore.utils import get_environ_proxies

from ._address import quote_key
from ._contract import FaultError, Page, RefusedError, Reply
from ._integrity import ASK
from ._routes import Route
from ._sigv4 import Keys, Signer
from .errors import CredentialsError, EndpointError
from .options import S3Options

_PROBE_KEY = "ddp probe/~a+b%20&c=d@e:f,g;h'(é)!*.bin"  # every kind of character that is escaped
_T = TypeVar("_T")
_DEFAULT_REGION = "us-east-1"

_NO_CREDENTIALS = (
    "reading s3://{bucket}: no AWS credentials found; set AWS_ACCESS_KEY_ID and "
    "AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or run with a role; "
    "if the bucket is public pass anon=True"
)


class Control:
    """Client, credentials and region of one bucket, on one event loop."""

    def __init__(self, bucket: str, options: S3Options) -> None:
        self.bucket = bucket
        self._options = options
        self._region = options.region
        self._stack = contextlib.AsyncExitStack()
        self._session: Any = None
        self._client: Any = None
        self._used_region = ""
        self._lock = asyncio.Lock()

    async def client(self) -> Any:
        """Return the aiobotocore client, created at the first call.

        Raises:
            CredentialsError: when there are none and `anon` is false, or the profile is unknown.
        """
        async with self._lock:
            if self._client is None:
                await self._open()
            return self._client

    async def keys(self) -> Keys | None:
        """Return the present credentials, refreshed if they are about to expire; None if anon."""
        options = self._options
        if options.anon:
            return None
        if options.access_key_id is not None:
            secret = options.secret_access_key or ""
            return Keys(options.access_key_id, secret, options.session_token)
        async with self._lock:
            if self._session is None:
                self._session = AioSession(profile=options.profile)
        try:
            credentials = await self._session.get_credentials()
            if credentials is None:
                raise CredentialsError(_NO_CREDENTIALS.format(bucket=self.bucket))
            frozen = await credentials.get_frozen_credentials()
        except exceptions.BotoCoreError as error:
            raise _no_credentials(self.bucket, error) from error
        return Keys(frozen.access_key, frozen.secret_key, frozen.token)

    async def renew(self) -> bool:
        """Read credentials anew from where they come; return whether they are others now."""
        before = await self.keys()
        async with self._lock:
            await self._close()
        return await self.keys() != before

    async def reroute(self, region: str) -> bool:
        """Use another region; return whether that is a change."""
        async with self._lock:
            if not region or region == self._used_region:
                return False
            self._region = region
            await self._close()
            return True

    async def close(self) -> None:
        """Close the client."""
        async with self._lock:
            await self._close()

    async def release(self) -> None:
        """Close the client, some 10 MB; credentials stay, and it is made again when needed."""
        async with self._lock:
            stack, self._stack = self._stack, contextlib.AsyncExitStack()
            self._client = None
            await stack.aclose()

    async def route(self) -> tuple[Route, Signer | None] | str:
        """Return how to read without aiobotocore, or the reason why that is not possible.

        botocore prepares and signs a request which is never sent; ours must be the same.
        """
        client = await self.client()
        request = await _prepared(client, self.bucket, self._options)
        parts = urlsplit(request.url)
        quoted = quote_key(_PROBE_KEY)
        if not parts.path.endswith("/" + quoted) or parts.query:
            return f"botocore asks for {parts.path!r}, not for a path that ends in the key"
        if get_environ_proxies(request.url):
            return "an HTTP proxy is configured"
        secure = parts.scheme == "https"
        route = Route(
            host=parts.hostname or "",
            port=parts.port or (443 if secure else 80),
            host_header=parts.netloc,
            base_path=parts.path[: -len(quoted)],
            secure=secure,
            region=self._used_region,
            extra=_extra_headers(self._options),
        )
        keys = await self.keys()
        if keys is None:
            return route, None
        signer = Signer(keys, route.region, route.host_header, route.extra)
        headers = {name.lower(): _text(value) for name, value in request.headers.items()}
        ours = signer.authorization(parts.path, "", headers.get("x-amz-date", ""))
        if ours != headers.get("authorization"):
            return "botocore signs requests for this bucket in another way"
        return route, signer

    def follow(self, route: Route) -> None:
        """Take over a route that another process has found and checked."""
        self._region = self._used_region = route.region

    def signer(self, route: Route, keys: Keys) -> Signer:
        """Return a signer of the same route for other keys."""
        return Signer(keys, route.region, route.host_header, route.extra)

    async def tls(self) -> ssl.SSLContext:
        """Return a context that trusts whom the AWS configuration trusts."""
        async with self._lock:
            if self._session is None:
                self._session = AioSession(profile=self._options.profile)
        bundle = self._options.ca_bundle or self._session.get_config_variable("ca_bundle")
        return ssl.create_default_context(cafile=bundle or get_cert_path(True))

    async def _open(self) -> None:
        options = self._options
        if self._session is None:
            self._session = AioSession(profile=options.profile)
        try:
            region = self._region or self._session.get_config_variable("region") or _DEFAULT_REGION
            from_chain = not options.anon and not options.explicit_keys
            if from_chain and await self._session.get_credentials() is None:
                raise CredentialsError(_NO_CREDENTIALS.format(bucket=self.bucket))
            client = self._session.create_client(
                "s3",
                region_name=region,
                endpoint_url=options.endpoint_url,
                verify=options.ca_bundle,
                aws_access_key_id=options.access_key_id,
                aws_secret_access_key=options.secret_access_key,
                aws_session_token=options.session_token,
                config=_config(options),
            )
            self._client = await self._stack.enter_async_context(client)
            self._used_region = str(self._client.meta.region_name)
        except exceptions.ProfileNotFound as error:
            raise _no_credentials(self.bucket, error) from error
        except (exceptions.BotoCoreError, ValueError) as error:
            if _about_credentials(error):
                raise _no_credentials(self.bucket, error) from error
            raise EndpointError(f"preparing to read s3://{self.bucket}: {error}") from error

    async def _close(self) -> None:
        stack, self._stack = self._stack, contextlib.AsyncExitStack()
        self._client = self._session = None
        await stack.aclose()


class BotocoreStore:
    """An object store (see `ObjectStore`) whose every request goes through aiobotocore."""

    def __init__(self, control: Control, options: S3Options) -> None:
        self._control = control
        self._extra = {"RequestPayer": "requester"} if options.requester_pays else {}
        self._of_get = _arguments_of_get(options)

    async def get(self, key: str) -> Reply:
        """Return the whole object."""

        async def call(client: Any) -> Reply:
            found = await client.get_object(Bucket=self._control.bucket, Key=key, **self._of_get)
            meta = found["ResponseMetadata"]
            async with found["Body"] as stream:
                body = await stream.read()
            headers = {name.lower(): value for name, value in meta["HTTPHeaders"].items()}
            length = headers.get("content-length")
            if length is not None and len(body) != int(length):
                raise FaultError("truncated", f"{len(body)} of {length} bytes came")
            return Reply(meta["HTTPStatusCode"], headers, body)

        return await self._call(call)

    async def list(
        self, prefix: str, *, delimiter: str = "", token: str | None = None, limit: int = 1000
    ) -> Page:
        """Return one page of the listing."""

        async def call(client: Any) -> Page:
            more = {"ContinuationToken": token} if token else {}
            page = await client.list_objects_v2(
                Bucket=self._control.bucket,
                Prefix=prefix,
                Delimiter=delimiter,
                MaxKeys=limit,
                **more,
                **self._extra,
            )
            found = page.get("Contents", [])
            return Page(
                keys=[each["Key"] for each in found],
                sizes=[each["Size"] for each in found],
                etags=[each.get("ETag", "").strip('"') for each in found],
                prefixes=[each["Prefix"] for each in page.get("CommonPrefixes", [])],
                token=page.get("NextContinuationToken") if page.get("IsTruncated") else None,
            )

        return await self._call(call)

    async def refresh(self) -> bool:
        """Get credentials anew."""
        return await self._control.renew()

    async def reroute(self, region: str) -> bool:
        """Use another region."""
        return await self._control.reroute(region)

    async def close(self) -> None:
        """Close the client."""
        await self._control.close()

    async def _call(self, use: Callable[[Any], Awaitable[_T]]) -> _T:
        client = await self._control.client()
        try:
            return await use(client)
        except exceptions.ClientError as error:
            raise RefusedError(_reply(error.response)) from error
        except (exceptions.ConnectTimeoutError, exceptions.EndpointConnectionError) as error:
            raise FaultError("connect", str(error)) from error
        except exceptions.SSLError as error:
            raise FaultError("tls", str(error)) from error
        except (exceptions.ReadTimeoutError, TimeoutError) as error:
            raise FaultError("stalled", str(error)) from error
        except exceptions.FlexibleChecksumError as error:
            raise FaultError("checksum", str(error)) from error
        except exceptions.HTTPClientError as error:
            raise FaultError("reset", str(error)) from error
        except aiohttp.ClientError as error:
            raise FaultError("truncated", str(error)) from error
        except exceptions.BotoCoreError as error:
            if _about_credentials(error):
                raise _no_credentials(self._control.bucket, error) from error
            raise FaultError("protocol", str(error)) from error


class _PreparedError(Exception):
    """Carries a request out of botocore, before it is sent."""

    def __init__(self, request: Any) -> None:
        super().__init__("prepared")
        self.request = request


async def _prepared(client: Any, bucket: str, options: S3Options) -> Any:
    def stop(request: Any, **_: Any) -> None:
        raise _PreparedError(request)

    event, mark = "before-send.s3.GetObject", "ddp-s3data"
    client.meta.events.register_first(event, stop, unique_id=mark)
    try:
        await client.get_object(Bucket=bucket, Key=_PROBE_KEY, **_arguments_of_get(options))
    except _PreparedError as prepared:
        return prepared.request
    except exceptions.BotoCoreError as error:
        if _about_credentials(error):
            raise _no_credentials(bucket, error) from error
        raise EndpointError(f"preparing to read s3://{bucket}: {error}") from error
    finally:
        client.meta.events.unregister(event, stop, unique_id=mark)
    raise EndpointError(f"preparing to read s3://{bucket}: botocore sent no request")


def _extra_headers(options: S3Options) -> tuple[tuple[str, str], ...]:
    """Return what our own requests carry besides; the same as `_arguments_of_get`."""
    payer = [("x-amz-request-payer", "requester")] if options.requester_pays else []
    return (*payer, *([ASK] if options.checksum else []))


def _arguments_of_get(options: S3Options) -> dict[str, str]:
    payer = {"RequestPayer": "requester"} if options.requester_pays else {}
    return {**payer, **({"ChecksumMode": "ENABLED"} if options.checksum else {})}


def _config(options: S3Options) -> Any:
    settings: dict[str, Any] = {
        "max_pool_connections": options.max_connections,
        "connect_timeout": options.connect_timeout_s,
        "read_timeout": options.stall_timeout_s,
        "retries": {"mode": "standard", "total_max_attempts": 1},  # retrying is our own work
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
        "user_agent_extra": "ddp-s3data",
    }
    if options.anon:
        settings["signature_version"] = UNSIGNED
    if options.addressing != "auto":
        settings["s3"] = {"addressing_style": options.addressing}
    return AioConfig(**settings)


def _reply(response: dict[str, Any]) -> Reply:
    error = response.get("Error", {})
    meta = response.get("ResponseMetadata", {})
    headers = {name.lower(): value for name, value in meta.get("HTTPHeaders", {}).items()}
    if meta.get("RequestId"):
        headers.setdefault("x-amz-request-id", meta["RequestId"])
    if error.get("Region"):
        headers.setdefault("x-amz-bucket-region", error["Region"])
    reply = Reply(meta.get("HTTPStatusCode", 0), headers, b"")
    return replace(reply, code=error.get("Code", ""), detail=error.get("Message", ""))


def _about_credentials(error: Exception) -> bool:
    kinds = (
        exceptions.NoCredentialsError,
        exceptions.PartialCredentialsError,
        exceptions.CredentialRetrievalError,
        exceptions.ProfileNotFound,
        exceptions.SSOError,
        exceptions.MetadataRetrievalError,
        exceptions.NoAuthTokenError,
    )
    return isinstance(error, kinds)


def _no_credentials(bucket: str, error: Exception) -> CredentialsError:
    if isinstance(error, exceptions.NoCredentialsError):
        return CredentialsError(_NO_CREDENTIALS.format(bucket=bucket))
    return CredentialsError(f"reading s3://{bucket}: getting AWS credentials failed: {error}")


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
