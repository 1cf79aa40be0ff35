"""What usually breaks a job is found before one, and no check hangs on what is broken."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import dask
import pytest
from certificates import certificate
from distributed import Client, LocalCluster

from ddp_core.__main__ import main
from ddp_core._checks import check_imports, check_port, compare_versions

pytestmark = [pytest.mark.xdist_group("cluster"), pytest.mark.timeout(240)]


def address(client: Client) -> str:
    return str(client.scheduler_info()["address"])


def test_a_healthy_cluster_passes_every_check(
    client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["doctor", address(client), "--import", "json", "--import", "json:loads"])
    lines = capsys.readouterr().out.splitlines()
    assert code == 0, lines
    assert all(line.startswith("ok") for line in lines), lines
    for check in (
        *("scheduler", "workers", "answers", "python", "torch", "dask", "ddp-core"),
        *("coordinator", "threads", "port", "devices", "import json", "import json:loads"),
    ):
        assert any(line[6:].startswith(check) for line in lines), check


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("no_such_module", "No module named 'no_such_module'"),
        ("json:no_such_function", "has no attribute 'no_such_function'"),
    ],
)
def test_what_the_workers_cannot_import_is_found(
    client: Client, capsys: pytest.CaptureFixture[str], what: str, text: str
) -> None:
    code = main(["doctor", address(client), "--import", what])
    out = capsys.readouterr().out
    assert code == 1
    assert text in out
    assert "upload_file" in out


def test_a_worker_that_is_stopped_is_named_and_the_others_are_checked(
    fresh: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    pids: dict[str, int] = dict(fresh.run(os.getpid))
    worker, pid = sorted(pids.items())[0]
    os.kill(pid, signal.SIGSTOP)
    try:
        code = main(["doctor", address(fresh), "--import", "json"])
    finally:
        os.kill(pid, signal.SIGCONT)
    lines = capsys.readouterr().out.splitlines()
    assert code == 1
    (bad,) = [line for line in lines if line.startswith("FAIL")]
    assert bad[6:].startswith("answers")
    assert worker in bad
    assert "workers=" in lines[lines.index(bad) + 1]
    assert "on all 1 workers" in lines[-1]


def test_a_package_of_another_version_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One worker finds the metadata of an older package first."""
    info = tmp_path / "cloudpickle-0.0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: cloudpickle\nVersion: 0.0.1\n")
    code = "from distributed.cli.dask_worker import main; main()"
    with LocalCluster(n_workers=1, processes=True, dashboard_address=":0") as cluster:
        arguments = [cluster.scheduler_address, "--no-nanny", "--no-dashboard", "--nthreads", "1"]
        worker = subprocess.Popen(
            [sys.executable, "-c", code, *arguments, "--host", "127.0.0.1"],
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
            stderr=subprocess.DEVNULL,
        )
        try:
            with Client(cluster) as client:
                client.wait_for_workers(2, timeout=60)
            assert main(["doctor", cluster.scheduler_address]) == 1
        finally:
            worker.kill()
            worker.wait()
    bad = [line for line in capsys.readouterr().out.splitlines() if line.startswith("FAIL")]
    assert len(bad) == 1
    assert "cloudpickle" in bad[0]
    assert "0.0.1" in bad[0]


def test_a_scheduler_that_is_not_there_is_told_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in ("tcp://127.0.0.1:9", "nowhere.invalid:1", "tcp://127.0.0.1:123456"):
        assert main(["doctor", wrong]) == 1
        seen = capsys.readouterr()
        fail, remedy = seen.out.splitlines()
        assert fail.startswith(f"FAIL  scheduler         {wrong}: ")
        assert "is it running" in remedy
        assert not seen.err


@pytest.mark.parametrize(
    ("scheme", "found"), [("tcp", "has not greeted within"), ("tls", "Timed out trying to connect")]
)
def test_whoever_accepts_and_says_nothing_is_no_scheduler(
    scheme: str, found: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A stopped scheduler, or another program at its port."""
    tls: Any = certificate(tmp_path)
    client = {"cert": tls.tls_client_cert, "key": tls.tls_client_key}
    base = "distributed.comm.tls"
    configured = dask.config.set({f"{base}.ca-file": tls.tls_ca_file, f"{base}.client": client})
    with configured, socket.create_server(("127.0.0.1", 0)) as mute:
        assert main(["doctor", f"{scheme}://127.0.0.1:{mute.getsockname()[1]}"]) == 1
    fail, remedy = capsys.readouterr().out.splitlines()
    assert found in fail
    assert "is it running" in remedy


def test_tls_without_certificates_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        assert main(["doctor", f"tls://127.0.0.1:{mute.getsockname()[1]}"]) == 1
    assert "check your TLS configuration" in capsys.readouterr().out


def test_a_cluster_without_workers_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with LocalCluster(n_workers=0, processes=True, dashboard_address=":0") as empty:
        assert main(["doctor", empty.scheduler_address]) == 1
    assert "start workers" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "own", "other", "good"),
    [
        ("python", "3.11.7", "3.11.9", True),
        ("python", "3.11.7", "3.12.0", False),
        ("torch", "2.13.0", "2.13.0", True),
        ("torch", "2.13.0", "2.13.0+cu128", True),
        ("torch", "2.13.0+cpu", "2.12.0+cpu", False),
        ("torch", "2.13.0", "-", False),
    ],
)
def test_versions_must_agree(name: str, own: str, other: str, good: bool) -> None:
    finding = compare_versions(name, own, {"tcp://a:1": other})
    assert finding.is_good is good
    assert good or f"install {name} {own}" in finding.remedy


def test_the_worker_that_differs_is_named() -> None:
    seen: dict[str, Any] = {"tcp://a:1": "", "tcp://b:1": "ModuleNotFoundError"}
    assert "tcp://b:1" in check_imports("m", seen).found
    assert "[::1]:7 reached from 1 of 2" in check_port("::1", 7, seen).found
