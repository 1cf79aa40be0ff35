"""The HTTP client against a server that says exactly what the test wants."""

import asyncio
import contextlib

import pytest

from ddp_s3data._contract import FaultError
from ddp_s3data._http import Pool

HEAD = b"GET /k HTTP/1.1\r\nhost: h\r\n\r\n"


def serve(answers, use, **settings):
    """Run `await use(pool)` against a server that sends `answers` one by one, piece by piece.

    An answer is a list of pieces; None as a piece closes the connection.
    """
    left = list(answers)
    connections = []

    async def client(reader, writer):
        connections.append(writer)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                await reader.readuntil(b"\r\n\r\n")
                for piece in left.pop(0):
                    if piece is None:
                        writer.close()
                        return
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0.002)  # so that pieces arrive apart

    async def main():
        server = await asyncio.start_server(client, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        limits = {"connect_timeout_s": 5.0, "stall_timeout_s": 5.0, **settings}
        pool = Pool("127.0.0.1", port, None, **limits)
        try:
            return await use(pool), len(connections)
        finally:
            await pool.close()
            server.close()
            for writer in connections:
                writer.close()

    return asyncio.run(asyncio.wait_for(main(), 30))


def one(*pieces, **settings):
    (status, headers, body), _ = serve([pieces], lambda pool: pool.request(HEAD), **settings)
    return status, headers, body


def fault(*pieces, **settings):
    with pytest.raises(FaultError) as caught:
        one(*pieces, **settings)
    return caught.value


def test_an_answer_with_content_length():
    status, headers, body = one(b'HTTP/1.1 200 OK\r\nContent-Length: 5\r\nETag: "x"\r\n\r\nhello')
    assert (status, headers["etag"], body) == (200, '"x"', b"hello")


def test_an_answer_cut_at_every_byte_is_the_same():
    whole = b"HTTP/1.1 206 Partial\r\ncontent-length: 11\r\nX-A:  b \r\n\r\nhello\r\n\r\nab"
    pieces = [whole[i : i + 1] for i in range(len(whole))]
    status, headers, body = one(*pieces)
    assert (status, headers["x-a"], body) == (206, "b", b"hello\r\n\r\nab")


def test_chunks_cut_at_every_byte_are_put_together():
    whole = (
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
        b"5;name=value\r\nhello\r\nB\r\n, wonderful\r\n0\r\ntrailer: x\r\n\r\n"
    )
    assert one(whole)[2] == b"hello, wonderful"
    assert one(*[whole[i : i + 1] for i in range(len(whole))])[2] == b"hello, wonderful"


def test_a_body_without_length_ends_with_the_connection():
    assert one(b"HTTP/1.1 200 OK\r\n\r\n", b"abc", None)[2] == b"abc"


def test_100_continue_is_passed_over():
    assert one(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 204 No\r\n\r\n")[0] == 204


def test_a_large_body_arrives_whole():
    body = bytes(range(256)) * 20_000
    head = f"HTTP/1.1 200 OK\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    assert one(head, body)[2] == body


def test_a_connection_is_used_again():
    ok = [b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nx"]

    async def use(pool):
        return [(await pool.request(HEAD))[2] for _ in range(3)]

    bodies, connections = serve([ok, ok, ok], use)
    assert bodies == [b"x"] * 3
    assert connections == 1


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 200 OK\r\nConnection: close\r\ncontent-length: 1\r\n\r\nx",
        b"HTTP/1.0 200 OK\r\ncontent-length: 1\r\n\r\nx",
    ],
)
def test_a_connection_that_the_server_will_close_is_not_used_again(head):
    async def use(pool):
        return [(await pool.request(HEAD))[2] for _ in range(2)]

    assert serve([[head], [head]], use) == ([b"x", b"x"], 2)


def test_a_short_body_is_truncated():
    error = fault(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhello", None)
    assert error.cause == "truncated"
    assert "5 of 10" in error.detail


def test_chunks_without_an_end_are_truncated():
    assert (
        fault(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhe", None).cause
        == "truncated"
    )


def test_a_closed_connection_without_an_answer_is_a_reset():
    assert fault(None).cause == "reset"


def test_a_keep_alive_connection_closed_meanwhile_is_stale():
    ok = [b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nx"]

    async def use(pool):
        await pool.request(HEAD)
        await pool.request(HEAD)

    with pytest.raises(FaultError) as caught:
        serve([ok, [None]], use)
    assert caught.value.cause == "stale"


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: -5\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nxyz",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nnonsense\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * 70_000,
    ],
)
def test_nonsense_is_a_protocol_fault(answer):
    assert fault(answer).cause == "protocol"


def test_a_server_that_says_nothing_more_is_stalled():
    error = fault(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhe", stall_timeout_s=0.2)
    assert error.cause == "stalled"


def test_nobody_there_is_a_connect_fault():
    async def main():
        pool = Pool("127.0.0.1", 1, None, connect_timeout_s=5, stall_timeout_s=5)
        with pytest.raises(FaultError) as caught:
            await pool.request(HEAD)
        return caught.value.cause

    assert asyncio.run(main()) == "connect"


def test_a_cancelled_request_drops_its_connection():
    ok = [b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nx"]

    async def use(pool):
        task = asyncio.create_task(pool.request(HEAD))
        async with asyncio.timeout(5):
            while not pool._busy:  # noqa: ASYNC110 - the pool has no event for it
                await asyncio.sleep(0.001)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert not pool._busy
        return (await pool.request(HEAD))[2]

    assert serve([[b"HTTP/1.1 200 OK\r\n"], ok], use) == (b"x", 2)
