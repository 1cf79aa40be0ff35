"""Check that each package imports what it declares, declares what it imports, and stands alone.

Reads the sources and `pyproject.toml` files as text, so it needs no environment:

    python tools/check_packages.py [ROOT]

It fails when a package imports something undeclared, declares something it does not import,
imports another of the three independent packages, imports in a circle, or carries another version
than its siblings.
"""

from __future__ import annotations

import ast
import graphlib
import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

INDEPENDENT = ("ddp-core", "ddp-s3data", "ddp-results")
META = "dask-pytorch-ddp"
# Import names that differ from the name of the distribution.
DISTRIBUTION_OF = {"PIL": "pillow"}
# Extras that a package offers for the sake of its users' code: `vision` brings their transforms.
FOR_USERS = {("ddp-s3data", "torchvision")}


@dataclass(frozen=True)
class Import:
    """One import statement: the dotted module, and where it stands."""

    module: str
    place: str


@dataclass(frozen=True)
class Package:
    """What one `packages/<dist>` folder says and does."""

    dist: str
    version: str
    requirements: tuple[str, ...]
    roots: tuple[Path, ...]

    @property
    def declared(self) -> set[str]:
        """Normalised names of all requirements, extras included."""
        return {name_of(requirement) for requirement in self.requirements}


def main() -> int:
    """Print every finding; return the exit status."""
    here = Path(__file__).resolve().parent.parent
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else here
    packages = [read_package(root / "packages" / dist) for dist in (*INDEPENDENT, META)]
    findings = [finding for package in packages for finding in check_package(package)]
    findings += check_versions(packages, (root / "CHANGELOG.md").read_text())
    for finding in findings:
        print(finding)
    print(f"{len(packages)} packages checked, {len(findings)} findings")
    return 1 if findings else 0


def read_package(folder: Path) -> Package:
    """Read a package folder."""
    project: dict[str, Any] = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    extras = project.get("optional-dependencies", {}).values()
    return Package(
        dist=project["name"],
        version=project["version"],
        requirements=(*project["dependencies"], *(each for extra in extras for each in extra)),
        roots=tuple(path for path in sorted((folder / "src").iterdir()) if path.is_dir()),
    )


def check_package(package: Package) -> Iterator[str]:
    """Yield what is wrong with one package."""
    own = {root.name for root in package.roots}
    used: set[str] = set()
    for root in package.roots:
        for path in sorted(root.rglob("*.py")):
            for found in imports_of(path, root):
                top = found.module.partition(".")[0]
                if top in own or top in sys.stdlib_module_names:
                    continue
                dist = normalise(DISTRIBUTION_OF.get(top, top))
                used.add(dist)
                if dist in INDEPENDENT and package.dist in INDEPENDENT:
                    yield f"{found.place}: {package.dist} must not import {top}"
                elif dist not in package.declared:
                    yield f"{found.place}: {package.dist} imports {top} but does not declare {dist}"
        yield from check_direction(root)
    if package.dist != META:  # what the meta-package is for is to declare
        for dist in sorted(package.declared - used):
            if (package.dist, dist) not in FOR_USERS:
                where = f"packages/{package.dist}/pyproject.toml"
                yield f"{where}: declares {dist} but does not import it"


def check_direction(root: Path) -> Iterator[str]:
    """Yield circles among the modules below `root`, and imports of the package root from inside."""
    modules = {module_name(path, root): path for path in root.rglob("*.py")}
    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        graph[module] = set()
        for found in imports_of(path, root, at_top_only=True):
            if found.module == root.name and module != f"{root.name}.__main__":
                yield f"{found.place}: imports its own package root"
            elif found.module in modules and found.module != module:
                graph[module].add(found.module)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        yield f"{root.name}: imports in a circle: {' -> '.join(error.args[1])}"


def imports_of(path: Path, root: Path, *, at_top_only: bool = False) -> Iterator[Import]:
    """Yield the absolute modules that a file imports, `from package import module` resolved."""
    tree = ast.parse(path.read_text(), filename=str(path))
    nodes = tree.body if at_top_only else ast.walk(tree)
    package = module_name(path, root)
    if path.name != "__init__.py":
        package = package.rpartition(".")[0]
    for node in nodes:
        place = f"{path}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, place)
        elif isinstance(node, ast.ImportFrom):
            yield from (Import(each, place) for each in from_imports(node, package, root))


def from_imports(node: ast.ImportFrom, package: str, root: Path) -> Iterator[str]:
    """Yield the modules of a `from … import …` statement inside `package`."""
    parents = package.split(".")
    base = ".".join(parents[: len(parents) - node.level + 1]) if node.level else ""
    module = ".".join(part for part in (base, node.module) if part)
    for alias in node.names:
        inner = root.parent / Path(*module.split("."), alias.name)
        is_module = inner.with_suffix(".py").exists() or (inner / "__init__.py").exists()
        yield f"{module}.{alias.name}" if is_module else module


def check_versions(packages: list[Package], changelog: str) -> Iterator[str]:
    """Yield versions that differ, pins that do not match, and a changelog without an entry."""
    version = packages[0].version
    for package in packages:
        if package.version != version:
            yield f"{package.dist} is {package.version}, {packages[0].dist} is {version}"
    meta = next(package for package in packages if package.dist == META)
    for dist in INDEPENDENT:
        pins = [each for each in meta.requirements if name_of(each) == dist]
        if len(pins) != 1 or not pins[0].endswith(f"=={version}"):
            yield f"{META} must pin {dist}=={version}; it has {pins}"
    if f"## [{version}]" not in changelog:
        yield f"CHANGELOG.md has no entry for {version}"


def module_name(path: Path, root: Path) -> str:
    """Return the dotted name of a source file below a package root."""
    parts = path.relative_to(root.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def name_of(requirement: str) -> str:
    """Return the normalised name in a requirement."""
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    if match is None:
        raise ValueError(f"not a requirement: {requirement!r}")
    return normalise(match.group())


def normalise(name: str) -> str:
    """Normalise a distribution's name as the packaging specification says."""
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    sys.exit(main())
