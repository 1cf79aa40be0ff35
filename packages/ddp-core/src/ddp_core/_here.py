"""``n_ranks=0``: the function in this process, in a group of one, for breakpoints."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from ddp_core._current import CurrentRank, variable
from ddp_core.options import LaunchOptions


def run_here(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: LaunchOptions,
    job_id: str,
) -> Any:
    """Call ``fn`` as the only rank. The environment is afterwards what it was before."""
    import torch
    import torch.distributed as dist
    from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]

    cuda = torch.cuda.device_count() > 0 and options.backend != "gloo"
    rank = CurrentRank(0, 1, 0, 1, 0, "127.0.0.1", "cuda:0" if cuda else "cpu", job_id, 0)
    names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK", "ROLE_RANK")
    sizes = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE")
    variables = dict.fromkeys(names, "0") | dict.fromkeys(sizes, "1") | variable(rank)
    store: Any = None
    if not options.init_process_group:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        variables |= {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RUN_ID": job_id,
        }
    if options.pass_local_rank:
        kwargs = {**kwargs, "local_rank": 0}
    with _environment({**variables, **options.env}):
        if not options.init_process_group:
            return fn(*args, **kwargs)
        dist.init_process_group(
            options.backend or ("nccl" if cuda else "gloo"),
            store=HashStore(),
            rank=0,
            world_size=1,
            timeout=timedelta(seconds=options.pg_timeout_s),
        )
        try:
            return fn(*args, **kwargs)
        finally:
            dist.destroy_process_group()


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
