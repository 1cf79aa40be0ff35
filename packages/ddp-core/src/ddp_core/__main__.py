"""The command line: ``python -m ddp_core doctor SCHEDULER``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import distributed

from ddp_core._checks import Finding
from ddp_core._doctor import examine, find_scheduler, no_scheduler, report


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; 0 when everything is good, 1 when something fails, 2 when used wrongly."""
    parser = argparse.ArgumentParser(prog="python -m ddp_core", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    doctor = commands.add_parser("doctor", help="check a cluster before a job")
    doctor.add_argument("scheduler", help="address of the scheduler, tcp://host:8786")
    doctor.add_argument(
        "--import", dest="modules", action="append", default=[], metavar="MODULE[:FUNCTION]",
        help="what the training function needs; may be repeated",
    )  # fmt: skip
    given = parser.parse_args(arguments)
    return 0 if report(_examine(given.scheduler, given.modules), print) else 1


def _examine(address: str, modules: Sequence[str]) -> Iterator[Finding]:
    """All findings about the cluster of the scheduler at ``address``."""
    if (missing := find_scheduler(address)) is not None:
        yield missing
        return
    connect: Any = distributed.Client
    try:
        with connect(address, timeout=10) as client:
            yield Finding("scheduler", True, address)
            yield from examine(client, modules)
    except (OSError, ValueError) as exc:
        yield no_scheduler(address, exc)


if __name__ == "__main__":
    sys.exit(main())
