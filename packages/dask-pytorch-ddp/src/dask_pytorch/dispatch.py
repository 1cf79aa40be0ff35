"""Alias of `dask_pytorch_ddp.dispatch`."""

from dask_pytorch_ddp.dispatch import *  # noqa: F403
