from __future__ import annotations

import json

import dask
import pytest
from distributed.security import Security

from ddp_core._environment import dask_environment, interface_of, rank_environment
from ddp_core._ranks import WorkerInfo, plan_ranks

PLAN = plan_ranks(
    [WorkerInfo(f"tcp://127.0.0.{n}:1", f"127.0.0.{n}", f"w{n}") for n in (1, 2)],
    ranks_per_worker=2,
)


def environment(base: dict[str, str], extra: dict[str, str] | None = None) -> dict[str, str]:
    return rank_environment(base, PLAN[3], job_id="j", attempt=2, max_restarts=5, extra=extra or {})


def test_the_names_are_those_of_torchrun() -> None:
    env = environment({})
    assert env["RANK"] == "3"
    assert env["WORLD_SIZE"] == "4"
    assert env["LOCAL_RANK"] == "1"
    assert env["LOCAL_WORLD_SIZE"] == "2"
    assert env["GROUP_RANK"] == env["NODE_RANK"] == "1"
    assert env["TORCHELASTIC_RUN_ID"] == "j"
    assert env["TORCHELASTIC_RESTART_COUNT"] == "2"
    assert env["TORCHELASTIC_MAX_RESTARTS"] == "5"


def test_what_another_launcher_left_is_scrubbed() -> None:
    left = {"RANK": "9", "MASTER_PORT": "1", "TORCHELASTIC_ERROR_FILE": "f", "HOME": "/h"}
    env = environment(left)
    assert "MASTER_PORT" not in env
    assert "TORCHELASTIC_ERROR_FILE" not in env
    assert (env["RANK"], env["HOME"]) == ("3", "/h")


def test_the_single_thread_of_the_nanny_is_replaced_by_a_share_of_the_cores() -> None:
    with dask.config.set({"distributed.nanny.pre-spawn-environ": {"OMP_NUM_THREADS": 1}}):
        assert int(environment({"OMP_NUM_THREADS": "1"})["OMP_NUM_THREADS"]) >= 1
        assert environment({"OMP_NUM_THREADS": "7"})["OMP_NUM_THREADS"] == "7"


def test_the_users_variables_win() -> None:
    env = environment({"A": "1"}, {"A": "2", "GLOO_SOCKET_IFNAME": "eth7"})
    assert (env["A"], env["GLOO_SOCKET_IFNAME"]) == ("2", "eth7")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "localhost"])
def test_the_interface_is_the_one_that_owns_the_address(host: str) -> None:
    assert interface_of(host) == "lo"
    assert interface_of("192.0.2.1") is None


def test_a_rank_inherits_the_dask_configuration_and_the_workers_security() -> None:
    security = Security(
        tls_ca_file="ca.pem", tls_worker_cert="c.pem", tls_worker_key="k.pem",
        require_encryption=True,
    )  # fmt: skip
    with dask.config.set({"mine": 3}):
        env = dask_environment("tls://h:1", security)
    config = dask.config.deserialize(env["DASK_INTERNAL_INHERIT_CONFIG"])
    assert env["DASK_SCHEDULER_ADDRESS"] == config["scheduler-address"] == "tls://h:1"
    assert config["mine"] == 3
    comm = config["distributed"]["comm"]
    assert comm["tls"]["client"] == {"cert": "c.pem", "key": "k.pem", "ciphers": None} or (
        comm["tls"]["client"]["cert"] == "c.pem"
    )
    assert comm["require-encryption"] is True


def test_the_import_path_travels_with_the_rank() -> None:
    assert all(json.loads(environment({})["_DDP_CORE_SYS_PATH"]))
