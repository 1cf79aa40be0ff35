from __future__ import annotations

from pathlib import Path

import pytest
from distributed import Client

from ddp_results import CheckpointError, DaskResultsHandler, PathError, open_run

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.xdist_group("cluster")


def test_checkpoint_is_read_back_as_saved(client: Client, tmp_path: Path) -> None:
    handler = DaskResultsHandler()
    state = torch.nn.Linear(300, 2000).state_dict()

    def work() -> None:
        for step in (1, 2):
            handler.save_checkpoint(f"step-{step}", state, step=step, metrics={"loss": 1 / step})

    handler.process_results(tmp_path, [client.submit(work, pure=False)])
    run = open_run(tmp_path)
    latest = run.latest_checkpoint()
    assert latest is not None
    assert (latest.name, latest.step, latest.metrics) == ("step-2", 2, {"loss": 0.5})
    assert torch.equal(latest.load()["weight"], state["weight"])
    assert run.best_checkpoint("loss", "max").name == "step-1"
    plain = torch.load(tmp_path / latest.path, weights_only=True)
    assert torch.equal(plain["bias"], state["bias"])


def test_what_could_not_be_read_back_is_refused_when_saved() -> None:
    with pytest.raises(CheckpointError, match="weights_only"):
        DaskResultsHandler().save_checkpoint("x", {"model": Path("a")})


def test_name_of_a_checkpoint_is_one_segment() -> None:
    with pytest.raises(PathError, match="single path segment"):
        DaskResultsHandler().save_checkpoint("a/b", {})
