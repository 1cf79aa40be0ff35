"""Every example of every package runs as its reader would run it."""

import subprocess
import sys
from pathlib import Path

import pytest

from real_images import photographs
from s3_server import S3Server

pytestmark = pytest.mark.xdist_group("cluster")

PACKAGES = Path(__file__).resolve().parent.parent / "packages"
EXAMPLES = sorted(PACKAGES.glob("*/examples/*.py"))
ARGUMENTS = {"plain_pytorch.py": ["s3://examples/photos/"]}


@pytest.fixture(scope="module")
def photos(s3: S3Server) -> None:
    s3.create_bucket("examples")
    files = photographs(16).items()
    s3.put_objects("examples", {f"photos/{name}": body for name, body in files})


@pytest.mark.timeout(200)
@pytest.mark.parametrize("example", EXAMPLES, ids=[path.name for path in EXAMPLES])
def test_example_runs(photos: None, example: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, example, *ARGUMENTS.get(example.name, [])],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert "Traceback" not in done.stderr
