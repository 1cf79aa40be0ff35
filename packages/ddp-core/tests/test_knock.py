"""Whether a host answers, with real sockets."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from ddp_core._knock import HOST_IS_GONE, PROCESS_IS_GONE, Knocker, why_gone
from ddp_core._ranks import host_port


@contextmanager
def mute_server(host: str, backlog: int = 8) -> Iterator[int]:
    """A process that stands still: it listens, and the kernel alone answers."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as server:
        server.bind((host, 0))
        server.listen(backlog)
        yield server.getsockname()[1]


@pytest.mark.parametrize("scheme", ["tcp", "tls"])
@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "127.0.0.2"])
def test_a_process_that_stands_still_answers_and_one_that_has_ended_does_not(
    scheme: str, host: str
) -> None:
    with mute_server(host) as port:
        address = f"{scheme}://{host_port(host, port)}"
        assert not asyncio.run(why_gone(address))
    assert asyncio.run(why_gone(address)) == PROCESS_IS_GONE


def test_a_host_that_takes_no_connection_does_not_answer() -> None:
    """A full queue of connections drops what comes, as a host without power."""
    with mute_server("127.0.0.1", backlog=0) as port, ExitStack() as stack:
        for _ in range(3):
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(("127.0.0.1", port))
        assert asyncio.run(why_gone(f"tcp://127.0.0.1:{port}", 0.5)) == HOST_IS_GONE


def test_a_closed_port_of_another_protocol_only_says_that_the_host_is_there() -> None:
    with mute_server("127.0.0.1") as port:
        pass
    assert not asyncio.run(why_gone(f"ucx://127.0.0.1:{port}"))


def test_a_worker_inside_the_scheduler_is_never_knocked_at() -> None:
    assert not asyncio.run(why_gone("inproc://192.0.2.9/1/2"))


def test_a_host_without_an_address_is_not_given_up() -> None:
    """The scheduler's resolver may be broken; that says nothing about the worker."""
    assert not asyncio.run(why_gone("tcp://no-such-host.invalid:1", 20))


def test_nobody_is_knocked_at_twice_at_once() -> None:
    async def knock() -> None:
        knocker = Knocker()
        with mute_server("127.0.0.1") as port:
            first = knocker.knock(f"tcp://127.0.0.1:{port}")
            assert knocker.knock(f"tcp://127.0.0.1:{port}") is first
            assert not await first
            assert knocker.knock(f"tcp://127.0.0.1:{port}") is first
            assert knocker.knock("inproc://a") is not first
        knocker.close()

    asyncio.run(knock())
