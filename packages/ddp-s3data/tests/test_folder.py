import io
import logging
import os

import numpy as np
import pytest
from conftest import pixel, png
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from ddp_s3data import IMG_EXTENSIONS, DecodeError, EmptyDatasetError, S3ImageFolder, S3Options
from ddp_s3data.testing import MemoryStore

TREE = {
    "root/cat/1.png": png(1),
    "root/cat/deep/er/2.PNG": png(2),
    "root/cat/deep/0.png": png(3),
    "root/cat/deep-er/0.png": png(4),
    "root/cat/z.png": png(5),
    "root/cat-like/3.jpeg": png(6),
    "root/dog/4.png": png(7),
    "root/dog/": b"",
    "root/dog/.DS_Store": b"x",
    "root/dog/_SUCCESS": b"",
    "root/dog/Thumbs.db": b"x",
    "root/dog/notes.txt": b"x",
    "root/readme.png": png(8),
    "root2/bird/9.png": png(9),
}
IN_ORDER = ["cat/1.png", "cat/z.png", "cat/deep/0.png", "cat/deep-er/0.png", "cat/deep/er/2.PNG"]


@pytest.fixture
def tree(fill, aws):
    return fill(TREE)


def test_a_folder_has_torchvisions_attributes(tree):
    folder = S3ImageFolder(tree, "root")
    assert folder.classes == ["cat", "cat-like", "dog"]
    assert folder.class_to_idx == {"cat": 0, "cat-like": 1, "dog": 2}
    assert folder.targets == [0, 0, 0, 0, 0, 1, 2]
    assert folder.extensions == IMG_EXTENSIONS
    assert folder.samples == folder.imgs
    assert folder.samples[0] == (f"s3://{tree}/root/cat/1.png", 0)
    assert [pixel(image) for image, _ in folder] == [1, 5, 3, 4, 2, 6, 7]
    assert folder.all_files[0] == "root/cat/1.png"
    assert "Number of datapoints: 7" in repr(folder)


def test_samples_are_sorted_by_class_then_directory_then_name(tree):
    files = [key.removeprefix("root/") for key in S3ImageFolder(tree, "root").all_files]
    assert files[:5] == IN_ORDER


@pytest.mark.parametrize("anon", [False, None])
def test_positional_arguments_are_in_the_order_of_0_2_2(tree, anon):
    folder = S3ImageFolder(tree, "root/", np.asarray, str, anon)
    image, target = folder[0]
    assert image.shape == (8, 8, 3)
    assert target == "0"
    assert (folder.s3_bucket, folder.s3_prefix, folder.anon) == (tree, "root/", False)


def test_an_address_may_be_given_whole(tree):
    assert len(S3ImageFolder(f"s3://{tree}/root", transform=np.asarray)) == 7
    with pytest.raises(TypeError, match=r"transform=\.\.\."):
        S3ImageFolder(f"s3://{tree}/root", np.asarray)


def test_class_from_parent_is_the_rule_of_0_2_2(tree, caplog):
    with caplog.at_level(logging.INFO, "ddp_s3data"):
        folder = S3ImageFolder(tree, "root", class_from="parent")
    assert "4 files are no images" in caplog.text
    assert folder.classes == ["cat", "cat-like", "deep", "deep-er", "dog", "er", "root"]
    keys = [key for key in sorted(TREE) if key.startswith("root/")]
    wanted = [key for key in keys if key.lower().endswith((".png", ".jpeg"))]
    assert list(folder.all_files) == wanted
    parents = [os.path.basename(os.path.dirname(key)) for key in wanted]
    assert [folder.classes[target] for target in folder.targets] == parents


def test_wrong_arguments_are_errors_at_once(tree):
    with pytest.raises(ValueError, match="class_from"):
        S3ImageFolder(tree, "root", class_from="last")
    with pytest.raises(ValueError, match="not both"):
        S3ImageFolder(tree, "root", extensions=".png", is_valid_file=bool)


def test_no_class_is_torchvisions_error(fill, aws):
    with pytest.raises(FileNotFoundError, match="Couldn't find any class folder"):
        S3ImageFolder(fill({"a.png": png(1)}))


def test_a_class_without_an_image_is_torchvisions_error(fill, aws):
    bucket = fill({"a/1.png": png(1), "b/": b"", "c/x.txt": b"x"})
    with pytest.raises(FileNotFoundError, match=r"no valid file for the classes b, c.*\.webp"):
        S3ImageFolder(bucket)
    folder = S3ImageFolder(bucket, allow_empty=True)
    assert folder.classes == ["a", "b", "c"]
    assert folder.targets == [0]


def test_no_image_at_all_is_an_error_for_parents_too(fill, aws):
    with pytest.raises(EmptyDatasetError, match="is an image"):
        S3ImageFolder(fill({"a/1.txt": b"x"}), class_from="parent")


def test_a_loader_gets_a_file_with_the_address_as_name(tree):
    def loader(file):
        return file.name, Image.open(file).size

    folder = S3ImageFolder(tree, "root", loader=loader)
    assert folder[0] == ((f"s3://{tree}/root/cat/1.png", (8, 8)), 0)
    assert folder.loader is loader


@pytest.mark.parametrize("data", [b"no image at all", png(1, 64)[:-40], b"\x89PNG\r\n\x1a\n"])
def test_what_is_no_image_is_a_clear_error_or_replaced(fill, aws, data):
    bucket = fill({"a/0.jpg": data, "a/1.png": png(1)})
    with pytest.raises(
        DecodeError, match=rf"decoding s3://{bucket}/a/0.jpg \(sample 0, "
    ) as caught:
        S3ImageFolder(bucket)[0]
    assert isinstance(caught.value, OSError)
    assert caught.value.__cause__ is not None
    image, _ = S3ImageFolder(bucket, on_error="replace")[0]
    assert pixel(image) == 1


def test_a_bomb_of_pixels_is_a_clear_error(fill, aws):
    out = io.BytesIO()
    Image.new("1", (20_000, 10_000)).save(out, "PNG")
    with pytest.raises(DecodeError, match="DecompressionBomb"):
        S3ImageFolder(fill({"a/huge.png": out.getvalue()}))[0]


def save(image, kind, **how):
    out = io.BytesIO()
    image.save(out, kind, **how)
    return out.getvalue()


def kinds():
    grey = Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8) * 4)
    colour = Image.merge("RGB", (grey, grey.rotate(90), grey.rotate(180)))
    deep = Image.fromarray((np.arange(64, dtype=np.uint16) * 1000).reshape(8, 8))
    exif = Image.Exif()
    exif[0x0112] = 6
    return {
        "grey.png": save(grey, "PNG"),
        "palette.png": save(colour.quantize(16), "PNG"),
        "alpha.png": save(Image.merge("RGBA", (*colour.split(), grey)), "PNG"),
        "cmyk.jpg": save(colour.convert("CMYK"), "JPEG"),
        "deep.png": save(deep, "PNG"),
        "rotated.jpg": save(colour, "JPEG", exif=exif),
        "animated.webp": save(colour, "WEBP", save_all=True, append_images=[grey.convert("RGB")]),
        "black.pgm": save(grey, "PPM"),
        "bits.bmp": save(grey.convert("1"), "BMP"),
        "float.tiff": save(grey.convert("F"), "TIFF"),
    }


def test_every_kind_of_image_has_the_pixels_of_pillows_rgb(fill, aws):
    files = kinds()
    folder = S3ImageFolder(fill({f"a/{name}": data for name, data in files.items()}))
    for (image, _), name in zip(folder, sorted(files), strict=True):
        wanted = Image.open(io.BytesIO(files[name])).convert("RGB")
        assert image.mode == "RGB"
        assert np.array_equal(np.asarray(image), np.asarray(wanted)), name


def test_every_kind_of_image_has_the_pixels_of_torchvision(fill, aws, tmp_path):
    datasets = pytest.importorskip("torchvision.datasets")
    files = kinds()
    mirror(tmp_path, {f"a/{name}": data for name, data in files.items()})
    ours = S3ImageFolder(fill({f"a/{name}": data for name, data in files.items()}))
    for (mine, _), (theirs, _) in zip(ours, datasets.ImageFolder(tmp_path), strict=True):
        assert np.array_equal(np.asarray(mine), np.asarray(theirs))


def mirror(root, objects):
    for key, data in objects.items():
        path = root / key
        if key.endswith("/"):
            path.mkdir(parents=True, exist_ok=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)


names = st.sampled_from(["a", "b", "a-b", "a.b", "A", "é", "a b", "z", "0", "a+", "~"])
files = st.sampled_from(["1.png", "2.JPG", "x.txt", ".DS_Store", "a.png.bak", "b.tiff", "é.webp"])
paths = st.builds(lambda parts, name: "/".join([*parts, name]), st.lists(names, max_size=3), files)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.sets(paths, min_size=1, max_size=25), st.booleans())
def test_parity_with_torchvision_on_random_trees(tmp_path_factory, keys, allow_empty):
    datasets = pytest.importorskip("torchvision.datasets")
    root = tmp_path_factory.mktemp("tree")
    mirror(root, dict.fromkeys(keys, b"x"))
    prefix = "some/prefix/"
    store = MemoryStore({prefix + key: b"x" for key in keys})

    def content(folder, begin):
        return folder.classes, [(path.removeprefix(begin), t) for path, t in folder.samples]

    try:
        theirs = content(datasets.ImageFolder(root, allow_empty=allow_empty), f"{root}/")
    except FileNotFoundError as error:
        theirs = str(error).partition(" in ")[0].partition(". Supp")[0]
    try:
        ours = content(folder_of(store, prefix, allow_empty), f"s3://bucket/{prefix}")
    except FileNotFoundError as error:
        ours = str(error).partition(" in ")[0]
    assert ours == theirs


def folder_of(store, prefix, allow_empty):
    """A folder over a store in memory: listed by the real lister, given as an index."""
    from ddp_s3data._listing import list_index

    async def opener(bucket, options):
        return store

    index = list_index("bucket", prefix, S3Options(), opener)
    return S3ImageFolder("bucket", prefix, index=index, allow_empty=allow_empty)
