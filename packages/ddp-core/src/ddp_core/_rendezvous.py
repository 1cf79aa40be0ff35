"""The store where ranks meet, hosted by the agent of rank 0 on the worker's own address only."""

from __future__ import annotations

import json
import os
import socket
from typing import Any

from ddp_core._ranks import host_port
from ddp_core.errors import RendezvousError


class HostedStore:
    """A ``TCPStore`` server that listens on one address.

    torch binds a store to every interface unless it is given a socket that listens already, so the
    socket is made here. The server runs in threads of torch that end with ``close``.

    Args:
        host: Address to listen on.
        port: Port, 0 for a free one.

    Raises:
        RendezvousError: When the address cannot be listened on.
    """

    def __init__(self, host: str, port: int = 0) -> None:
        listener = _listen(host, port)
        try:
            from torch.distributed import TCPStore  # type: ignore[attr-defined]

            self.port = int(listener.getsockname()[1])
            self.host = host
            # The store owns the descriptor from here on.
            self._store: Any = TCPStore(
                host,
                self.port,
                is_master=True,
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )
        finally:
            listener.close()

    def close(self) -> None:
        """Stop the server and close its connections. May be called twice."""
        self._store = None


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, proto)
    except OSError as exc:
        raise RendezvousError(f"rendezvous: {host!r} is no address of this host: {exc}") from exc
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
    except OSError as exc:
        listener.close()
        remedy = "use port=0 for a free one" if port else "rank 0 must run where this address is"
        raise RendezvousError(
            f"rendezvous: cannot listen on {host_port(host, port)}: {exc.strerror or exc}; {remedy}"
        ) from exc
    return listener


def main(spec: dict[str, Any] | None = None) -> None:
    """Host the store in this process until the agent closes the control pipe.

    A process of its own, because the store's threads and torch's memory do not belong in a worker.
    """
    spec = spec or json.loads(os.environ.pop("_DDP_CORE_SPEC"))
    try:
        store = HostedStore(spec["host"], spec["port"])
        news = {"event": "listening", "host": store.host, "port": store.port}
    except Exception as exc:  # noqa: BLE001 - told to the agent, which fails the job with it
        store = None
        text = str(exc) if isinstance(exc, RendezvousError) else f"cannot host the store: {exc!r}"
        news = {"event": "refused", "text": text}
    os.write(spec["report"], json.dumps(news).encode() + b"\n")
    while store is not None and os.read(spec["control"], 1024):
        pass
    os._exit(0)
