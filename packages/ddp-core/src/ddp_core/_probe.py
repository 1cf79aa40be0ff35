"""What doctor asks of other processes. Sent by value: imports nothing of this package.

What waits is a coroutine, because these functions run on the event loop of a worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import sys
from importlib import metadata

PACKAGES = ("torch", "dask", "distributed", "cloudpickle", "ddp-core")

_DEVICES = "import torch; print(torch.cuda.device_count(), torch.distributed.is_nccl_available())"
_IMPORT = """
import importlib, operator, sys
module, _, name = sys.argv[1].partition(":")
found = importlib.import_module(module)
if name:
    operator.attrgetter(name)(found)
"""


def versions() -> dict[str, str]:
    """Versions in this process, ``"-"`` where a package is missing."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "-"
    return found


async def listen(host: str, peers: int, seconds: float) -> int:
    """Accept one connection of each peer, for so many seconds; returns the port."""
    left = peers
    ended = asyncio.Event()

    def accept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal left
        writer.close()
        left -= 1
        if not left:
            ended.set()

    async def serve() -> None:
        async with server:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), seconds)

    server = await asyncio.start_server(accept, host, 0)
    port = int(server.sockets[0].getsockname()[1])
    task = asyncio.create_task(serve(), name="ddp-doctor-listen")
    # The loop keeps only a weak reference to a task.
    asyncio.get_running_loop().call_later(seconds + 1, task.cancel)
    return port


async def reach(host: str, port: int, seconds: float) -> str:
    """Connect; the empty string, or why it failed."""
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(host, port), seconds)
    except TimeoutError:
        return f"no connection within {seconds:g} s"
    except OSError as exc:
        return str(exc)
    writer.close()
    return ""


async def devices(seconds: float) -> str:
    """CUDA devices that torch sees here, asked in a process of its own; their number is first."""
    return await _python(seconds, _DEVICES)


async def imports(what: str, seconds: float) -> str:
    """Import ``module`` or ``module:function`` as a rank would; the empty string, or the error."""
    return await _python(seconds, _IMPORT, what, quiet=True)


async def _python(seconds: float, code: str, *arguments: str, quiet: bool = False) -> str:
    """Run code in an interpreter like this one; its last line, on failure that of its errors."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, *arguments,
        env=env, stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe,
    )  # fmt: skip
    try:
        out, err = await asyncio.wait_for(process.communicate(), seconds)
    except TimeoutError:
        return f"not done after {seconds:g} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    if process.returncode == 0 and quiet:
        return ""
    text = (err if process.returncode else out).decode(errors="replace").strip()
    return text.splitlines()[-1] if text else f"exit code {process.returncode}"
