"""The calls that a rank makes, common to all handlers."""

from __future__ import annotations

import abc
import time
from collections.abc import Mapping
from typing import Any

from ddp_results._metrics import check_step, scalars
from ddp_results._outbox import Retired
from ddp_results._outlet import Outlet, outlet_for, outlets, submit
from ddp_results._paths import check_path, is_plain
from ddp_results._payload import PART_BYTES, as_bytes, result_records
from ddp_results._record import Kind, Record, new_record
from ddp_results.checkpoints import checkpoint_records
from ddp_results.errors import FlushTimeoutError


class SubmittingHandler(abc.ABC):
    """Numbers what is submitted and hands it to the outlet of the process.

    Usable from any thread, from processes forked or spawned by a rank, and after pickling. What
    one process submits is stored in the order of its calls.
    """

    _outlet_key: str

    @abc.abstractmethod
    def _create_outlet(self) -> Outlet:
        """Return a new outlet for this process."""

    def submit_result(self, path: str, data: bytes | bytearray | memoryview | str) -> None:
        """Have `data` stored at `path`; text as UTF-8.

        Returns in microseconds, before the data is stored (`flush` waits for that), unless the
        sink is slower than the ranks: then it blocks until there is room. A later call with the
        same path replaces the result. A `bytes` object is kept, not copied.

        Raises:
            PathError: if no sink may write there.
            TypeError: if `data` is neither bytes nor text.
            UnicodeEncodeError: if it is text with a lone surrogate, which UTF-8 cannot hold.
            NoClusterError, ChannelLostError: if there is no way to deliver it.
            BackPressureError: if there was no room for ten minutes.
        """
        content = data if type(data) is bytes else as_bytes(path, data)
        if type(path) is not str or not is_plain(path):
            check_path(path)
        size = len(content)
        if size > PART_BYTES:
            self._submit(result_records(path, content))
        else:
            self._submit_one(Kind.RESULT, (path, content), size + len(path))

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Record one point: named numbers (or text, flags, dates) at a step.

        Takes what `float` takes, tensors and arrays of one element; NaN and infinities are kept.
        Blocks and raises as `submit_result` does.

        Raises:
            MetricError: for anything else; it names the key.
        """
        values = scalars(metrics)
        size = 16 + 9 * len(values) + len("".join(values))
        if type(step) is not int or step.bit_length() > 63:
            step = check_step(step)
        self._submit_one(Kind.METRICS, (step, values), size)

    def save_checkpoint(
        self,
        name: str,
        state_dict: Any,
        *,
        step: int | None = None,
        metrics: Mapping[str, Any] | None = None,
        keep_last: int | None = None,
        keep_best: str | None = None,
        best: str = "min",
    ) -> None:
        """Store a checkpoint below `checkpoints/<name>/`, by `torch.save`.

        The state is serialised before this returns, so training may go on to change it. The
        manifest is written last: a reader sees the whole checkpoint or the one before it. What
        `torch.load(weights_only=True)` would not read back is refused here.

        Args:
            name: one path segment, such as `step-100`.
            state_dict: tensors and plain containers, as from `model.state_dict()`.
            step: orders checkpoints; without it, the time does.
            metrics: recorded in the manifest, for choosing the best.
            keep_last: remove all checkpoints of the run except this one and so many last ones,
                after this one is durable. None keeps all, unless `keep_best` is given.
            keep_best: name of one of `metrics`; the checkpoint with the best value is kept as
                well. None as its value says that this checkpoint has none.
            best: whether the best value is the `min` or the `max`.

        Raises:
            ValueError: for bad arguments, for example `keep_best` without that metric.
            CheckpointError: if torch is missing, or cannot save or read back the state.
        """
        records = checkpoint_records(
            name,
            state_dict,
            step=step,
            metrics=metrics,
            keep_last=keep_last,
            keep_best=keep_best,
            best=best,
        )
        self._submit(records)

    def flush(self, timeout: float | None = None) -> None:
        """Return when everything that this process has submitted is durable in the sink.

        Args:
            timeout: seconds; None to wait as long as it takes, saying every 10 s for what.

        Raises:
            FlushTimeoutError: after `timeout`; nothing is lost by that.
        """
        outlet = outlets.get(self._outlet_key)
        if outlet is None:
            return
        try:
            done = outlet.flush(timeout)
        except Retired:  # it was empty
            return
        if not done:
            raise FlushTimeoutError(
                f"not everything is stored after {timeout} s; is process_results running, and its"
                " sink writable?"
            )

    def _submit_one(self, kind: Kind, fields: tuple[Any, ...], size_bytes: int) -> None:
        """Do what `_submit` does with one small record, in fewer calls: microseconds count here."""
        record = new_record(Record, (kind, time.time(), fields, size_bytes))
        outlet = outlets.get(self._outlet_key) or outlet_for(self._outlet_key, self._create_outlet)
        try:
            outlet.submit([record])
        except Retired:
            self._submit([record])

    def _submit(self, records: list[Record]) -> None:
        submit(self._outlet_key, self._create_outlet, records)
