from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_results import PathError
from ddp_results._paths import _problem, check_path


@pytest.mark.parametrize(
    "path",
    [
        "",
        "../x",
        "/etc/x",
        "a/../../x",
        "C:\\x",
        "C:x",
        "a\\b",
        "NUL",
        "a/nul.txt",
        "com1",
        "x" * 300,
        "é" * 200,
        "/".join(["x" * 100] * 11),
        "a\nb",
        "a\0b",
        "a\x7fb",
        "a//b",
        "a/",
        "./a",
        "a/./b",
        "a.",
        "a ",
        "\ud800",
        "_ddp/metrics/x",
        "_DDP/x",
    ],
)
def test_dangerous_path_is_refused_by_name(path: str) -> None:
    with pytest.raises(PathError, match="result path"):
        check_path(path)


@pytest.mark.parametrize(
    "path",
    [
        "worker/0/data-2026-01-01T10:00:00.000001.json",
        "a b?#%+&=.txt",
        "日本/é.json",
        ".hidden",
        "a..b",
        "console",
        "_ddpx/a",
        "com10",
    ],
)
def test_ordinary_path_is_accepted_as_it_is(path: str) -> None:
    assert check_path(path) == path


def test_path_must_be_text() -> None:
    with pytest.raises(PathError, match="must be a str, not int"):
        check_path(3)  # type: ignore[arg-type]


@given(st.text(alphabet="aN_ul.d1-/pcom", max_size=30))
def test_quick_check_accepts_nothing_that_the_close_one_refuses(path: str) -> None:
    reserved = path.split("/")[0].lower() == "_ddp"
    try:
        check_path(path)
    except PathError:
        assert _problem(path) is not None or reserved
    else:
        assert _problem(path) is None
        assert not reserved
