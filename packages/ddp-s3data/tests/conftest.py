"""A real S3 server for each test process, and images in it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import io
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import pytest
from aiobotocore.session import get_session
from PIL import Image

from ddp_s3data import S3Options
from fault_proxy import FaultProxy
from s3_server import S3Server

_AWS = "AWS_"


def png(number: int, size: int = 8) -> bytes:
    """A grey PNG whose every pixel is `number`."""
    out = io.BytesIO()
    Image.fromarray(np.full((size, size), number % 256, np.uint8)).save(out, "PNG")
    return out.getvalue()


def pixel(image: Image.Image) -> int:
    return int(np.asarray(image)[0, 0, 0])


@pytest.fixture(scope="session")
def s3() -> Iterator[S3Server]:
    with S3Server(anonymous_buckets=["public-bucket"]) as server:
        yield server


@pytest.fixture(scope="session")
def shared_proxy(s3: S3Server) -> Iterator[FaultProxy]:
    with FaultProxy(s3.endpoint_url) as proxy:
        yield proxy


@pytest.fixture
def proxy(shared_proxy: FaultProxy) -> Iterator[FaultProxy]:
    shared_proxy.forget()
    yield shared_proxy
    shared_proxy.forget()
    shared_proxy.drop_connections()


@pytest.fixture
def aws(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The environment of a user whose credentials are in AWS_* variables, and nowhere else."""
    _clear(monkeypatch)
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    before = _environment()
    yield
    assert _environment() == before


def _environment() -> dict[str, str]:
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTEST_", "TORCH"))
    }


@pytest.fixture
def no_credentials(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    _clear(monkeypatch)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint_url)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.fixture
def through_proxy(aws: None, proxy: FaultProxy) -> S3Options:
    """Options that lead through the proxy; environment as `aws`."""
    return S3Options(endpoint_url=proxy.endpoint_url)


Fill = Callable[[Mapping[str, bytes]], str]
_buckets = iter(range(10**6))


class Admin:
    """One client of the server for all tests: to create one costs more than a test."""

    def __init__(self, server: S3Server) -> None:
        self._runner = asyncio.Runner()
        self._stack = contextlib.AsyncExitStack()
        client = get_session().create_client(
            "s3",
            region_name=server.region,
            endpoint_url=server.endpoint_url,
            aws_access_key_id=server.access_key,
            aws_secret_access_key=server.secret_key,
        )
        self._client = self._runner.run(self._stack.enter_async_context(client))

    def create(self, bucket: str, objects: Mapping[str, bytes]) -> None:
        async def create() -> None:
            await self._client.create_bucket(Bucket=bucket)
            await self._put(bucket, objects)

        self._runner.run(create())

    def put(self, bucket: str, objects: Mapping[str, bytes]) -> None:
        self._runner.run(self._put(bucket, objects))

    def delete_object(self, bucket: str, key: str) -> None:
        self._runner.run(self._client.delete_object(Bucket=bucket, Key=key))

    def delete(self, bucket: str) -> None:
        self._runner.run(self._client.delete_bucket(Bucket=bucket))

    def close(self) -> None:
        self._runner.run(self._stack.aclose())
        self._runner.close()

    async def _put(self, bucket: str, objects: Mapping[str, bytes]) -> None:
        left = iter(objects.items())

        async def put() -> None:
            for key, body in left:
                await self._client.put_object(Bucket=bucket, Key=key, Body=body)

        await asyncio.gather(*(put() for _ in range(8)))


@pytest.fixture(scope="session")
def admin(s3: S3Server) -> Iterator[Admin]:
    with pytest.MonkeyPatch.context() as patch:
        _clear(patch)
        admin = Admin(s3)
    yield admin
    admin.close()


@pytest.fixture
def fill(admin: Admin) -> Iterator[Fill]:
    """Makes a bucket of its own with these objects and returns its name."""
    made = []

    def fill(objects: Mapping[str, bytes]) -> str:
        bucket = f"bucket-{os.getpid()}-{next(_buckets)}"
        made.append(bucket)
        admin.create(bucket, objects)
        return bucket

    yield fill
    for bucket in made:  # the server has room for some ten buckets at a time
        admin.delete(bucket)


@pytest.fixture(scope="session")
def digits(admin: Admin) -> str:
    """A bucket with 120 images of three classes below `train/`; image i has pixels i."""
    admin.create("digits", {f"train/c{i % 3}/{i:04d}.png": png(i) for i in range(120)})
    return "digits"


def _clear(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(_AWS)]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No test leaves a child process, or a thread other than the engine's."""
    before = {thread.name for thread in threading.enumerate()}
    yield
    gc.collect()  # an iterator in the frames of a caught error ends its workers then
    for child in multiprocessing.active_children():
        child.join(10)
    assert not multiprocessing.active_children()
    extra = {thread.name for thread in threading.enumerate()} - before
    assert all(name.startswith(("ddp-", "QueueFeederThread", "asyncio_")) for name in extra), extra
