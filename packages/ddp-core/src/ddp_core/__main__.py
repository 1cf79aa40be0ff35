"""The command line: ``python -m ddp_core doctor SCHEDULER``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import distributed

from ddp_core._doctor import examine, report


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; 0 when everything is good, 1 when something fails, 2 when used wrongly."""
    parser = argparse.ArgumentParser(prog="python -m ddp_core", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    doctor = commands.add_parser("doctor", help="check a cluster before a job")
    doctor.add_argument("scheduler", help="address of the scheduler, tcp://host:8786")
    doctor.add_argument(
        "--import", dest="modules", action="append", default=[], metavar="MODULE",
        help="a module that the training function needs; may be repeated",
    )  # fmt: skip
    given = parser.parse_args(arguments)
    connect: Any = distributed.Client
    try:
        client = connect(given.scheduler, timeout=10)
    except (OSError, ValueError) as exc:
        print(f"FAIL  scheduler         {given.scheduler}: {exc}")
        print(f"      {'':<16}  -> is it running, and is its port open from here?")
        return 1
    with client:
        print(f"ok    scheduler         {given.scheduler}")
        return 0 if report(examine(client, given.modules), print) else 1


if __name__ == "__main__":
    sys.exit(main())
