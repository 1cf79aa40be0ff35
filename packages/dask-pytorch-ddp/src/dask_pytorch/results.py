"""Alias of `dask_pytorch_ddp.results`."""

from dask_pytorch_ddp.results import *  # noqa: F403
