"""Results straight from the ranks to S3."""

from __future__ import annotations

from typing import Any

from ddp_results._direct import DirectOutlet
from ddp_results._futures import FutureWatch
from ddp_results._outlet import Outlet
from ddp_results._submitting import SubmittingHandler
from ddp_results.handler import SINK_TIMEOUT_S, wait_for_futures
from ddp_results.sinks.s3 import S3Sink


class S3ResultsHandler(SubmittingHandler):
    """The calls of `DaskResultsHandler`, but each rank writes to S3 itself.

    No client is needed while the ranks run, no data passes through the scheduler. `flush` and the
    end of the process wait until everything is stored.

    Args:
        address: `s3://bucket/prefix`.
        sink_timeout_s: how long S3 may be out of reach.
        **options: `endpoint_url`, `region`, `profile`, `anon`, `requester_pays`, `addressing`.

    Raises:
        SinkUnavailableError: by the first submission of a process, if the bucket does not exist
            or may not be written to.
    """

    def __init__(
        self, address: str, *, sink_timeout_s: float = SINK_TIMEOUT_S, **options: Any
    ) -> None:
        self._sink = S3Sink(address, **options)
        self._sink_timeout_s = sink_timeout_s
        self._outlet_key = f"direct/{address}/{sorted(options.items())!r}"

    def process_results(
        self, prefix: Any = None, futures: Any = (), raise_errors: bool = True
    ) -> None:
        """Wait for the futures, so that code written for `DaskResultsHandler` works unchanged.

        Args:
            prefix: not used: results are where the handler's address says.
            futures: as for `DaskResultsHandler`.
            raise_errors: whether the first failure of a rank is raised, or logged.
        """
        del prefix
        wait_for_futures(FutureWatch(futures), raise_errors)

    def __repr__(self) -> str:
        return f"S3ResultsHandler('s3://{self._sink.bucket}/{self._sink.prefix}')"

    def _create_outlet(self) -> Outlet:
        address = f"s3://{self._sink.bucket}/{self._sink.prefix}"
        options = self._sink.options
        return DirectOutlet(lambda: S3Sink(address, options), sink_timeout_s=self._sink_timeout_s)
