"""The name of `dask_pytorch_ddp` before it was renamed in 2020: an alias that says so."""

import warnings

from dask_pytorch_ddp import __version__ as __version__

warnings.warn(
    "dask_pytorch was renamed: import dask_pytorch_ddp instead, with the same modules",
    DeprecationWarning,
    stacklevel=2,
)
