from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from ddp_results import LocalSink, open_run
from ddp_results.__main__ import main
from ddp_results._record import Point, Source
from ddp_results.sinks._jsonl import METRICS_PREFIX

SOURCE = Source(uid="c0ffee", rank=0, attempt=0, host="here", pid=1, job="")


@pytest.fixture
def run(tmp_path: Path) -> str:
    sink = LocalSink(tmp_path / "run")
    sink.write("a/b.json", b"{}")
    sink.append(SOURCE, [Point(n, 1e9 + n, n, {"loss": 1 / n}) for n in range(1, 21)])
    sink.append(SOURCE, [Point(21, 1e9 + 21, 21, {"loss": math.nan, "big": 2**80})])
    sink.close()
    return str(tmp_path / "run")


def test_commands_show_what_is_there(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls", run]) == 0
    assert capsys.readouterr().out == "a/b.json\n"
    assert main(["show", run]) == 0
    assert "21 points of 1 processes" in capsys.readouterr().out
    assert main(["tail", run, "-n", "3"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3
    assert main(["verify", run]) == 0


def test_plot_and_export_write_files(run: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert main(["plot", run, "loss", "-o", str(tmp_path / "loss.png")]) == 0
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert main(["export", run, str(tmp_path / "points.jsonl")]) == 0
    last = json.loads((tmp_path / "points.jsonl").read_text().splitlines()[-1])
    assert last["metrics"] == {"loss": {"$float": "nan"}, "big": 2**80}


def test_mistakes_are_said_in_one_line(
    run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ls", str(tmp_path / "nowhere")]) == 2
    assert "no folder" in capsys.readouterr().err
    assert main(["plot", run, "lost"]) == 2
    assert "only ['big', 'loss']" in capsys.readouterr().err
    assert main(["export", run, "x.txt"]) == 2
    assert main(["show", ""]) == 2
    assert "is empty" in capsys.readouterr().err


def test_folder_without_a_run_is_doubted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes.txt").touch()
    assert main(["show", str(tmp_path)]) == 0
    assert "that process_results was given?" in capsys.readouterr().out
    assert main(["plot", str(tmp_path), "loss"]) == 2
    assert "no other; is it the folder" in capsys.readouterr().err


def test_processes_without_a_rank_are_told_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sink = LocalSink(tmp_path)
    sink.append(replace(SOURCE, rank=-1), [Point(1, 1e9, 1, {"loss": 1.0})])
    sink.close()
    assert main(["tail", str(tmp_path)]) == 0
    assert "process c0ffee  step 1" in capsys.readouterr().out


def test_line_cut_off_by_a_dead_client_is_passed_over_and_its_point_is_read_once(
    run: str, tmp_path: Path
) -> None:
    (path,) = (tmp_path / "run" / METRICS_PREFIX).iterdir()
    path.write_bytes(path.read_bytes()[:-20])
    sink = LocalSink(run)
    sink.append(SOURCE, [Point(n, 1e9 + n, n, {"loss": 0.5}) for n in (20, 21, 22)])
    sink.close()
    points = open_run(run).metrics()
    assert [point["seq"] for point in points] == list(range(1, 23))
