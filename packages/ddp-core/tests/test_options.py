from __future__ import annotations

from typing import Any

import pytest

from ddp_core import LaunchOptions
from ddp_core.errors import JobCancelledError, RankFailedError, WorkerLostError
from ddp_core.options import as_options


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"n_ranks": -1}, ValueError),
        ({"n_ranks": "2"}, TypeError),
        ({"n_ranks": True}, TypeError),
        ({"ranks_per_worker": 0}, ValueError),
        ({"port": 70000}, ValueError),
        ({"max_restarts": -1}, ValueError),
        ({"backend": 3}, TypeError),
        ({"workers": "tcp://a:1"}, TypeError),
        ({"workers": []}, ValueError),
        ({"pg_timeout_s": 0}, ValueError),
        ({"start_timeout_s": float("nan")}, ValueError),
        ({"wait_timeout_s": None}, TypeError),
        ({"restart_on": "sometimes"}, ValueError),
        ({"env": {"A": 1}}, TypeError),
        ({"env": None}, TypeError),
        ({"env": {"A": "b\0c"}}, ValueError),
    ],
)
def test_a_wrong_value_is_refused_where_it_is_written(
    wrong: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error, match=next(iter(wrong))):
        LaunchOptions(**wrong)


def test_options_of_another_type_are_refused_with_the_names_of_the_fields() -> None:
    with pytest.raises(TypeError, match="n_ranks"):
        as_options({"n_ranks": 2})


def test_only_the_loss_of_a_worker_restarts_by_default() -> None:
    options = LaunchOptions()
    assert options.restarts_after(WorkerLostError("x"))
    assert not options.restarts_after(RankFailedError("x"))
    assert LaunchOptions(restart_on="any").restarts_after(RankFailedError("x"))
    assert not LaunchOptions(restart_on="any").restarts_after(JobCancelledError("x"))
