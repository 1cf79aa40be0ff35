"""Check the environment it runs in: packages import in full, and what must be absent is absent.

    python tools/check_environment.py ddp-s3data --absent dask distributed

For each package given, every public module is imported in a fresh interpreter, with warnings about
deprecation let through for the old import names only.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import PurePosixPath

DEPRECATED = {"dask_pytorch"}  # these say so when imported


def main() -> int:
    """Print every finding; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("packages", nargs="+", help="distributions to import")
    parser.add_argument("--absent", nargs="*", default=[], help="distributions that must be absent")
    options = parser.parse_args()
    findings = [f"{name} is installed, but must not be" for name in options.absent if has(name)]
    for package in options.packages:
        modules = list(public_modules(package))
        print(f"{package}: importing {', '.join(modules)}")
        if not modules:
            findings.append(f"{package} has no public module")
        for module in modules:
            done = subprocess.run(
                [sys.executable, "-W", "error::ImportWarning", "-c", f"import {module}"],
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )
            if done.returncode or (done.stderr and module.partition(".")[0] not in DEPRECATED):
                findings.append(f"import {module}: {done.stderr.strip()}")
    for finding in findings:
        print(finding, file=sys.stderr)
    return 1 if findings else 0


def public_modules(package: str) -> Iterator[str]:
    """Yield the dotted names of an installed distribution's public modules."""
    for path in importlib.metadata.files(package) or ():
        parts = PurePosixPath(path).with_suffix("").parts
        if path.suffix == ".py" and not any(part.startswith("_") for part in parts[:-1]):
            if parts[-1] == "__init__":
                yield ".".join(parts[:-1])
            elif not parts[-1].startswith("_"):
                yield ".".join(parts)


def has(distribution: str) -> bool:
    """Say whether a distribution is installed here."""
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
