import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_s3data import Index, IndexFileError
from ddp_s3data._index import IndexBuilder, KeyView

MD5 = "0123456789abcdef0123456789abcdef"
entries = st.lists(
    st.tuples(
        st.text(min_size=1, max_size=20),
        st.integers(0, 2**40),
        st.sampled_from([MD5, f"{MD5}-17", "", "opaque", MD5.upper(), f"{MD5}-x"]),
    ),
    max_size=30,
)


def build(items, prefix="p/"):
    builder = IndexBuilder("bucket", prefix)
    half = len(items) // 2
    for part in (items[:half], items[half:]):
        builder.add(
            [prefix + k for k, _, _ in part], [s for _, s, _ in part], [e for _, _, e in part]
        )
    return builder.build()


def content(index):
    return [(index.key(i)[2:], index.size(i), index.etag(i)) for i in range(len(index))]


@given(entries)
def test_an_index_returns_what_was_put_in(items):
    index = build(items)
    assert content(index) == items
    assert list(index.relative_keys()) == [key for key, _, _ in items]


@given(entries)
def test_an_index_survives_pickle(items):
    assert content(pickle.loads(pickle.dumps(build(items)))) == items


@given(entries, st.data())
def test_a_part_of_an_index_is_that_part(items, data):
    order = data.draw(st.lists(st.integers(0, len(items) - 1), max_size=40)) if items else []
    assert content(build(items).take(order)) == [items[i] for i in order]


def test_builders_can_be_joined():
    first, second = IndexBuilder("b", ""), IndexBuilder("b", "")
    first.add(["a"], [1], ["odd"])
    second.add(["b", "c"], [2, 3], [MD5, "odder"])
    first.extend(second)
    index = first.build()
    assert [index.etag(i) for i in range(3)] == ["odd", MD5, "odder"]
    assert list(KeyView(index)) == ["a", "b", "c"]


def test_an_index_is_saved_and_loaded(tmp_path):
    index = build([("ü/1.png", 5, MD5)])
    index.save(tmp_path / "i")
    loaded = Index.load(tmp_path / "i")
    assert (loaded.bucket, loaded.prefix, content(loaded)) == ("bucket", "p/", content(index))
    assert [path.name for path in tmp_path.iterdir()] == ["i"]


@pytest.mark.parametrize("damage", [b"", b"nonsense", "cut", "flip"])
def test_a_damaged_file_is_a_clear_error(tmp_path, damage):
    file = tmp_path / "i"
    build([(f"{i}.png", i, MD5) for i in range(100)]).save(file)
    whole = file.read_bytes()
    file.write_bytes(
        {"cut": whole[: len(whole) // 2], "flip": whole[:60] + b"XXXX" + whole[64:]}.get(
            damage, damage
        )
    )
    with pytest.raises(IndexFileError, match="python -m ddp_s3data index"):
        Index.load(file)


def test_a_million_keys_are_small():
    """At most 64 bytes a key beyond its text."""
    builder = IndexBuilder("bucket", "train/")
    text = 0
    for group in range(1000):
        keys = [f"train/n{group:08d}/n{group:08d}_{i * 7919 % 100_000}.JPEG" for i in range(1000)]
        text += sum(len(key) - 6 for key in keys)
        digest = f"{group:032x}"
        builder.add(keys, [110_000 + i for i in range(1000)], [digest] * 1000)
    index = builder.build()
    assert index.nbytes - text <= 64 * len(index)
    copy = pickle.loads(pickle.dumps(index))
    assert copy.key(999_999) == index.key(999_999)


def test_a_view_is_a_read_only_list():
    view = KeyView(build([("a", 1, ""), ("b", 2, ""), ("c", 3, "")]))
    assert view[0] == "p/a"
    assert view[-1] == "p/c"
    assert view[1:] == ["p/b", "p/c"]
    assert view == ["p/a", "p/b", "p/c"]
    assert view.index("p/b") == 1
    assert "p/c" in view
    assert "3 items" in repr(view)
    with pytest.raises(IndexError):
        view[3]
