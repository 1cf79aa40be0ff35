from __future__ import annotations

import datetime as dt
import decimal
import enum
import fractions
import math
from typing import Any

import numpy as np
import pytest

from ddp_results import DaskResultsHandler, MemorySink, MetricError
from ddp_results._metrics import check_step, from_json, scalars, to_json
from ddp_results._record import Kind, Record, Source
from ddp_results._wire import Frame, pack_frame, unpack_frame


class Colour(enum.IntEnum):
    RED = 1


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (np.float32(0.5), 0.5),
        (np.float64(0.5), 0.5),
        (np.int64(3), 3),
        (np.bool_(True), True),
        (np.array([[2.5]]), 2.5),
        (np.datetime64("2026-01-02"), "2026-01-02"),
        (decimal.Decimal("1.5"), 1.5),
        (fractions.Fraction(1, 4), 0.25),
        (dt.datetime(2026, 1, 2, tzinfo=dt.UTC), "2026-01-02T00:00:00+00:00"),
        (dt.timedelta(minutes=1), 60.0),
        (Colour.RED, 1),
        (2**100, 2**100),
        (None, None),
        ("text", "text"),
        (math.inf, math.inf),
    ],
)
def test_value_becomes_a_plain_scalar(value: Any, plain: Any) -> None:
    (found,) = scalars({"x": value}).values()
    assert found == plain
    assert type(found) is type(plain)


@pytest.mark.parametrize(
    "value", [[1], {"a": 1}, np.zeros(3), np.zeros(0), 1j, np.complex64(1j), b"x", object()]
)
def test_what_is_no_scalar_is_refused_by_its_name(value: Any) -> None:
    with pytest.raises(MetricError, match="'train/loss'"):
        scalars({"train/loss": value})


def test_shape_of_an_array_is_said() -> None:
    with pytest.raises(MetricError, match=r"of shape \(3, 2\)"):
        scalars({"x": np.zeros((3, 2))})


def test_tensor_of_one_element_is_a_number() -> None:
    torch = pytest.importorskip("torch")
    tensors = {
        "a": torch.tensor(1.5, requires_grad=True),
        "b": torch.tensor([[3]]),
        "c": torch.tensor(0.5, dtype=torch.bfloat16),
    }
    assert scalars(tensors) == {"a": 1.5, "b": 3, "c": 0.5}
    with pytest.raises(MetricError, match="'d'"):
        scalars({"d": torch.zeros(4)})


def test_step_is_a_whole_number() -> None:
    assert [check_step(step) for step in (3, np.int32(3), 3.0, None)] == [3, 3, 3, None]
    for wrong in (3.5, "3", True):
        with pytest.raises(MetricError, match="step"):
            check_step(wrong)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 2**200, -(2**64), 0.1, "é\ud83d"])
def test_odd_values_survive_the_wire_and_json(value: Any) -> None:
    if isinstance(value, str):
        value = "é😀"
    source = Source("u", 0, 0, "h", 1, "")
    record = Record(Kind.METRICS, 1.0, (1, {"x": value}), 0)
    frame = unpack_frame(pack_frame(Frame("run", source, 0, 1, [record])))
    found = frame.records[0].fields[1]["x"]
    back = from_json(to_json(value))
    for each in (found, back):
        assert each == value or (math.isnan(each) and math.isnan(value))


def test_metrics_are_checked_in_the_line_that_logs_them() -> None:
    handler = DaskResultsHandler()
    with pytest.raises(MetricError, match="'loss'"):
        handler.log_metrics({"loss": [1, 2]})
    with pytest.raises(TypeError, match=r"json\.dumps"):
        handler.submit_result("a", {"b": 1})  # type: ignore[arg-type]
    handler.process_results(MemorySink())


@pytest.mark.parametrize("metrics", [{"a": "\ud800"}, {"\udcff": 1.0}, {"a": 10**5000}])
def test_what_no_wire_can_carry_is_refused_in_the_line_that_logs_it(metrics: Any) -> None:
    with pytest.raises(MetricError, match="metric"):
        scalars(metrics)
