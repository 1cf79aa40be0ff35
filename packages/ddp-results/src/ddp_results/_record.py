"""The words of the protocol: who speaks (a source), and what it says (records)."""

from __future__ import annotations

import os
import secrets
import socket
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

from ddp_results._metrics import Scalar


class Kind(IntEnum):
    """What a record asks the client to do. The numbers are part of the wire format."""

    RESULT = 0  # [path, data]: store a whole result
    METRICS = 1  # [step, values]: append one point
    PART = 2  # [path, offset, total, data, CRC-32 of the result up to here]: of a large result
    DELETE = 3  # [path]: remove a file, for the retention of checkpoints
    MARK = 4  # [number]: everything before this is to be made durable now
    END = 5  # []: the source says no more
    UPLOAD = 7  # [path, size, [bucket, key, upload id, token, [ETag, …]]]: stored as parts on S3
    RETAIN = 6  # [name, keep_last or nil, metric or nil, "min" or "max"]: tidy up checkpoints


class Record(NamedTuple):
    """One thing that a rank submitted. `time_s` is seconds since 1970 on the rank's clock."""

    kind: Kind
    time_s: float
    fields: tuple[Any, ...]
    size_bytes: int


new_record = tuple.__new__  # as Record(...) without a call of Python: for where microseconds count


class Point(NamedTuple):
    """One call of `log_metrics`, as a sink gets it; `seq` numbers the records of its source."""

    seq: int
    time_s: float
    step: int | None
    values: dict[str, Scalar]


@dataclass(frozen=True, slots=True)
class Source:
    """One process that submits: a rank, or a process that a rank has forked.

    Attributes:
        uid: unique for the process and run; sequence numbers count within it.
        rank: `RANK` of the process, or -1 outside of a process group.
        attempt: `TORCHELASTIC_RESTART_COUNT`, or 0.
        host: name of the machine.
        pid: process id.
        job: `TORCHELASTIC_RUN_ID`, or empty.
    """

    uid: str
    rank: int
    attempt: int
    host: str
    pid: int
    job: str

    @classmethod
    def here(cls) -> Source:
        """Describe this process."""
        return cls(
            uid=secrets.token_hex(6),
            rank=environment_number("RANK", -1),
            attempt=environment_number("TORCHELASTIC_RESTART_COUNT", 0),
            host=socket.gethostname(),
            pid=os.getpid(),
            job=os.environ.get("TORCHELASTIC_RUN_ID", ""),
        )

    @property
    def label(self) -> str:
        """Name the source to a person."""
        who = f"rank {self.rank}" if self.rank >= 0 else "process"
        attempt = f", attempt {self.attempt}" if self.attempt else ""
        return f"{who} ({self.host}, pid {self.pid}{attempt})"

    def row(self) -> list[Any]:
        """Return the fields for the wire."""
        return [self.uid, self.rank, self.attempt, self.host, self.pid, self.job]


def environment_number(variable: str, default: int) -> int:
    """Return an environment variable as a number; `default` if it is none."""
    try:
        return int(os.environ[variable])
    except (KeyError, ValueError):
        return default
