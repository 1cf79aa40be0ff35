"""The environment of a rank: scrubbed first, then set under torchrun's names."""

from __future__ import annotations

import ipaddress
import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import dask
from dask.system import CPU_COUNT

from ddp_core._ranks import Rank

SYS_PATH_VARIABLE = "_DDP_CORE_SYS_PATH"

# Left by a launcher around the worker, these would make a rank believe that it is another one.
_OURS = frozenset(
    {
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "NODE_RANK",
        "ROLE_NAME",
        "ROLE_RANK",
        "ROLE_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "DASK_SCHEDULER_ADDRESS",
        "DDP_CORE_RANK",
        "DASK_INTERNAL_INHERIT_CONFIG",
    }
)
_PREFIXES = ("TORCHELASTIC_", "PET_")
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def rank_environment(
    base: Mapping[str, str],
    rank: Rank,
    *,
    job_id: str,
    attempt: int,
    max_restarts: int,
    extra: Mapping[str, str],
) -> dict[str, str]:
    """The variables of one rank, all but the rendezvous address, which is known later.

    Args:
        base: The environment of the Dask worker.
        rank: The rank.
        job_id: Becomes ``TORCHELASTIC_RUN_ID``.
        attempt: Becomes ``TORCHELASTIC_RESTART_COUNT``.
        max_restarts: Becomes ``TORCHELASTIC_MAX_RESTARTS``.
        extra: The user's own variables, which win.
    """
    env = {k: v for k, v in base.items() if k not in _OURS and not k.startswith(_PREFIXES)}
    env.update(
        RANK=str(rank.rank),
        WORLD_SIZE=str(rank.world_size),
        LOCAL_RANK=str(rank.local_rank),
        LOCAL_WORLD_SIZE=str(rank.local_world_size),
        GROUP_RANK=str(rank.node_rank),
        GROUP_WORLD_SIZE=str(rank.n_nodes),
        NODE_RANK=str(rank.node_rank),
        ROLE_NAME="default",
        ROLE_RANK=str(rank.rank),
        ROLE_WORLD_SIZE=str(rank.world_size),
        TORCHELASTIC_RUN_ID=job_id,
        TORCHELASTIC_RESTART_COUNT=str(attempt),
        TORCHELASTIC_MAX_RESTARTS=str(max_restarts),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    _set_threads(env, rank.local_world_size)
    if "GLOO_SOCKET_IFNAME" not in env and (name := interface_of(rank.host)):
        env["GLOO_SOCKET_IFNAME"] = name
    here = working_directory()
    env[SYS_PATH_VARIABLE] = json.dumps([os.path.normpath(os.path.join(here, p)) for p in _path()])
    env.update(extra)
    return env


def dask_environment(scheduler: str, security: Any) -> dict[str, str]:
    """The variables that make ``distributed.Client()`` in a rank reach the worker's scheduler.

    Args:
        scheduler: Address of the scheduler as the worker sees it.
        security: The worker's ``distributed.Security``.
    """
    if scheduler.startswith("inproc:"):
        return {"DASK_INTERNAL_INHERIT_CONFIG": dask.config.serialize(dask.config.global_config)}
    tls: dict[str, Any] = {}
    if getattr(security, "tls_worker_cert", None) or getattr(security, "tls_ca_file", None):
        role = {"cert": security.tls_worker_cert, "key": security.tls_worker_key}
        tls = {"ca-file": security.tls_ca_file, "client": role, "worker": role}
    comm: dict[str, Any] = {"tls": tls} if tls else {}
    if getattr(security, "require_encryption", None):
        comm["require-encryption"] = True
    own = {"scheduler-address": scheduler, "distributed": {"comm": comm}}
    merged = dask.config.merge(dask.config.global_config, own)
    return {
        "DASK_SCHEDULER_ADDRESS": scheduler,
        "DASK_INTERNAL_INHERIT_CONFIG": dask.config.serialize(merged),
    }


def _set_threads(env: dict[str, str], ranks_here: int) -> None:
    """Share the cores between the ranks of a host; Dask's nanny says 1, which is for tasks."""
    nanny = dask.config.get("distributed.nanny.pre-spawn-environ", {}) or {}
    share = str(max(1, int(CPU_COUNT) // ranks_here))
    for name in _THREADS:
        if env.get(name) in (None, str(nanny.get(name))):
            env[name] = share


def _path() -> Sequence[str]:
    """``sys.path``, with the folder of this package, which a frozen path might lack."""
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    return sys.path if here in sys.path else [*sys.path, here]


def interface_of(host: str) -> str | None:
    """Name of the network interface that owns ``host``; gloo would ask the host name instead."""
    import psutil

    try:
        wanted = {str(info[4][0]).split("%")[0] for info in socket.getaddrinfo(host, None)}
    except OSError:
        return None
    here = {
        str(name): {str(a.address).split("%")[0] for a in addresses}
        for name, addresses in psutil.net_if_addrs().items()
    }
    exact = [name for name, owned in here.items() if owned & wanted]
    # All of 127.0.0.0/8 is this host, though the interface names one address only.
    loopback = [name for name, owned in here.items() if any(map(_is_loopback, owned))]
    return next(iter(exact or (loopback if any(map(_is_loopback, wanted)) else [])), None)


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:  # psutil lists hardware addresses as well
        return False


def working_directory() -> str:
    """Return where this process is.

    Raises:
        FileNotFoundError: If the directory is gone; it names the remedy.
    """
    try:
        return os.getcwd()
    except FileNotFoundError as exc:
        raise FileNotFoundError(
            f"the working directory of worker process {os.getpid()} has been removed; start Dask's"
            " workers in one that stays"
        ) from exc
