"""Command line: `ddp-results ls|show|tail|plot|export|verify RUN`."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ddp_results._metrics import to_json
from ddp_results.errors import ResultsError
from ddp_results.runs import NO_RUN, Run, open_run


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return the exit status: 0, 1 for a finding, 2 for an error."""
    options = _parser().parse_args(arguments)
    try:
        run = open_run(options.run, **_s3_settings(options))
        try:
            act: Callable[[Run, argparse.Namespace], int] = options.act
            return act(run, options)
        finally:
            run.close()
    except (ResultsError, OSError, KeyError, ImportError, ValueError) as error:
        text = error.args[0] if isinstance(error, KeyError) else error
        print(f"ddp-results: {text}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _ls(run: Run, options: argparse.Namespace) -> int:
    for path in run.results(options.prefix):
        print(path)
    return 0


def _show(run: Run, _: argparse.Namespace) -> int:
    points = run.metrics()
    checkpoints = run.checkpoints()
    sources = {(point["attempt"], point["rank"], point["src"]) for point in points}
    print(f"{len(points)} points of {len(sources)} processes, {len(run.results())} results")
    latest: dict[str, tuple[Any, Any]] = {}
    for point in points:
        latest.update({name: (value, point["step"]) for name, value in point["metrics"].items()})
    for name, (value, step) in sorted(latest.items()):
        print(f"  {name:<24} {_text(value):<14} at step {step}")
    for checkpoint in checkpoints:
        metrics = "  ".join(f"{name} {_text(v)}" for name, v in checkpoint.metrics.items())
        kilobytes = checkpoint.size_bytes / 1e3
        size = f"{kilobytes / 1e3:.1f} MB" if kilobytes > 100 else f"{kilobytes:.1f} kB"
        print(f"  checkpoint {checkpoint.name:<20} step {checkpoint.step}  {size}  {metrics}")
    if not points and not checkpoints:
        print(f"  no metrics and no checkpoints: {NO_RUN}")
    return 0


def _tail(run: Run, options: argparse.Namespace) -> int:
    """Print the last points, then new ones as they come, until interrupted."""
    points = run.metrics()
    seen = {(point["src"], point["seq"]) for point in points}
    for point in sorted(points, key=lambda each: each["time"])[-options.lines :]:
        print(_line(point))
    while options.follow:
        time.sleep(options.interval)
        fresh = [point for point in run.metrics() if (point["src"], point["seq"]) not in seen]
        for point in sorted(fresh, key=lambda each: each["time"]):
            seen.add((point["src"], point["seq"]))
            print(_line(point), flush=True)
    return 0


def _plot(run: Run, options: argparse.Namespace) -> int:
    output = options.output or f"{options.metric.replace('/', '_')}.png"
    run.plot(options.metric, output)
    print(output)
    return 0


def _export(run: Run, options: argparse.Namespace) -> int:
    """Write all points as CSV or JSON lines, as the suffix says."""
    output = Path(options.output)
    if output.suffix == ".csv":
        run.to_pandas().to_csv(output, index=False)
    elif output.suffix == ".parquet":
        run.to_pandas().to_parquet(output, index=False)
    elif output.suffix in (".jsonl", ".ndjson"):
        with output.open("w", encoding="utf-8") as file:
            for point in run.metrics():
                metrics = {name: to_json(value) for name, value in point["metrics"].items()}
                file.write(json.dumps({**point, "metrics": metrics}, allow_nan=False) + "\n")
    else:
        raise ValueError(f"cannot export to {output.name!r}: use .csv, .jsonl or .parquet")
    print(output)
    return 0


def _verify(run: Run, _: argparse.Namespace) -> int:
    """Check every checkpoint against its manifest."""
    bad = 0
    for checkpoint in run.checkpoints():
        try:
            checkpoint.read()
        except ResultsError as error:
            bad += 1
            print(f"BAD  {checkpoint.name}: {error}")
        else:
            print(f"ok   {checkpoint.name}  {checkpoint.size_bytes} bytes")
    n_points = len(run.metrics())
    print(f"{n_points} points, {len(run.results())} results, {bad} damaged checkpoints")
    return 1 if bad else 0


def _line(point: dict[str, Any]) -> str:
    when = time.strftime("%H:%M:%S", time.localtime(point["time"]))
    metrics = "  ".join(f"{name} {_text(value)}" for name, value in point["metrics"].items())
    who = f"rank {point['rank']}" if point["rank"] >= 0 else f"process {point['src']}"
    return f"{when}  {who}  step {point['step']}  {metrics}"


def _text(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _s3_settings(options: argparse.Namespace) -> dict[str, Any]:
    if not options.run.startswith("s3://"):
        return {}
    names = ("endpoint_url", "region", "profile", "anon", "requester_pays", "addressing")
    return {name: getattr(options, name) for name in names}


def _parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("run", help="a folder or s3://bucket/prefix")
    s3 = common.add_argument_group("S3")
    for name in ("endpoint-url", "region", "profile"):
        s3.add_argument(f"--{name}")
    s3.add_argument("--anon", action="store_true", help="send no credentials")
    s3.add_argument("--requester-pays", action="store_true")
    s3.add_argument("--addressing", choices=("auto", "path", "virtual"), default="auto")

    parser = argparse.ArgumentParser(prog="ddp-results", description="Look at the results of runs.")
    parser.add_argument("--version", action="version", version=version("ddp-results"))
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, act: Callable[..., int], text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text, parents=[common])
        added.set_defaults(act=act)
        return added

    command("ls", _ls, "list the named results").add_argument("--prefix", default="")
    command("show", _show, "summarise metrics and checkpoints")
    tail = command("tail", _tail, "print the last points")
    tail.add_argument("-n", "--lines", type=int, default=10)
    tail.add_argument("-f", "--follow", action="store_true", help="and new ones as they come")
    tail.add_argument("--interval", type=float, default=1.0, help="seconds between looks")
    plot = command("plot", _plot, "draw a metric")
    plot.add_argument("metric")
    plot.add_argument("-o", "--output")
    export = command("export", _export, "write all points to a .csv, .jsonl or .parquet file")
    export.add_argument("output")
    command("verify", _verify, "check every checkpoint against its manifest")
    return parser


if __name__ == "__main__":
    sys.exit(main())
