"""The page of the Dask dashboard, as a browser gets it."""

from __future__ import annotations

import html
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from conftest import wait_for
from distributed import Client

from ddp_results import DaskResultsHandler, MemorySink
from ddp_results._page import pack_shown, render, travelling

KEY = "a <b> & c"


def look(client: Client) -> list[list[str]]:
    """Return the cells of each process below the heading of our run; none without it."""
    url = client.dashboard_link.replace("/status", "/ddp-results")
    try:
        with urlopen(url, timeout=10) as answer:
            text = answer.read().decode()
    except HTTPError as error:
        if error.code != 404:
            raise
        return []  # no run has begun yet
    assert KEY not in text
    _, _, run = text.partition(f"<h2>{html.escape(KEY)}</h2>")
    lines = run.partition("</table>")[0].split("<tr>")[2:]
    return [re.findall(r"<td[^>]*>(.*?)</td>", line) for line in lines]


@pytest.mark.xdist_group("cluster")
def test_page_shows_the_last_values_of_each_process(client: Client, tmp_path: Path) -> None:
    handler, go = DaskResultsHandler(KEY), tmp_path / "go"

    def work(rank: int) -> None:
        handler.log_metrics({"<loss>": 0.5}, step=3)
        while not go.exists():
            time.sleep(0.05)
        handler.log_metrics({"<loss>": 0.25}, step=7)

    futures = [
        client.submit(work, r, workers=[w], pure=False) for r, w in enumerate(client.nthreads())
    ]
    run = threading.Thread(target=handler.process_results, args=(MemorySink(), futures))
    run.start()
    try:
        first = [["3", "&lt;loss&gt; 0.5", "1"]] * 2
        wait_for(lambda: [cells[1:4] for cells in look(client)] == first, seen=lambda: look(client))
    finally:
        go.touch()
        run.join()
    assert [cells[1:4] for cells in look(client)] == [["7", "&lt;loss&gt; 0.25", "2"]] * 2
    DaskResultsHandler("another").process_results(MemorySink(), futures)
    assert len(look(client)) == 2  # the page is added once, and keeps the runs


def test_the_latest_runs_come_first_and_old_ones_are_only_counted() -> None:
    notes = {f"run {n}": pack_shown(1e9 + n, "ended", []) for n in range(30)}
    foreign = {"of an old client": None, "a number": 5, "no message": b"\xc1", "a list": b"\x90"}
    text = render({**notes, **foreign})
    headings = re.findall("<h2>(.*?)</h2>", text)
    assert headings == [f"run {n}" for n in range(29, 9, -1)]
    assert "10 earlier runs" in text
    assert "2001-09-09 01:47:09 UTC" in text  # 1e9 + 29


def test_words_that_are_no_text_are_shown_all_the_same() -> None:
    assert "\\udcff" in render({"run": pack_shown(0, "waiting for \udcff", [])})


def test_the_scheduler_needs_no_ddp_results() -> None:
    program = (
        "import pickle, sys; sys.modules['ddp_results'] = None\n"
        "page = pickle.loads(sys.stdin.buffer.read())\n"
        "print(page.name)\n"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, input=travelling(), capture_output=True, check=True, timeout=60)
    assert done.stdout.split() == [b"ddp-results-page"]
