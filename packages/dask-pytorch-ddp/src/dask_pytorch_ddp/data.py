"""Read images from S3 as an ordinary PyTorch dataset."""

from collections.abc import Callable
from typing import Any

import ddp_s3data

__all__ = ["S3ImageFolder"]


class S3ImageFolder(ddp_s3data.S3ImageFolder):
    """An image folder in S3 with the parameters, attributes and class rule of 0.2.2.

    The class of an image is the name of the directory that holds it, whatever lies above;
    `ddp_s3data.S3ImageFolder` by default takes the first directory below the prefix, as
    torchvision's `ImageFolder` does. Everything else is the same.

    Args:
        s3_bucket: name of the bucket, or a whole `s3://bucket/prefix` address.
        s3_prefix: directory below which the images lie; `train` does not match `train2/`.
        transform: applied to each PIL image (RGB).
        target_transform: applied to each class index.
        anon: read without credentials.
        more: keyword arguments of `ddp_s3data.S3ImageFolder`.
    """

    def __init__(
        self,
        s3_bucket: str,
        s3_prefix: str = "",
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[Any], Any] | None = None,
        anon: bool = False,
        **more: Any,
    ) -> None:
        more = {"class_from": "parent", **more}
        super().__init__(s3_bucket, s3_prefix, transform, target_transform, anon, **more)
