"""The check of the package boundaries finds what it is there to find."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return a copy of the packages, to be spoiled."""
    for source in ROOT.glob("packages/*"):
        target = tmp_path / "packages" / source.name
        shutil.copytree(source / "src", target / "src", ignore=shutil.ignore_patterns("*.pyc"))
        shutil.copy(source / "pyproject.toml", target)
    shutil.copy(ROOT / "CHANGELOG.md", tmp_path)
    return tmp_path


def check(tree: Path) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, ROOT / "tools/check_packages.py", tree],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout


def spoil(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_the_tree_as_it_is_has_no_finding(tree: Path) -> None:
    assert check(tree) == (0, "4 packages checked, 0 findings\n")


@pytest.mark.parametrize(
    ("statement", "finding"),
    [
        ("import ddp_core", "ddp-s3data must not import ddp_core"),
        ("def late():\n    from ddp_results import errors", "must not import ddp_results"),
        ("import yaml", "imports yaml but does not declare yaml"),
        ("from ddp_s3data import S3Dataset", "imports its own package root"),
    ],
)
def test_a_forbidden_import_is_found(tree: Path, statement: str, finding: str) -> None:
    with (tree / "packages/ddp-s3data/src/ddp_s3data/errors.py").open("a") as module:
        module.write(f"\n{statement}\n")
    status, output = check(tree)
    assert status == 1
    assert "errors.py" in output
    assert finding in output


def test_imports_in_a_circle_are_found(tree: Path) -> None:
    package = tree / "packages/ddp-core/src/ddp_core"
    (package / "one.py").write_text("from . import other\n")
    (package / "other.py").write_text("from ddp_core.one import anything\n")
    status, output = check(tree)
    assert status == 1
    assert "ddp_core: imports in a circle" in output


def test_a_requirement_that_nobody_imports_is_found(tree: Path) -> None:
    project = tree / "packages/ddp-core/pyproject.toml"
    spoil(project, "dependencies = [", 'dependencies = [\n    "requests",')
    status, output = check(tree)
    assert status == 1
    assert "packages/ddp-core/pyproject.toml: declares requests but does not import it" in output


def test_versions_that_differ_are_found(tree: Path) -> None:
    spoil(tree / "packages/ddp-results/pyproject.toml", 'version = "', 'version = "9.')
    status, output = check(tree)
    assert status == 1
    assert "ddp-results is 9." in output
