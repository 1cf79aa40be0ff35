"""Results over Dask: ranks submit, `process_results` on the client stores."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import uuid
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ddp_results._channel import Channel, DaskChannel
from ddp_results._collector import Collector
from ddp_results._delivery import Delivery, is_transient
from ddp_results._futures import FutureWatch
from ddp_results._live import Display
from ddp_results._local_channel import LocalChannel
from ddp_results._locate import SchedulerAddress, is_worker_process, locate, of_client, of_clients
from ddp_results._outlet import Outlet
from ddp_results._sender import Sender
from ddp_results._submitting import SubmittingHandler
from ddp_results.errors import (
    CollectorBusyError,
    MissingRecordsError,
    NoClusterError,
    SinkError,
)
from ddp_results.sinks.base import Sink
from ddp_results.sinks.opening import Target, open_sink
from ddp_results.sinks.tee import TeeSink

logger = logging.getLogger("ddp_results")

_POLL_S = 0.02
_STOP_TIMEOUT_S = 45.0
_CLOSE_TIMEOUT_S = 5.0
SINK_TIMEOUT_S = 900.0
_running: set[str] = set()
_used: set[Sink] = set()
_running_lock = threading.Lock()


@dataclass(frozen=True)
class Delivered:
    """What `process_results` has stored.

    Attributes:
        n_records: metrics, results and parts of results.
        n_bytes: their payload.
        sources: the processes that submitted, in words.
        unfinished: processes that ended without a last word, with the number of records that
            came; whether they had submitted more cannot be known.
    """

    n_records: int = 0
    n_bytes: int = 0
    sources: list[str] = field(default_factory=list)
    unfinished: dict[str, int] = field(default_factory=dict)


class DaskResultsHandler(SubmittingHandler):
    """Carries results from the ranks of a run to the client.

    Create one on the client, give it to the ranks (as an argument, in a closure or as a global:
    it is a small, picklable value) and call `process_results` on the client.

    Args:
        pub_sub_key: names the run on the scheduler. A new name by default; the same name again
            continues, for example after the client was restarted.
        sink: where results go in addition to the prefix of `process_results`: a `Sink`, a folder
            or `s3://bucket/prefix`. To a bucket, ranks send results of 16 MiB and more straight,
            and only their place travels through Dask; through Dask if that fails.
        sink_timeout_s: how long a sink that cannot store (full disk, S3 out of reach) is tried
            again before it is given up.

    Raises:
        ValueError: for a key that is empty or no valid Unicode.
    """

    def __init__(
        self,
        pub_sub_key: str | None = None,
        *,
        sink: Target | None = None,
        sink_timeout_s: float = SINK_TIMEOUT_S,
    ) -> None:
        self.pub_sub_key = uuid.uuid4().hex if pub_sub_key is None else _check_key(str(pub_sub_key))
        self._outlet_key = f"dask/{self.pub_sub_key}"
        self._sink = None if sink is None else open_sink(sink)
        self._sink_timeout_s = sink_timeout_s
        self._carried: SchedulerAddress | None = None
        self._was_pickled = False
        self._has_own_key = pub_sub_key is None
        self._made_in_rank = "RANK" in os.environ or "TORCHELASTIC_RUN_ID" in os.environ

    def process_results(
        self, prefix: Target | None, futures: Any = (), raise_errors: bool = True
    ) -> Delivered:
        """Store what the ranks submit until all futures have ended; the call of 0.2.2.

        Blocks. May be called before, while or after the ranks run, and again after an
        interruption: what was not yet stored comes then.

        Args:
            prefix: a folder (results become `prefix/<path>`), `s3://bucket/prefix` or a sink;
                None for only the `sink` of the constructor.
            futures: the futures of the ranks, or the job of `ddp_core.launch`, which is followed
                through its restarts. Their client says which scheduler it is; without any, it is
                that of the current client.
            raise_errors: whether the first failure of a rank is raised. Everything submitted
                before it is stored first. If not, failures are logged and the other ranks go on.

        Raises:
            TypeError, ValueError: at the start, if the futures are none, or of several clusters.
            SinkUnavailableError: at the start, if a sink cannot be written to.
            NoClusterError, ChannelLostError, CollectorBusyError: at the start or later.
            MissingRecordsError: records were lost, which are named.
            SinkError: something could not be stored; everything else was.
            BaseException: what a rank raised.
        """
        with _alone(self.pub_sub_key):
            return self._process(prefix, FutureWatch(futures), raise_errors)

    def _process(self, prefix: Target | None, watch: FutureWatch, raise_errors: bool) -> Delivered:
        open_channel = self._channel_factory(of_clients(watch.clients) or locate(self._carried))
        sinks = self._open_sinks(prefix)
        delivery = Delivery(sinks, sink_timeout_s=self._sink_timeout_s)
        delivery.start()
        collector = Collector(self.pub_sub_key, open_channel, delivery)
        display = Display(self.pub_sub_key, collector, delivery, watch)
        try:
            collector.start()
            with display:
                self._collect(collector, delivery, watch, display, raise_errors)
        finally:
            collector.stop(_STOP_TIMEOUT_S)
            delivery.stop(1.0)
            not_closed = _close(sinks, given_up=delivery.dead)
        return _conclude(collector, delivery, watch, raise_errors, not_closed)

    def __getstate__(self) -> dict[str, Any]:
        """Carry the scheduler's address, for places from which Dask does not find it."""
        return {**self.__dict__, "_carried": of_client() or self._carried, "_was_pickled": True}

    def __repr__(self) -> str:
        return f"DaskResultsHandler({self.pub_sub_key!r})"

    def _collect(
        self,
        collector: Collector,
        delivery: Delivery,
        watch: FutureWatch,
        display: Display,
        raise_errors: bool,
    ) -> None:
        while watch.n_pending and not _broken(collector, delivery):
            for error in watch.poll():
                if not raise_errors:
                    logger.error("a rank failed, the others go on", exc_info=error)
            if raise_errors and watch.first_failure is not None:
                break
            display.tick()
            collector.wait_finished(_POLL_S)
        collector.finish("" if watch.n_pending else watch.job_id)
        while not _broken(collector, delivery) and not collector.wait_finished(_POLL_S):
            display.tick()

    def _open_sinks(self, prefix: Target | None) -> list[Sink]:
        if prefix == "":
            raise ValueError("the prefix is empty; for the current folder give '.'")
        targets: list[Target] = [target for target in (prefix, self._sink) if target is not None]
        if not targets:
            raise ValueError(
                "nowhere to store results: give process_results a prefix, or the handler a sink"
            )
        sinks = list(TeeSink(targets).members)
        _use(sinks)
        try:
            for sink in sinks:
                sink.open()
        except BaseException:
            _close(sinks, given_up=sinks)
            raise
        return sinks

    def _channel_factory(self, where: SchedulerAddress | None) -> Any:
        key = self.pub_sub_key
        if where is not None and where.is_in_another_process:
            raise NoClusterError(
                f"results of {key!r}: the scheduler at {where.address} lives inside another"
                " process, ranks cannot reach it; use LocalCluster(), or"
                " Client(processes=False, protocol='tcp')"
            )
        if where is not None:
            return lambda: DaskChannel(key, where)
        if self._was_pickled or self._is_orphan:
            raise NoClusterError(
                f"results of {key!r}: no Dask scheduler can be found from process {os.getpid()};"
                " create a distributed.Client before the handler is sent to the ranks, or use"
                " S3ResultsHandler, which needs none"
            )
        logger.warning("no Dask client here: results of %r stay in this process", key)

        def local() -> Channel:
            return LocalChannel(key)

        return local

    @property
    def _is_orphan(self) -> bool:
        """Whether it was made here, in a rank or a Dask worker, with a key that nobody knows."""
        if self._was_pickled or not self._has_own_key:
            return False
        return self._made_in_rank or (is_worker_process() and of_client() is None)

    def _create_outlet(self) -> Outlet:
        if self._is_orphan:
            raise NoClusterError(
                "this handler was made in the rank, where its module was imported anew, so nobody"
                " reads what it is given: pass the handler to the function as an argument, or give"
                " it a key on both sides: DaskResultsHandler('my-run')"
            )
        members = () if self._sink is None else self._sink.members
        uploaders = (member.uploader() for member in members)
        uploader = next((each for each in uploaders if each is not None), None)
        return Sender(self.pub_sub_key, self._channel_factory(locate(self._carried)), uploader)


@contextlib.contextmanager
def _alone(key: str) -> Iterator[None]:
    """Refuse a second call in this process before it touches sinks that the first one uses."""
    with _running_lock:
        if key in _running:
            raise CollectorBusyError(
                f"process_results for {key!r} runs already in this process; use another key, or"
                " wait for that one"
            )
        _running.add(key)
    try:
        yield
    finally:
        with _running_lock:
            _running.discard(key)


def _use(sinks: Iterable[Sink]) -> None:
    """Take sinks for one call, until `_close`: each is used by one thread at a time."""
    with _running_lock:
        for sink in sinks:
            if sink in _used:
                raise CollectorBusyError(
                    f"{sink!r} is in use by another process_results; give each a sink of its own,"
                    " or the address"
                )
        _used.update(sinks)


def _check_key(key: str) -> str:
    try:
        key.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the key {key!r} is not valid Unicode") from error
    if not key:
        raise ValueError("the key of the run is empty; give it a name, or None for a new one")
    return key


def wait_for_futures(watch: FutureWatch, raise_errors: bool) -> None:
    """Return when all futures have ended, or at the first failure; or log each of them."""
    while watch.n_pending:
        for error in watch.poll():
            if not raise_errors:
                logger.error("a rank failed, the others go on", exc_info=error)
        if raise_errors and watch.first_failure is not None:
            return
        time.sleep(_POLL_S)


def _broken(collector: Collector, delivery: Delivery) -> bool:
    ended = collector.error or delivery.error
    return ended is not None or len(delivery.dead) == len(delivery.sinks)


def _close(sinks: Sequence[Sink], given_up: Container[Sink]) -> list[Exception]:
    """Close all; one that fails in passing is tried again, unless it was given up before."""
    problems: list[Exception] = []
    for sink in sinks:
        until = time.monotonic() + (0.0 if sink in given_up else _CLOSE_TIMEOUT_S)
        while True:
            try:
                sink.close()
            except Exception as error:  # noqa: BLE001 - the other sinks are closed, then it is raised
                if is_transient(error) and time.monotonic() < until:
                    time.sleep(_POLL_S)
                    continue
                problem = SinkError(f"{sink!r} could not be closed: {error}")
                problem.__cause__ = error
                problems.append(problem)
            break
    with _running_lock:
        _used.difference_update(sinks)
    return problems


def _conclude(
    collector: Collector,
    delivery: Delivery,
    watch: FutureWatch,
    raise_errors: bool,
    not_closed: Sequence[Exception],
) -> Delivered:
    """Return what was stored, or raise the first cause with the rest as notes."""
    streams = list(collector.streams.values())
    report = Delivered(
        n_records=sum(stream.n_records for stream in streams),
        n_bytes=sum(stream.n_bytes for stream in streams),
        sources=[stream.source.label for stream in streams],
        unfinished={s.source.label: s.received for s in streams if s.given_up},
    )
    for label, received in report.unfinished.items():
        logger.warning(
            "%s ended without a last word: its records up to %d are stored, later ones, if there"
            " were any, are lost",
            label,
            received,
        )
    if not collector.has_sources and watch.total:
        logger.warning(
            "no process has submitted anything to this handler; if the ranks did, they had another"
            " one: pass the handler to their function as an argument"
        )
    problems = _problems(collector, delivery, not_closed)
    failure = watch.first_failure if raise_errors else None
    if failure is not None:
        for problem in problems:
            failure.add_note(f"ddp-results: {problem}")
        raise failure
    if problems:
        for problem in problems[1:]:
            problems[0].add_note(f"ddp-results: {problem}")
        raise problems[0]
    return report


def _problems(
    collector: Collector, delivery: Delivery, not_closed: Sequence[Exception]
) -> list[Exception]:
    problems: list[Exception] = [] if collector.error is None else [collector.error]
    if delivery.error is not None:
        problems.append(SinkError(f"storing has ended too early: {delivery.error!r}"))
    problems += [
        SinkError(f"{sink!r} was given up, results are missing there: {error}")
        for sink, error in delivery.dead.items()
    ]
    missing: dict[str, list[tuple[int, int | None]]] = {
        stream.source.label: list(stream.missing)
        for stream in collector.streams.values()
        if stream.missing
    }
    if missing:
        problems.append(
            MissingRecordsError(f"records were lost on their way: {missing}", missing=missing)
        )
    if delivery.failures:
        label, path, error = delivery.failures[0]
        more = len(delivery.failures) - 1
        text = f"{label}: {path!r} could not be stored: {error}" + (
            f" (and {more} more)" if more else ""
        )
        problems.append(SinkError(text))
    return [*problems, *not_closed]
