"""Functions that live in no module: those of a script, and of the cells of a notebook."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from distributed import Client

pytestmark = [pytest.mark.xdist_group("cluster"), pytest.mark.usefixtures("client")]

SCRIPT = """
import dataclasses, sys
import torch.distributed as dist
from distributed import Client
from ddp_core import LaunchOptions, RankFailedError, launch, run

SCALE = 10

@dataclasses.dataclass
class Score:
    value: int

class TrainingError(Exception):
    pass

def scaled(x):
    return x * SCALE

def train(fail=False):
    if fail:
        raise TrainingError("mine")
    return Score(scaled(dist.get_rank()))

if __name__ == "__main__":
    with Client(sys.argv[1]) as client:
        scores = launch(client, train).result(60)
        assert scores == [Score(0), Score(10)], scores
        assert client.gather(run(client, train)) == scores
        try:
            launch(client, train, args=(True,), options=LaunchOptions(grace_s=1)).result(60)
        except RankFailedError as exc:
            assert isinstance(exc.__cause__, TrainingError), exc.__cause__
            print("all good")
"""

CELLS = """
import sys
from IPython.core.interactiveshell import InteractiveShell

def cell(code):
    done = shell.run_cell(code)
    done.raise_error()
    return done.result

shell = InteractiveShell.instance()
cell("import torch.distributed as dist; from distributed import Client")
cell("from ddp_core import launch; offset = 7")
cell(f"client = Client({sys.argv[1]!r})")
cell("def add(x):\\n    return x + offset")
cell("def train():\\n    return add(dist.get_rank())")
assert cell("launch(client, train).result(60)") == [7, 8]
cell("offset = 20")
job = cell("job = launch(client, train); job.result(60); job")
assert job.result() == [20, 21]
assert cell("launch(client, lambda: add(dist.get_rank())).result(60)") == [20, 21]
assert "<table>" in shell.display_formatter.format(job)[0]["text/html"]
cell("client.close()")
print("all good")
"""


def run_python(file: Path, client: Client) -> str:
    done = subprocess.run(
        [sys.executable, str(file), str(client.scheduler_info()["address"])],
        capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_a_script_defines_travels_there_and_back(client: Client, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    assert "all good" in run_python(tmp_path / "script.py", client)


def test_what_the_cells_of_a_notebook_define_travels(client: Client, tmp_path: Path) -> None:
    pytest.importorskip("IPython")
    (tmp_path / "cells.py").write_text(CELLS)
    assert "all good" in run_python(tmp_path / "cells.py", client)
