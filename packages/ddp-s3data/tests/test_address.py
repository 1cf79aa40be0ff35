import pytest

from ddp_s3data._address import address, as_directory, quote_key, split_address


@pytest.mark.parametrize(
    ("given", "prefix", "wanted"),
    [
        ("bucket", "", ("bucket", "")),
        ("bucket", "a/b/", ("bucket", "a/b/")),
        (
            "arn:aws:s3:eu-west-1:1:accesspoint/p",
            "a",
            ("arn:aws:s3:eu-west-1:1:accesspoint/p", "a"),
        ),
        ("s3://bucket", "", ("bucket", "")),
        ("s3://bucket/", "", ("bucket", "")),
        ("s3://bucket", "a/", ("bucket", "a/")),
        ("s3://bucket/a b/c+d%20?e#f&g=h", "", ("bucket", "a b/c+d%20?e#f&g=h")),
        ("S3://bucket/A", "", ("bucket", "A")),
        ("s3://bucket//a", "", ("bucket", "/a")),
    ],
)
def test_an_address_is_split_at_the_first_slash_and_not_parsed_as_a_url(given, prefix, wanted):
    assert split_address(given, prefix) == wanted


@pytest.mark.parametrize(
    ("given", "prefix", "kind", "text"),
    [
        ("", "", ValueError, "no bucket name"),
        ("bucket/prefix", "", ValueError, "S3ImageFolder"),
        ("s3://", "", ValueError, "names no bucket"),
        ("My Bucket!", "", ValueError, "3 to 255 letters"),
        ("s3://b/x", "", ValueError, "3 to 255 letters"),
        ("arn:aws:s3:::bucket", "", ValueError, "write 'bucket'"),
        ("https://bucket.s3.amazonaws.com/x", "", ValueError, "no S3 address"),
        ("s3://bucket/a", "b", ValueError, "given twice"),
        (7, "", TypeError, "not int"),
        ("s3://bucket/a", print, TypeError, "transform=..."),
    ],
)
def test_a_wrong_address_is_an_error_that_says_how_to_write_it(given, prefix, kind, text):
    with pytest.raises(kind, match=text):
        split_address(given, prefix)


def test_a_prefix_ends_in_one_slash():
    assert [as_directory(each) for each in ("", "a", "a/", "a/b")] == ["", "a/", "a/", "a/b/"]


def test_keys_are_quoted_as_signature_version_4_wants():
    assert quote_key("a b/~x+%é.png") == "a%20b/~x%2B%25%C3%A9.png"
    assert address("b", "k ?") == "s3://b/k ?"
