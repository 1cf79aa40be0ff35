"""Real parts, shared by all integration tests: an S3 server, and a cluster of two workers."""

from collections.abc import Iterator

import pytest
from distributed import Client, LocalCluster

from s3_server import S3Server


@pytest.fixture(scope="session")
def s3() -> Iterator[S3Server]:
    """Return a running S3 server; the environment leads to it, in child processes too."""
    with S3Server(anonymous_buckets=["open"]) as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment().items():
            patch.setenv(name, value)
        yield server


@pytest.fixture(scope="session")
def client(s3: S3Server) -> Iterator[Client]:
    """Return a client of a Dask cluster of two worker processes, which reach the S3 server."""
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        yield client
