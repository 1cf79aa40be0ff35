"""What else lies in a bucket under the name of an image; kinds of images are in test_folder."""

import io

import numpy as np
import pytest
from PIL import Image

from ddp_s3data import DecodeError, S3DataLoader, S3ImageFolder
from real_images import photographs


@pytest.fixture(scope="module")
def photos():
    return photographs(8)


def array(image):
    return np.array(image)


def test_photographs_have_the_pixels_of_pillows_rgb(fill, aws, photos):
    folder = S3ImageFolder(fill(photos))
    assert folder.classes == ["china", "flower"]
    for (image, _), name in zip(folder, sorted(photos), strict=True):
        assert np.array_equal(array(image), array(Image.open(io.BytesIO(photos[name]))))


def test_progressive_and_optimised_files_are_the_same_images(fill, aws, photos):
    image = Image.open(io.BytesIO(photos["china/0000.jpg"]))
    files = {}
    for name, how in (("a", {}), ("b", {"progressive": True}), ("c", {"optimize": True})):
        out = io.BytesIO()
        image.save(out, "JPEG", quality=90, **how)
        files[f"x/{name}.jpg"] = out.getvalue()
    first, *others = [array(found) for found, _ in S3ImageFolder(fill(files))]
    assert all(np.array_equal(first, other) for other in others)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 0.5, 0.9])
def test_a_truncated_photograph_is_a_clear_error_and_never_a_grey_image(fill, aws, photos, share):
    data = photos["china/0000.jpg"]
    bucket = fill({"a/cut.jpg": data[: int(len(data) * share)], "a/whole.jpg": data})
    folder = S3ImageFolder(bucket)
    with pytest.raises(DecodeError, match=rf"decoding s3://{bucket}/a/cut.jpg \(sample 0, "):
        folder[0]
    folder.on_error = "replace"
    assert np.array_equal(array(folder[0][0]), array(folder[1][0]))


BAD = {
    "text.jpg": b"Dear reader,\n",
    "page.jpg": b"<!DOCTYPE html><html><body>502 Bad Gateway</body></html>",
    "zeros.png": bytes(5000),
    "empty.webp": b"",
    "archive.tiff": b"PK\x03\x04" + bytes(100),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_other_files_under_an_images_name_say_which_through_the_loader(
    fill, aws, photos, name, num_workers
):
    bucket = fill({**photos, f"china/9{name}": BAD[name]})
    folder = S3ImageFolder(bucket, transform=array)
    loader = S3DataLoader(folder, batch_size=3, num_workers=num_workers)
    with pytest.raises(DecodeError, match=rf"s3://{bucket}/china/9{name} \(sample 4, "):
        list(loader)
    folder.on_error = "replace"
    loader = S3DataLoader(folder, batch_size=3, num_workers=num_workers)
    assert [len(targets) for _, targets in loader] == [3, 3, 3]


def test_the_limit_of_pixels_is_pillows(fill, aws, photos, monkeypatch):
    folder = S3ImageFolder(fill(photos))
    with monkeypatch.context() as patch:
        patch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
        with pytest.raises(DecodeError, match="DecompressionBomb"):
            folder[0]
    assert folder[0][0].size == (320, 280)
