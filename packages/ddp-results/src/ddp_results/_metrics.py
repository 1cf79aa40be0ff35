"""Turn what users log as a metric into a plain number, text, flag or None."""

from __future__ import annotations

import datetime as dt
import decimal
import math
from collections.abc import Mapping
from typing import Any

from ddp_results.errors import MetricError

Scalar = float | int | str | bool | None

_MAX_BITS = 10_000  # Python refuses to write integers of more than 4300 digits

_PLAIN = frozenset((float, int, str, bool, type(None)))


def scalars(metrics: Mapping[str, Any]) -> dict[str, Scalar]:
    """Return `metrics` with every value as a plain scalar.

    Tensors and arrays of one element (any device, any dtype), numpy scalars, `Decimal` and
    `Fraction` become numbers, dates and times ISO 8601 text, durations seconds. NaN and infinities
    stay what they are. Reading a CUDA tensor waits for the device, as `.item()` does.

    Raises:
        MetricError: for a value that is not one scalar, or a key that is not text; it names the
            key, the type and, where there is one, the shape.
    """
    if type(metrics) is not dict and not isinstance(metrics, Mapping):
        raise MetricError(f"metrics must be a mapping of name to number, not {_kind(metrics)}")
    plain: dict[str, Scalar] = {}
    for key, value in metrics.items():
        if type(key) is not str and not isinstance(key, str):
            raise MetricError(f"metric name {key!r} must be a str, not {type(key).__name__}")
        scalar = value if type(value) in _PLAIN else _scalar(key, value)
        if type(scalar) is not float or not key.isascii():
            _check_sendable(key, scalar)
        plain[key] = scalar
    return plain


def _check_sendable(key: str, value: Scalar) -> None:
    if type(value) is int and value.bit_length() > _MAX_BITS:
        raise MetricError(f"metric {key!r} is an integer of {value.bit_length()} bits")
    for text in (key, value):
        if isinstance(text, str) and not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise MetricError(
                    f"metric {key!r} holds a lone surrogate, which is not valid Unicode: {text!r};"
                    " use text.encode('utf-8', 'replace').decode()"
                ) from error


def check_step(step: object) -> int | None:
    """Return `step` as an int, or None.

    Raises:
        MetricError: if it is not a whole number.
    """
    if step is None or (type(step) is int and step.bit_length() < 64):
        return step
    if type(step) is int:
        raise MetricError(f"step must be below 2**63, not a number of {step.bit_length()} bits")
    value = _scalar("step", step)  # an int subclass, a float or a tensor
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise MetricError(f"step must be a whole number or None, not {step!r}")
    return value


def _scalar(key: str, value: Any) -> Scalar:
    if isinstance(value, bool | int | float | str):  # subclasses: enums, numpy's float64
        return _base(value)
    if isinstance(value, dt.datetime | dt.date | dt.time):
        return value.isoformat()
    if isinstance(value, dt.timedelta):
        return value.total_seconds()
    if isinstance(value, decimal.Decimal):
        return float(value)
    if callable(getattr(value, "item", None)):
        return _from_array(key, value)
    if hasattr(type(value), "__float__") and not isinstance(value, complex):
        return float(value)
    raise MetricError(
        f"metric {key!r} is {_kind(value)}; log a single number, or submit_result() the whole"
    )


def _base(value: bool | int | float | str) -> Scalar:
    for base in (bool, int, float, str):
        if isinstance(value, base):
            return base(value) if base is not str else str.__str__(value)
    return value


def _from_array(key: str, value: Any) -> Scalar:
    count = value.numel() if callable(getattr(value, "numel", None)) else getattr(value, "size", 1)
    if count != 1:
        raise MetricError(
            f"metric {key!r} is {_kind(value)} of shape {tuple(value.shape)}; log a single number,"
            f" for example {key}.mean()"
        )
    item = value.item()
    if type(item) is type(value):
        raise MetricError(f"metric {key!r} is {_kind(value)}, which is no number")
    return item if type(item) in _PLAIN else _scalar(key, item)


def _kind(value: object) -> str:
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def to_json(value: Scalar) -> Any:
    """Return `value` as valid JSON holds it: NaN and infinities as `{"$float": "nan"}`."""
    if type(value) is float and not math.isfinite(value):
        return {"$float": repr(value)}
    return value


def from_json(value: Any) -> Scalar:
    """Undo `to_json`."""
    if type(value) is dict:
        return float(value["$float"])
    plain: Scalar = value
    return plain


def as_float(value: float) -> float:
    """Return a number as a float; infinity for an integer beyond all floats."""
    try:
        return float(value)
    except OverflowError:
        return math.copysign(math.inf, 1 if value > 0 else -1)
