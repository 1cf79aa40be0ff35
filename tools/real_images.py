"""Real images for tests, examples and the demo, from scikit-learn: digits and photographs."""

from __future__ import annotations

import io
from typing import Any

from PIL import Image


def digits() -> dict[str, bytes]:
    """Return the 1,797 handwritten digits, 8 x 8 pixels, as PNG files: `3/0042.png` to body."""
    from sklearn.datasets import load_digits

    data = load_digits()
    pixels = (data.images * (255 / 16)).astype("uint8")  # scikit-learn counts grey from 0 to 16
    return {
        f"{target}/{number:04d}.png": encoded(image, "PNG")
        for number, (image, target) in enumerate(zip(pixels, data.target, strict=True))
    }


def photographs(
    count: int, width: int = 320, height: int = 280, quality: int = 75
) -> dict[str, bytes]:
    """Return crops of two photographs as JPEG files, half under `china/`, half under `flower/`."""
    from sklearn.datasets import load_sample_images

    files = {}
    for name, pixels in zip(("china", "flower"), load_sample_images().images, strict=True):
        rows, columns, _ = pixels.shape
        for number in range(count // 2):
            top = number * 37 % (rows - height)
            left = number * 53 % (columns - width)
            crop = pixels[top : top + height, left : left + width]
            files[f"{name}/{number:04d}.jpg"] = encoded(crop, "JPEG", quality=quality)
    return files


def encoded(pixels: Any, file_format: str, **settings: Any) -> bytes:
    """Encode an array of 8-bit pixels, (height, width) or (height, width, 3), as an image file."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, file_format, **settings)
    return buffer.getvalue()
