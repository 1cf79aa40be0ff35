"""Fork, spawn and forkserver, also after the parent has read; nothing left, nothing printed."""

import gc
import itertools
import multiprocessing
import os
import signal
import subprocess
import sys

import pytest
from conftest import pixel
from torch.utils.data import DataLoader

from ddp_s3data import S3DataLoader, S3ImageFolder
from ddp_s3data._engine import engine


@pytest.fixture
def folder(digits, aws):
    return S3ImageFolder(digits, "train", transform=pixel)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize("kind", [DataLoader, S3DataLoader])
def test_workers_read_after_the_parent_has_read(folder, method, kind):
    assert pixel_of(folder, 0) == folder[0][0]
    loader = kind(folder, batch_size=20, num_workers=2, multiprocessing_context=method)
    assert sum(len(targets) for _, targets in loader) == 120
    assert pixel_of(folder, 5) == folder[5][0]


def pixel_of(folder, place):
    return int(folder.all_files[place].rpartition("/")[2].removesuffix(".png"))


def _read(folder, places):
    found = [folder[place][0] for place in places]
    gc.collect()
    return found


def _read_and_tell(folder, places, pipe):
    pipe.send(_read(folder, places))
    pipe.close()


def test_the_parent_still_reads_after_a_forked_child_read_and_collected_its_garbage(folder):
    places = list(range(30))
    wanted = [pixel_of(folder, place) for place in places]
    assert _read(folder, places) == wanted
    context = multiprocessing.get_context("fork")
    for _ in range(3):
        mine, theirs = context.Pipe()
        child = context.Process(target=_read_and_tell, args=(folder, places, theirs))
        child.start()
        theirs.close()
        assert mine.poll(60)
        assert mine.recv() == wanted
        child.join(30)
        assert child.exitcode == 0
        assert folder.__getitems__(places) == [folder[place] for place in places]


def test_a_child_has_an_engine_of_its_own(folder):
    folder[0]
    parents = engine()
    pid = os.fork()
    if pid == 0:
        good = engine() is not parents and folder[3][0] == pixel_of(folder, 3)
        os._exit(0 if good else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert engine() is parents


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_process_pool_reads(folder, method):
    folder[0]
    with multiprocessing.get_context(method).Pool(2) as pool:
        found = pool.starmap(_read, [(folder, [i, i + 1]) for i in range(0, 20, 2)])
        pool.close()
        pool.join()
    assert [p for pair in found for p in pair] == [pixel_of(folder, i) for i in range(20)]


SCRIPT = """
import sys, os, signal, threading
from conftest import pixel
from ddp_s3data import S3DataLoader, S3ImageFolder, S3Options

def main():
    how, workers, transport, bucket = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
    options = S3Options(transport=transport)
    folder = S3ImageFolder(bucket, "train", transform=pixel, options=options)
    folder[0]
    loader = S3DataLoader(folder, batch_size=5, num_workers=workers, lookahead=2)
    for number, (pixels, targets) in enumerate(loader):
        if how == "break" and number == 2:
            break
        if how == "interrupt" and number == 2:
            os.kill(os.getpid(), signal.SIGINT)
        if how == "raise" and number == 2:
            raise ValueError("in the training loop")
    print("done")

if __name__ == "__main__":
    try:
        main()
    except (ValueError, KeyboardInterrupt) as error:
        print(type(error).__name__)
"""


ENDS = {"all": "done", "break": "done", "raise": "ValueError", "interrupt": "KeyboardInterrupt"}
CASES = [
    *itertools.product(ENDS, [0, 2], ["auto"]),
    ("all", 0, "aiobotocore"),
    ("raise", 2, "aiobotocore"),
]


@pytest.mark.parametrize(("how", "workers", "transport"), CASES)
def test_a_script_ends_in_silence(digits, aws, how, workers, transport):
    path = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    process = subprocess.Popen(
        [
            sys.executable,
            "-W",
            "default::ResourceWarning",
            "-c",
            SCRIPT,
            how,
            str(workers),
            transport,
            digits,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        start_new_session=True,
    )
    out, err = process.communicate(timeout=100)
    assert out.split() == [ENDS[how]]
    assert err == ""
    assert process.returncode == 0
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # nobody of its group is left
