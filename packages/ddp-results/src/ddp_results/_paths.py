"""Which paths a rank may write to: checked where the user's line runs, and again on the client."""

from __future__ import annotations

import re

from ddp_results.errors import PathError

MAX_SEGMENT_BYTES = 255  # NAME_MAX of Linux and macOS file systems
MAX_PATH_BYTES = 1024  # the longest key of S3
RESERVED_PREFIX = "_ddp"  # our own files: metrics, state of the run

_FORBIDDEN = re.compile(r"[\x00-\x1f\x7f-\x9f\\]")  # control characters; Windows' separator
_DRIVE = re.compile(r"^[A-Za-z]:")
_DEVICES = re.compile(r"(?i)^(con|prn|aux|nul|com[0-9¹²³]|lpt[0-9¹²³])(\..*)?$")


# What nearly all paths look like, below MAX_PATH_BYTES; any other is for `check_path` to judge.
is_plain = re.compile(
    r"(?:(?!(?i:con|prn|aux|nul|com\d|lpt\d|_ddp)(?:[./]|$))"
    r"[A-Za-z0-9_](?:[A-Za-z0-9_.=-]{0,80}[A-Za-z0-9_=-])?(?:/(?!$)|$)){1,12}"
).fullmatch


def check_path(path: str, *, reserved: bool = False) -> str:
    """Return `path` if it is safe on every sink.

    A path is relative, `/`-separated, without a drive, empty, `.` or `..` segments, control
    characters, backslashes, names of Windows devices, segments that end in a dot or a space,
    segments over 255 bytes or a total over 1024 bytes. `_ddp/` at the start is ours.

    Args:
        path: what the rank asked for.
        reserved: whether this package itself asks.

    Raises:
        PathError: naming the path, what is wrong with it and what would be accepted.
    """
    if type(path) is str and is_plain(path):
        return path
    if not isinstance(path, str):
        raise PathError(f"a path must be a str, not {type(path).__name__}: {path!r}")
    problem = _problem(path)
    if problem is None and not reserved and path.split("/", 1)[0].lower() == RESERVED_PREFIX:
        problem = f"{RESERVED_PREFIX!r} is where ddp-results keeps its own files"
    if problem is not None:
        shown = path if len(path) <= 120 else f"{path[:100]}… ({len(path)} characters)"
        raise PathError(
            f"result path {shown!r}: {problem}; use a relative path such as 'worker/0/loss.json'"
        )
    return path


def _problem(path: str) -> str | None:
    if not path:
        return "is empty"
    if path.startswith("/"):
        return "is absolute"
    if _DRIVE.match(path):
        return "begins with a drive"
    try:
        encoded = path.encode("utf-8")
    except UnicodeEncodeError:
        return "holds a lone surrogate, which is not valid Unicode"
    if len(encoded) > MAX_PATH_BYTES:
        return f"is {len(encoded)} bytes long, more than {MAX_PATH_BYTES}"
    if found := _FORBIDDEN.search(path):
        return f"holds the character {found.group()!r}"
    for segment in path.split("/"):
        problem = _segment_problem(segment)
        if problem is not None:
            return problem
    return None


def _segment_problem(segment: str) -> str | None:
    if segment in ("", ".", ".."):
        return f"holds the segment {segment!r}"
    if segment[-1] in ". ":
        return f"segment {segment!r} ends in a dot or a space"
    if len(segment) * 4 > MAX_SEGMENT_BYTES and len(segment.encode()) > MAX_SEGMENT_BYTES:
        return f"holds a segment longer than {MAX_SEGMENT_BYTES} bytes"
    if _DEVICES.match(segment):
        return f"segment {segment!r} is the name of a device on Windows"
    return None
