import os
import subprocess
import sys

import pytest
from conftest import png

from ddp_s3data import Index
from ddp_s3data.__main__ import main


@pytest.fixture
def where(fill, aws):
    return f"s3://{fill({f'a/{i}.png': png(i) for i in range(70)})}/a"


def test_check_lists_and_reads(where, capsys):
    assert main(["check", where]) == 0
    said = capsys.readouterr().out
    assert "list: 70 objects" in said
    assert f"get:  {where}/" in said


def test_check_says_what_to_do(aws, capsys):
    assert main(["check", "s3://no-such-bucket"]) == 1
    assert "check the bucket's name" in capsys.readouterr().err
    assert main(["check", "https://wrong"]) == 1
    assert "write 's3://bucket/prefix'" in capsys.readouterr().err


def test_index_writes_a_file_that_bench_reads(where, tmp_path, capsys):
    file = tmp_path / "index"
    assert main(["index", where, "-o", str(file)]) == 0
    assert len(Index.load(file)) == 70
    assert main(["bench", where, "--index", str(file)]) == 0
    said = capsys.readouterr().out
    for word in ("requests/s", "latency", "decoding", "images/s", "limit", "S3DataLoader("):
        assert word in said
    assert main(["bench", where, "--objects", "64"]) == 0
    assert "give more --objects" in capsys.readouterr().out


def test_bench_reads_what_are_no_images(fill, aws, capsys):
    assert main(["bench", f"s3://{fill({f'{i}': b'text' for i in range(70)})}"]) == 0
    said = capsys.readouterr().out
    assert "objects/s" in said
    assert "decoding" not in said


def test_it_runs_as_a_module(where):
    command = [sys.executable, "-m", "ddp_s3data", "check", where]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert (done.returncode, done.stderr) == (0, "")
