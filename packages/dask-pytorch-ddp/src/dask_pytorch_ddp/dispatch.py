"""Run a function as DDP ranks on a Dask cluster."""

from ddp_core import run

__all__ = ["run"]
