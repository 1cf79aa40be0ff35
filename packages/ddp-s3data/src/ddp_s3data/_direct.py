"""An object store over our own HTTP client and signature."""

from __future__ import annotations

import asyncio
import logging
import re
import ssl
from dataclasses import replace
from email.utils import parsedate_to_datetime
from time import time
from urllib.parse import quote, unquote_plus
from xml.etree import ElementTree

from ._address import quote_key
from ._contract import FaultError, ObjectStore, Page, RefusedError, Reply
from ._control import BotocoreStore, Control
from ._http import Pool
from ._routes import Route, known_route, remember_route
from ._sigv4 import Signer
from .options import S3Options

_log = logging.getLogger("ddp_s3data")

_CHECK_KEYS_S = 5.0
_SKEWED = ("RequestTimeTooSkewed", "RequestExpired")


async def open_store(bucket: str, options: S3Options) -> ObjectStore:
    """Return the quickest store that reads this bucket correctly; call it on the engine's loop.

    Raises:
        CredentialsError: when there are no credentials.
        EndpointError: when the settings make no address.
    """
    control = Control(bucket, options)
    if options.transport == "aiobotocore":
        await control.keys()
        return BotocoreStore(control, options)
    try:
        known = known_route(bucket, options)
        found = await control.route() if known is None else await _followed(control, known)
        if isinstance(found, str):
            _log.info("reading s3://%s through aiobotocore: %s", bucket, found)
            return BotocoreStore(control, options)
        route, signer = found
        tls = await control.tls() if route.secure else None
        await control.release()
    except BaseException:
        await control.close()
        raise
    remember_route(bucket, options, route)
    return DirectStore(control, options, route, signer, tls)


async def _followed(control: Control, route: Route) -> tuple[Route, Signer | None]:
    control.follow(route)
    keys = await control.keys()
    return route, None if keys is None else control.signer(route, keys)


class DirectStore:
    """An object store (see `ObjectStore`) that signs and sends by itself."""

    def __init__(
        self,
        control: Control,
        options: S3Options,
        route: Route,
        signer: Signer | None,
        tls: ssl.SSLContext | None,
    ) -> None:
        self._control = control
        self._options = options
        self._loop = asyncio.get_running_loop()
        self._lock = asyncio.Lock()
        self._tls = tls
        self._use(route, signer)
        self._keys_at = self._loop.time()

    async def get(self, key: str) -> Reply:
        """Return the whole object."""
        return await self._request(self._route.base_path + quote_key(key))

    async def list(
        self, prefix: str, *, delimiter: str = "", token: str | None = None, limit: int = 1000
    ) -> Page:
        """Return one page of the listing."""
        query = {"encoding-type": "url", "list-type": "2", "max-keys": str(limit), "prefix": prefix}
        if delimiter:
            query["delimiter"] = delimiter
        if token:
            query["continuation-token"] = token
        text = "&".join(f"{name}={quote(value, safe='')}" for name, value in sorted(query.items()))
        reply = await self._request(self._route.base_path, text)
        return parse_page(reply.body)

    async def refresh(self) -> bool:
        """Get credentials anew."""
        async with self._lock:
            changed = await self._control.renew()
            await self._renew_signer()
            return changed

    async def reroute(self, region: str) -> bool:
        """Use another region: another host, another signature."""
        async with self._lock:
            if not await self._control.reroute(region):
                return False
            found = await self._control.route()
            if isinstance(found, str):
                raise FaultError("protocol", found)
            old = self._pool
            self._use(*found)
            remember_route(self._control.bucket, self._options, found[0])
            await self._control.release()
            await old.close()
            return True

    async def close(self) -> None:
        """Give up all connections."""
        await self._pool.close()
        await self._control.close()

    def _use(self, route: Route, signer: Signer | None) -> None:
        self._route, self._signer = route, signer
        self._pool = Pool(
            route.host,
            route.port,
            self._tls,
            connect_timeout_s=self._options.connect_timeout_s,
            stall_timeout_s=self._options.stall_timeout_s,
        )
        extra = "".join(f"{name}: {value}\r\n" for name, value in route.extra)
        self._unsigned = f"host: {route.host_header}\r\n{extra}"

    async def _request(self, path: str, query: str = "") -> Reply:
        signer = self._signer
        if signer is not None:
            if self._loop.time() - self._keys_at > _CHECK_KEYS_S:
                await self._check_keys()
                signer = self._signer or signer
            headers = signer.headers(path, query)
        else:
            headers = self._unsigned
        target = f"{path}?{query}" if query else path
        head = f"GET {target} HTTP/1.1\r\n{headers}user-agent: ddp-s3data\r\n\r\n"
        status, found, body = await self._pool.request(head.encode("ascii"))
        reply = Reply(status, found, body)
        if status == 200:
            return reply
        raise RefusedError(self._explained(reply))

    def _explained(self, reply: Reply) -> Reply:
        """Return the reply with what its body says; correct our clock if it is off."""
        body = reply.body[:65536].decode("utf-8", "replace")

        def inside(tag: str) -> str:
            found = re.search(f"<{tag}>([^<]*)</{tag}>", body)
            return found[1] if found else ""

        headers = dict(reply.headers)
        if inside("Region"):
            headers.setdefault("x-amz-bucket-region", inside("Region"))
        if inside("RequestId"):
            headers.setdefault("x-amz-request-id", inside("RequestId"))
        if inside("Code") in _SKEWED and self._signer is not None and "date" in headers:
            server = parsedate_to_datetime(headers["date"]).timestamp()
            self._signer.clock_offset_s = server - time()
        return replace(reply, headers=headers, code=inside("Code"), detail=inside("Message"))

    async def _check_keys(self) -> None:
        """Take over credentials that their provider has refreshed by itself."""
        self._keys_at = self._loop.time()
        async with self._lock:
            await self._renew_signer()

    async def _renew_signer(self) -> None:
        keys = await self._control.keys()
        self._keys_at = self._loop.time()
        if keys is None or self._signer is None or self._signer.keys == keys:
            return
        offset = self._signer.clock_offset_s
        self._signer = self._control.signer(self._route, keys)
        self._signer.clock_offset_s = offset


def parse_page(body: bytes) -> Page:
    """Return what a `ListBucketResult` document holds.

    Raises:
        FaultError: when it is none (a proxy's page, a document that breaks off).
    """
    try:
        root = ElementTree.fromstring(body)
    except ElementTree.ParseError as error:
        raise FaultError("protocol", f"the listing is no XML: {error}") from error
    if not root.tag.endswith("ListBucketResult"):
        raise FaultError("protocol", f"the listing is a document of kind {root.tag!r}")
    space = root.tag[: -len("ListBucketResult")]
    encoded = root.findtext(space + "EncodingType") == "url"
    key_tag, size_tag, etag_tag = space + "Key", space + "Size", space + "ETag"
    keys, sizes, etags = [], [], []
    for item in root.iterfind(space + "Contents"):
        keys.append(item.findtext(key_tag) or "")
        sizes.append(int(item.findtext(size_tag) or 0))
        etags.append((item.findtext(etag_tag) or "").strip('"'))
    prefixes = [
        item.findtext(space + "Prefix") or "" for item in root.iterfind(space + "CommonPrefixes")
    ]
    if encoded:
        keys, prefixes = _unquoted(keys), _unquoted(prefixes)
    more = root.findtext(space + "IsTruncated") == "true"
    token = root.findtext(space + "NextContinuationToken") if more else None
    return Page(keys, sizes, etags, prefixes, token)


def _unquoted(names: list[str]) -> list[str]:
    """Return the names without their URL encoding; one call for all costs a sixth of many."""
    found = unquote_plus("\0".join(names)).split("\0")
    return found if len(found) == len(names) else [unquote_plus(name) for name in names]
