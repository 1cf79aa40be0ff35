from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator

import pytest
from distributed import Client, LocalCluster

from ddp_results import _outlet
from fault_proxy import FaultProxy
from s3_server import S3Server


def wait_for(
    condition: Callable[[], object],
    timeout_s: float = 60,
    seen: Callable[[], object] = lambda: "the condition did not come",
) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, seen()
        time.sleep(0.02)


class Pending:
    """A future that ends when the test says so."""

    ended = False

    def done(self) -> bool:
        return self.ended

    def exception(self, timeout: float) -> None:
        del timeout


@pytest.fixture(scope="session")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(n_workers=2, threads_per_worker=2, dashboard_address=":0") as cluster:
        yield cluster


@pytest.fixture(scope="session")
def client(cluster: LocalCluster) -> Iterator[Client]:
    with Client(cluster) as client:
        yield client


@pytest.fixture(scope="session")
def s3() -> Iterator[S3Server]:
    with S3Server() as server, pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith("AWS_"):
                patch.delenv(name)
        for name, value in server.environment().items():
            patch.setenv(name, value)
        yield server


@pytest.fixture
def bucket(s3: S3Server) -> str:
    name = f"b-{uuid.uuid4().hex[:8]}"
    s3.create_bucket(name)
    return name


@pytest.fixture
def proxy(s3: S3Server) -> Iterator[FaultProxy]:
    with FaultProxy(s3.endpoint_url) as proxy:
        yield proxy


@pytest.fixture(autouse=True)
def _no_threads_left() -> Iterator[None]:
    yield
    _outlet.close_all(5.0)
    left = [t.name for t in threading.enumerate() if t.name.startswith("ddp-")]
    assert not left, f"threads left behind: {left}"
