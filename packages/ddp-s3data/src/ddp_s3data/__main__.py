"""`python -m ddp_s3data check|index|bench s3://bucket/prefix`: see what S3 gives this machine."""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections.abc import Callable, Sequence

from ._address import split_address
from ._index import Index
from ._listing import list_index
from .dataset import S3Dataset, S3Object
from .errors import S3DataError
from .images import IMG_EXTENSIONS, S3File, load_rgb
from .options import S3Options

_SAMPLE = 2000
_BATCH = 64


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
    bucket, prefix = split_address(parsed.address)
    dataset = S3Dataset(bucket, prefix, options=options, index=_index(parsed, options))
    chosen = random.Random(0).sample(range(len(dataset)), min(parsed.objects, len(dataset)))
    batches = [chosen[start : start + _BATCH] for start in range(0, len(chosen), _BATCH)]
    dataset.__getitems__(batches[0][:1])  # connects
    before = dataset.stats()["bytes"]
    started, cpu = time.perf_counter(), time.process_time()
    read = [each for batch in batches for each in dataset.__getitems__(batch)]
    took, cpu = time.perf_counter() - started, time.process_time() - cpu
    stats = dataset.stats()
    rate = len(read) / took
    megabytes = (stats["bytes"] - before) / 1e6
    print(f"requests/s   {rate:.0f} in one process, {megabytes / took:.1f} MB/s")
    print(f"cpu/request  {1000 * cpu / len(read):.2f} ms")
    quantiles = ", ".join(f"{k} {1000 * v:.0f} ms" for k, v in stats["latency_s"].items())
    print(f"latency      {quantiles}")
    if stats["retries"]:
        print(f"retries      {stats['retries']}")
    images = [each for each in read if each.key.lower().endswith(IMG_EXTENSIONS)][:200]
    decode_s = _decode_s(images) if images else 0.0
    if decode_s:
        print(f"decoding     {1 / decode_s:.0f} images/s on one core")
    _advise(rate, decode_s, 1.0 / rate, dataset)
    return 0


def _advise(rate: float, decode_s: float, fetch_s: float, dataset: S3Dataset) -> None:
    cores = os.cpu_count() or 1
    workers = max(1, cores - 1) if decode_s else min(4, cores)
    limit = "decoding: more cores" if decode_s > fetch_s else "the network"
    together = min(rate, 1 / decode_s if decode_s else rate) * workers
    print(f"limit        {limit}")
    print(
        f"suggestion   S3DataLoader(dataset, batch_size={_BATCH}, num_workers={workers}), "
        f"about {together:.0f} samples/s on this machine; {dataset.options.max_connections} "
        "connections in each worker"
    )


def _decode_s(images: Sequence[S3Object]) -> float:
    """Return the seconds of decoding per image, or 0 if none of them is one."""
    started, good = time.perf_counter(), 0
    for each in images:
        try:
            load_rgb(S3File(each.data, each.address))
            good += 1
        except Exception:  # noqa: BLE001 - a benchmark passes over what is no image
            continue
    return (time.perf_counter() - started) / good if good else 0.0


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
