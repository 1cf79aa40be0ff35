"""Ways to buckets that were found and checked, for the processes that come after.

To find one takes a client of aiobotocore, which costs a DataLoader worker a fifth of a second. A
route holds no secret. It is followed only on the same host with the same AWS settings.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

from .options import S3Options

_SECRETS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
_PROXIES = ("http_proxy", "https_proxy", "no_proxy", "all_proxy")


@dataclass(frozen=True)
class Route:
    """All that a plain HTTP client must know to read from the bucket."""

    host: str
    port: int
    host_header: str
    base_path: str
    secure: bool
    region: str
    extra: tuple[tuple[str, str], ...]


Settings = tuple[str, ...]


def settings() -> Settings:
    """Return what on this host decides about a route, without secrets."""
    chosen = (
        f"{name}={value}"
        for name, value in os.environ.items()
        if (name.startswith("AWS_") and name not in _SECRETS) or name.lower() in _PROXIES
    )
    return socket.gethostname(), *sorted(chosen)


def identity() -> int:
    """Return a number for the environment's AWS settings and keys; others give another one."""
    keys = (os.environ.get(name, "") for name in _SECRETS)
    return hash((*settings(), *keys))


def known_route(bucket: str, options: S3Options) -> Route | None:
    """Return the route that was remembered under the present settings."""
    found = _ROUTES.get((bucket, options))
    return found[1] if found is not None and found[0] == settings() else None


def remember_route(bucket: str, options: S3Options, route: Route) -> None:
    """Keep a route for forked children and for pickles."""
    _ROUTES[bucket, options] = (settings(), route)


def exported(bucket: str, options: S3Options) -> tuple[Settings, Route] | None:
    """Return what a pickle carries for `imported`."""
    return _ROUTES.get((bucket, options))


def imported(bucket: str, options: S3Options, found: tuple[Settings, Route] | None) -> None:
    """Remember what came with a pickle."""
    if found is not None:
        _ROUTES.setdefault((bucket, options), found)


_ROUTES: dict[tuple[str, S3Options], tuple[Settings, Route]] = {}
