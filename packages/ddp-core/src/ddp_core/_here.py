"""``n_ranks=0``: the function in this process, in a group of one, for breakpoints."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any

from ddp_core._current import CurrentRank, variable
from ddp_core._environment import interface_of
from ddp_core._rendezvous import HostedStore
from ddp_core.options import LaunchOptions

_HOST = "127.0.0.1"


def run_here(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: LaunchOptions,
    job_id: str,
) -> Any:
    """Call ``fn`` as the only rank and return what it returns; what it raises goes through.

    Nothing listens but on the loopback. Afterwards the environment is what it was before, and there
    is no process group.

    Raises:
        RuntimeError: There is a process group in this process already.
    """
    import torch
    import torch.distributed as dist

    if dist.is_initialized():
        raise RuntimeError(
            "n_ranks=0 makes a process group of one in this process, which has a group already: "
            "call torch.distributed.destroy_process_group() first"
        )
    cuda = torch.cuda.device_count() > 0 and options.backend != "gloo"
    if options.pass_local_rank:
        kwargs = {**kwargs, "local_rank": 0}
    with ExitStack() as stack:
        store = HostedStore(_HOST, options.port)
        stack.callback(store.close)
        device = "cuda:0" if cuda else "cpu"
        stack.enter_context(_environment(_variables(device, job_id, store.port, options)))
        stack.callback(_leave)
        if options.init_process_group:
            timeout = timedelta(seconds=options.pg_timeout_s)
            dist.init_process_group(
                options.backend or ("nccl" if cuda else "gloo"),
                store=dist.TCPStore(_HOST, store.port, is_master=False, timeout=timeout),  # type: ignore[attr-defined]
                rank=0,
                world_size=1,
                timeout=timeout,
            )
        return fn(*args, **kwargs)


def _variables(device: str, job_id: str, port: int, options: LaunchOptions) -> dict[str, str]:
    """The environment of the only rank, over that of this process."""
    indices = ("RANK", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK", "ROLE_RANK")
    sizes = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE")
    return {
        **dict.fromkeys(indices, "0"),
        **dict.fromkeys(sizes, "1"),
        **variable(CurrentRank(0, 1, 0, 1, 0, _HOST, device, job_id, 0)),
        "MASTER_ADDR": _HOST,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": job_id,
        # Else gloo listens where the name of this host leads.
        "GLOO_SOCKET_IFNAME": interface_of(_HOST) or "lo",
        **options.env,
    }


def _leave() -> None:
    """Destroy the group, unless the function has done so."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Set variables, and give back the whole environment as it was, whatever the function does."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in [name for name in os.environ if name not in before]:
            del os.environ[name]
        os.environ.update(before)
