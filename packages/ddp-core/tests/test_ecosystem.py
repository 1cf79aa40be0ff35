"""Code written for torchrun runs unchanged, and comes to the same weights as under torchrun."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import Client

from ddp_core import LaunchOptions, RankFailedError, launch

pytestmark = [pytest.mark.xdist_group("cluster"), pytest.mark.timeout(180)]

N_STEPS = 5


def data_of(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.rand(8, 4, generator=generator)


def weights_of(model: torch.nn.Module) -> list[float]:
    return [value for p in model.parameters() for value in p.detach().flatten().tolist()]


def seeded_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))


def plain() -> list[float]:
    """A script for torchrun: it makes the process group itself."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    model = DistributedDataParallel(seeded_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(N_STEPS):
        optimizer.zero_grad()
        model(data_of(dist.get_rank(), step)).pow(2).mean().backward()
        optimizer.step()
    dist.destroy_process_group()
    return weights_of(model)


def fabric() -> list[float]:
    """Lightning Fabric, which detects torchrun's environment by itself."""
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    model = seeded_model()
    wrapped, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(N_STEPS):
        optimizer.zero_grad()
        fabric.backward(wrapped(data_of(fabric.global_rank, step)).pow(2).mean())
        optimizer.step()
    assert fabric.world_size == 2
    return weights_of(model)


def accelerate() -> list[float]:
    """Hugging Face Accelerate."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = seeded_model()
    wrapped, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(N_STEPS):
        optimizer.zero_grad()
        accelerator.backward(wrapped(data_of(accelerator.process_index, step)).pow(2).mean())
        optimizer.step()
    assert accelerator.num_processes == 2
    return weights_of(model)


@pytest.fixture(scope="module")
def under_torchrun(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The weights to which the plain script comes under torchrun itself."""
    folder = tmp_path_factory.mktemp("torchrun")
    script = folder / "script.py"
    script.write_text(
        f"import os, sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "import test_ecosystem as written, torch\n"
        "weights = written.plain()\n"
        f"torch.save(weights, os.path.join({str(folder)!r}, os.environ['RANK']))\n"
    )
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         str(script)],
        check=True, timeout=120,
    )  # fmt: skip
    first, second = (torch.load(folder / str(rank)) for rank in (0, 1))
    assert first == second
    return first


@pytest.mark.parametrize("function", [plain, fabric, accelerate])
@pytest.mark.parametrize("warm", [True, False])
def test_code_for_torchrun_comes_to_the_same_weights(
    client: Client, under_torchrun: list[float], function: Any, warm: bool
) -> None:
    options = LaunchOptions(init_process_group=False, warm=warm)
    for weights in launch(client, function, options=options).result(120):
        assert weights == pytest.approx(under_torchrun, rel=1e-5)


@pytest.mark.parametrize("function", [fabric, accelerate])
def test_libraries_find_a_process_group_that_is_there(
    client: Client, under_torchrun: list[float], function: Any
) -> None:
    for weights in launch(client, function).result(120):
        assert weights == pytest.approx(under_torchrun, rel=1e-5)


def test_a_second_process_group_is_explained(client: Client) -> None:
    with pytest.raises(RankFailedError, match="twice") as caught:
        launch(client, plain, options=LaunchOptions(grace_s=2)).result(60)
    assert any("init_process_group=False" in n for n in caught.value.__cause__.__notes__)
