from __future__ import annotations

import pytest
from distributed import Client

from ddp_core.__main__ import main
from ddp_core._doctor import check_imports, compare_versions

pytestmark = [pytest.mark.xdist_group("cluster"), pytest.mark.timeout(240)]


def test_a_healthy_cluster_passes_every_check(
    client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["doctor", client.scheduler_info()["address"], "--import", "json"])
    lines = capsys.readouterr().out.splitlines()
    assert code == 0
    assert all(line.startswith("ok") for line in lines), lines
    for check in ("scheduler", "workers", "torch", "ddp-core", "port", "devices", "import json"):
        assert any(check in line for line in lines), check


def test_a_module_that_the_workers_lack_is_found(
    client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["doctor", client.scheduler_info()["address"], "--import", "no_such_module"])
    out = capsys.readouterr().out
    assert code == 1
    assert "No module named 'no_such_module'" in out
    assert "upload_file" in out


def test_a_scheduler_that_does_not_answer_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "tcp://127.0.0.1:9"]) == 1
    assert "is it running" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "own", "other", "good"),
    [
        ("python", "3.11.7", "3.11.9", True),
        ("python", "3.11.7", "3.12.0", False),
        ("torch", "2.13.0", "2.13.0", True),
        ("torch", "2.13.0", "-", False),
    ],
)
def test_versions_must_agree(name: str, own: str, other: str, good: bool) -> None:
    finding = compare_versions(name, own, {"tcp://a:1": other})
    assert finding.is_good is good
    assert good or f"install {name} {own}" in finding.remedy


def test_imports_name_the_worker_that_lacks_the_module() -> None:
    assert not check_imports("m", {"tcp://a:1": "ok", "tcp://b:1": "ModuleNotFoundError"}).is_good
