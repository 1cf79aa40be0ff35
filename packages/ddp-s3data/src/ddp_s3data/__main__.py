"""`python -m ddp_s3data check|index|bench s3://bucket/prefix`: see what S3 gives this machine."""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections.abc import Callable, Sequence

from ._address import split_address
from ._bench import BATCH, choose, decoding_s, fetch, try_out
from ._index import Index
from ._listing import list_index
from .dataset import S3Dataset
from .errors import S3DataError
from .options import S3Options

_SAMPLE = 2000
_LIMITS = {
    "decode": "decoding: more cores would help, a faster network would not",
    "network": "the network: more workers or connections may help, more cores would not",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return 0, or 1 after an error, which is printed with its remedy."""
    parsed = _parser().parse_args(arguments)
    options = S3Options(
        endpoint_url=parsed.endpoint_url,
        region=parsed.region,
        profile=parsed.profile,
        anon=parsed.anon,
        requester_pays=parsed.requester_pays,
        addressing=parsed.addressing,
    )
    run: Callable[[argparse.Namespace, S3Options], int] = parsed.run
    try:
        return run(parsed, options)
    except (S3DataError, ValueError) as error:
        print(f"FAILED  {type(error).__name__}: {error}", file=sys.stderr)
        return 1


def check(parsed: argparse.Namespace, options: S3Options) -> int:
    """List the prefix and read one object; say what was found."""
    bucket, prefix = split_address(parsed.address)
    started = time.perf_counter()
    index = list_index(bucket, prefix, options)
    took = time.perf_counter() - started
    print(f"ok      list: {len(index)} objects, {index.total_bytes / 1e6:.1f} MB, {took:.2f} s")
    dataset = S3Dataset(bucket, prefix, options=options, index=index)
    smallest = min(range(len(dataset)), key=dataset.size)
    started = time.perf_counter()
    found = dataset[smallest]
    took = time.perf_counter() - started
    print(f"ok      get:  {found.address}, {len(found.data)} bytes, {took:.3f} s")
    return 0


def index(parsed: argparse.Namespace, options: S3Options) -> int:
    """List the prefix into a file for `index=`."""
    bucket, prefix = split_address(parsed.address)
    found = list_index(bucket, prefix, options)
    found.save(parsed.output)
    size = os.path.getsize(parsed.output)
    print(f"{len(found)} objects of {parsed.address} in {parsed.output}, {size / 1e6:.1f} MB")
    return 0


def bench(parsed: argparse.Namespace, options: S3Options) -> int:
    """Read a random part, batch by batch; say how fast, what limits, and what to choose."""
    found = _index(parsed, options)
    chosen = random.Random(0).sample(range(len(found)), min(parsed.objects, len(found)))
    fetched = fetch(found, options, chosen)
    print(f"requests/s   {fetched.per_s:.0f}, {fetched.bytes_per_s / 1e6:.1f} MB/s in one process")
    print(f"cpu/request  {1000 * fetched.cpu_s:.2f} ms")
    quantiles = ", ".join(f"{k} {1000 * v:.0f} ms" for k, v in fetched.latency_s.items())
    print(f"latency      {quantiles}")
    if fetched.retries:
        print(f"retries      {fetched.retries}")
    decode_s = decoding_s(found, options, chosen)
    if decode_s:
        print(f"decoding     {1 / decode_s:.0f} images/s on one core, without transform")
    settings = choose(fetched, decode_s, os.cpu_count() or 1)
    rate, limit = try_out(found, options, chosen, settings)
    if rate:
        what = "images/s " if decode_s else "objects/s"
        print(f"{what}    {rate:.0f} with the settings below")
        print(f"limit        {_LIMITS.get(limit, limit)}")
    else:
        print(f"images/s     not measured: one batch of {BATCH} was all; give more --objects")
    print(f"suggestion   {settings}")
    return 0


def _index(parsed: argparse.Namespace, options: S3Options) -> Index:
    if parsed.index is not None:
        return Index.load(parsed.index)
    return list_index(*split_address(parsed.address), options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m ddp_s3data", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="check|index|bench")
    for run in (check, index, bench):
        command = commands.add_parser(run.__name__, help=run.__doc__, description=run.__doc__)
        command.set_defaults(run=run)
        command.add_argument("address", help="s3://bucket/prefix")
        command.add_argument("--endpoint-url")
        command.add_argument("--region")
        command.add_argument("--profile")
        command.add_argument("--anon", action="store_true", help="for public buckets")
        command.add_argument("--requester-pays", action="store_true")
        command.add_argument("--addressing", choices=["auto", "path", "virtual"], default="auto")
        if run is index:
            command.add_argument("-o", "--output", required=True, help="file to write")
        if run is bench:
            command.add_argument("--index", help="file written by `index`")
            command.add_argument("--objects", type=int, default=_SAMPLE, help="how many to read")
    return parser


if __name__ == "__main__":
    sys.exit(main())
