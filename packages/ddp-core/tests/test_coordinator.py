from __future__ import annotations

import pickle
import subprocess
import sys

from ddp_core._submit import _Shipped


def test_a_scheduler_needs_no_ddp_core() -> None:
    code = (
        "import pickle, sys; sys.modules['ddp_core'] = None\n"
        "coordinator = pickle.load(sys.stdin.buffer)\n"
        "print(type(coordinator).__name__, coordinator.name)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=pickle.dumps(_Shipped()),
        capture_output=True,
        check=True,
    )
    assert done.stdout.split() == [b"Coordinator", _Shipped.name.encode()]
