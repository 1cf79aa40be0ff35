"""Alias of `dask_pytorch_ddp.data`."""

from dask_pytorch_ddp.data import *  # noqa: F403
