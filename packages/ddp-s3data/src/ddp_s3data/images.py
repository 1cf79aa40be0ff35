"""Images from bytes, as torchvision's default loader makes them."""

from __future__ import annotations

import io
from typing import BinaryIO

from PIL import Image

__all__ = ["IMG_EXTENSIONS", "S3File", "load_rgb"]

IMG_EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
"""What torchvision's ImageFolder takes for images; compared without case."""


class S3File(io.BytesIO):
    """The bytes of one object as a file, with its address as name.

    Attributes:
        name: `s3://bucket/key`.
    """

    def __init__(self, data: bytes, name: str) -> None:
        super().__init__(data)
        self.name = name


def load_rgb(file: BinaryIO) -> Image.Image:
    """Return the image in RGB, decoded in full; of an animation the first frame.

    The same calls as torchvision's `pil_loader`, so the same pixels: no rotation by EXIF, palettes
    and grey expanded, CMYK converted, transparency dropped, 16-bit grey clipped.
    """
    image: Image.Image = Image.open(file)
    return image.convert("RGB")
