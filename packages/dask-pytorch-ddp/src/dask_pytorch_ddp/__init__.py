"""Train PyTorch models on a Dask cluster from data in S3, with results back while they train.

The names of dask-pytorch-ddp 0.2.2 live in three modules, each a thin layer over a package that
can also be installed and used by itself:

* `dask_pytorch_ddp.dispatch`: `run` starts a function as DDP ranks, one per Dask worker
  (`ddp_core`);
* `dask_pytorch_ddp.data`: `S3ImageFolder` reads images from S3 as a dataset (`ddp_s3data`);
* `dask_pytorch_ddp.results`: `DaskResultsHandler` and `S3ResultsHandler` bring metrics, results and
  checkpoints back (`ddp_results`).

New code imports from the three packages, which offer more than these names.
"""

from importlib.metadata import version

__version__ = version("dask-pytorch-ddp")
