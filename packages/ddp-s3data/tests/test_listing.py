import unicodedata
from urllib.parse import unquote_plus

import pytest
from conftest import png

from ddp_s3data import (
    AccessDeniedError,
    BucketNotFoundError,
    CredentialsError,
    EmptyDatasetError,
    IndexFileError,
    S3Dataset,
    S3Options,
)
from ddp_s3data._direct import parse_page
from ddp_s3data._listing import list_index
from ddp_s3data.testing import MemoryStore
from fault_proxy import Fault

ODD = [
    "with space.png",
    "plus+plus.png",
    "per%20cent%.png",
    "question?.png",
    "hash#.png",
    "amp&eq=.png",
    "colon:at@.png",
    "tilde~'quote'(bracket)!*,;.png",
    "composed-é.png",
    "decomposed-é.png",
    "日本語/ключ.png",
    "tab\tin.png",
    "<xml>&amp;.png",
    *(unicodedata.normalize(form, "the same name é.png") for form in ("NFC", "NFD")),
    "/".join(letter * 250 for letter in "xyzw") + ".png",  # 1,009 bytes with what is before it
]


def keys_of(bucket, prefix="", **settings):
    index = list_index(bucket, prefix, S3Options(**settings))
    return [index.key(i) for i in range(len(index))]


@pytest.mark.parametrize("transport", ["auto", "aiobotocore"])
def test_odd_keys_are_listed_and_read(fill, aws, transport):
    bucket = fill({f"d/{key}": key.encode() for key in ODD})
    dataset = S3Dataset(bucket, "d", options=S3Options(transport=transport))
    assert list(dataset.all_files) == sorted(f"d/{key}" for key in ODD)
    for found in dataset:
        assert f"d/{found.data.decode()}" == found.key
        assert found.address == f"s3://{bucket}/{found.key}"


def test_a_prefix_is_a_directory_and_never_matches_siblings(fill, aws):
    bucket = fill(dict.fromkeys(["train/a", "train/b/c", "train2/x", "train.txt", "tra"], b"x"))
    for prefix in ("train", "train/"):
        assert keys_of(bucket, prefix) == ["train/a", "train/b/c"]


def test_an_empty_prefix_is_the_whole_bucket(fill, aws):
    bucket = fill(dict.fromkeys(["a", "b/c"], b"x"))
    assert keys_of(bucket) == ["a", "b/c"]
    assert list(S3Dataset(f"s3://{bucket}").all_files) == ["a", "b/c"]


def test_more_than_a_thousand_keys_are_listed_in_order(fill, aws):
    nested = [f"root/c{i % 5}/{'deep/' * (i % 2)}{i:05d}" for i in range(1010)]
    keys = sorted([*nested, "root/z", "root/b"])
    bucket = fill(dict.fromkeys(keys, b"x"))
    for transport in ("auto", "aiobotocore"):
        assert keys_of(bucket, "root", transport=transport) == keys


def test_more_than_a_thousand_keys_in_one_directory_are_listed_page_by_page():
    objects = {f"flat/{i:05d}": b"" for i in range(2500)}

    async def opener(bucket, options):
        return MemoryStore(objects)

    index = list_index("flat", "flat", S3Options(), opener)
    assert [index.key(i) for i in range(len(index))] == sorted(objects)


def test_very_many_directories_are_listed_in_sequence():
    objects = {f"{i:05d}/x": b"" for i in range(5000)}
    calls = []

    class Counting(MemoryStore):
        async def list(self, prefix, *, delimiter="", token=None, limit=1000):
            calls.append(prefix)
            return await super().list(prefix, delimiter=delimiter, token=token, limit=limit)

    async def opener(bucket, options):
        return Counting(objects)

    index = list_index("many", "", S3Options(), opener)
    assert [index.key(i) for i in range(len(index))] == sorted(objects)
    assert len(calls) < 15


def test_a_server_that_lists_too_much_is_not_believed():
    class Generous(MemoryStore):
        async def list(self, prefix, *, delimiter="", token=None, limit=1000):
            return await super().list("", delimiter=delimiter, token=token, limit=limit)

    async def opener(bucket, options):
        return Generous({"train/a": b"", "train2/b": b""})

    index = list_index("generous", "train", S3Options(), opener)
    assert [index.key(i) for i in range(len(index))] == ["train/a"]


def test_an_empty_place_is_a_clear_error(fill, aws):
    bucket = fill({"a/b": b"x"})
    with pytest.raises(EmptyDatasetError, match=f"s3://{bucket}/c/: no objects .*check the prefix"):
        S3Dataset(bucket, "c")


def test_an_empty_bucket_is_a_clear_error(fill, aws):
    with pytest.raises(EmptyDatasetError, match="the bucket is empty"):
        S3Dataset(fill({}))


def test_a_missing_bucket_is_a_clear_error(s3, aws):
    with pytest.raises(BucketNotFoundError, match=r"s3://no-such-bucket/.*bucket's name"):
        S3Dataset("no-such-bucket", "x")


def test_no_credentials_is_an_error_that_names_anon(no_credentials):
    with pytest.raises(
        CredentialsError, match=r"s3://public-bucket: .*AWS_ACCESS_KEY_ID.*anon=True"
    ):
        S3Dataset("public-bucket")


def test_an_anonymous_bucket_is_read_with_anon(admin, no_credentials, proxy):
    admin.create("public-bucket", {"a.png": png(1)})
    options = S3Options(endpoint_url=proxy.endpoint_url)
    dataset = S3Dataset("public-bucket", anon=True, options=options)
    assert dataset[0].data == png(1)
    assert not any("authorization" in request.headers for request in proxy.requests)


def test_a_private_bucket_with_anon_is_a_clear_error(fill, no_credentials):
    with pytest.raises(AccessDeniedError, match="leave out anon=True"):
        S3Dataset(fill({"a": b"x"}), anon=True)


def test_wrong_keys_are_a_clear_error_without_the_keys(s3, fill, no_credentials):
    wrong = S3Options(access_key_id=s3.access_key, secret_access_key="guessed-wrong")
    with pytest.raises(CredentialsError, match="secret key") as caught:
        S3Dataset(fill({"a": b"x"}), options=wrong)
    assert "guessed-wrong" not in str(caught.value)


def test_an_unknown_profile_is_a_clear_error(no_credentials):
    with pytest.raises(CredentialsError, match="gone"):
        S3Dataset("bucket", options=S3Options(profile="gone"))


def test_a_profile_is_used(s3, fill, no_credentials, tmp_path, monkeypatch):
    file = tmp_path / "credentials"
    file.write_text(
        f"[mine]\naws_access_key_id={s3.access_key}\naws_secret_access_key={s3.secret_key}\n"
    )
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    bucket = fill({"a": b"x"})
    assert S3Dataset(bucket, options=S3Options(profile="mine"))[0].data == b"x"


def test_explicit_keys_are_used(s3, fill, no_credentials):
    options = S3Options(access_key_id=s3.access_key, secret_access_key=s3.secret_key)
    assert S3Dataset(fill({"a": b"x"}), options=options)[0].data == b"x"


def test_a_listing_that_fails_in_passing_is_repeated(fill, through_proxy, proxy):
    bucket = fill({"a": b"x"})
    proxy.script([Fault(status=503), Fault(truncate_after_bytes=20), Fault(hang_up=True)])
    assert len(S3Dataset(bucket, options=through_proxy)) == 1


@pytest.mark.parametrize("prefix", ["/a", "./a", "a//", "//a/./"])
def test_a_prefix_that_is_a_path_is_answered_with_the_one_meant(fill, aws, prefix):
    with pytest.raises(EmptyDatasetError, match=r"did you mean 'a/'\?"):
        S3Dataset(fill({"a/b": b"x"}), prefix)


def test_an_index_that_cannot_be_written_is_refused_before_listing(aws, tmp_path):
    file = tmp_path / "missing" / "index"
    with pytest.raises(IndexFileError, match=f"written to {file}.*another file"):
        S3Dataset("never-listed", index=file)


def test_an_index_file_is_written_once_and_then_read(fill, through_proxy, proxy, tmp_path):
    bucket = fill({"d/a": b"x", "d/b": b"y"})
    file = tmp_path / "index"
    S3Dataset(bucket, "d", options=through_proxy, index=file)
    listed = len(proxy.requests)
    again = S3Dataset(bucket, "d/", options=through_proxy, index=file)
    assert len(proxy.requests) == listed
    assert [again[i].data for i in range(2)] == [b"x", b"y"]
    with pytest.raises(IndexFileError, match="not of s3://"):
        S3Dataset(bucket, "other", options=through_proxy, index=file)


@pytest.mark.parametrize("key", ["a%00b", "a%0Ab", "a+b", "%C3", "e%CC%81", ""])
def test_encoded_keys_of_a_page_are_decoded_each_by_itself(key):
    names = ["x%2Fy", key, "%C3%A9"]
    body = "".join(f"<Contents><Key>{name}</Key><Size>1</Size></Contents>" for name in names)
    head = "<ListBucketResult><EncodingType>url</EncodingType>"
    page = parse_page(f"{head}{body}</ListBucketResult>".encode())
    assert page.keys == ["x/y", unquote_plus(key), "é"]
