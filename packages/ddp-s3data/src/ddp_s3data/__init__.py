"""S3 objects as an ordinary map-style PyTorch dataset, fetched ahead of need.

A *dataset* (`S3Dataset`, `S3ImageFolder`) lists a *prefix* of a *bucket* once, into an *index*, and
then reads objects by position. Whoever asks for a batch gets all its objects fetched concurrently.
A *loader* (`S3DataLoader`, an ordinary DataLoader beyond that) adds to each batch of positions the
ones that follow for the same DataLoader *worker*, which fetches them while it decodes:
*look-ahead*. Each process has one *engine*, a daemon thread with an event loop, for all of that.

    ds = S3ImageFolder("s3://bucket/train/", transform=transform)
    loader = S3DataLoader(ds, batch_size=64, shuffle=True, num_workers=4)

How S3 is reached (`S3Options`) follows the conventions of all AWS tools.
"""

from ._index import Index
from .dataset import S3Dataset, S3Object
from .errors import (
    AccessDeniedError,
    BadSampleLimitError,
    BucketNotFoundError,
    CredentialsError,
    DaemonicProcessError,
    DecodeError,
    EmptyDatasetError,
    EndpointError,
    IndexFileError,
    ObjectArchivedError,
    ObjectNotFoundError,
    ReadDeadlineError,
    RequestRefusedError,
    S3DataError,
    TransferError,
)
from .folder import S3ImageFolder
from .images import IMG_EXTENSIONS, S3File, load_rgb
from .loader import S3DataLoader
from .options import S3Options

__all__ = [
    "IMG_EXTENSIONS",
    "AccessDeniedError",
    "BadSampleLimitError",
    "BucketNotFoundError",
    "CredentialsError",
    "DaemonicProcessError",
    "DecodeError",
    "EmptyDatasetError",
    "EndpointError",
    "Index",
    "IndexFileError",
    "ObjectArchivedError",
    "ObjectNotFoundError",
    "ReadDeadlineError",
    "RequestRefusedError",
    "S3DataError",
    "S3DataLoader",
    "S3Dataset",
    "S3File",
    "S3ImageFolder",
    "S3Object",
    "S3Options",
    "TransferError",
    "load_rgb",
]

__version__ = "0.3.0"
