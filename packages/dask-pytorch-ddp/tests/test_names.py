"""The import names of 0.2.2 are the public classes of the three packages, with its signatures."""

import importlib
import inspect
import subprocess
import sys
from importlib.metadata import requires, version

import pytest

import dask_pytorch_ddp
import ddp_core
import ddp_results
import ddp_s3data
from dask_pytorch_ddp import data, dispatch, results


def test_names_are_those_of_the_three_packages() -> None:
    assert dispatch.run is ddp_core.run
    assert results.DaskResultsHandler is ddp_results.DaskResultsHandler
    assert results.S3ResultsHandler is ddp_results.S3ResultsHandler
    assert issubclass(data.S3ImageFolder, ddp_s3data.S3ImageFolder)


@pytest.mark.parametrize("module", ["dispatch", "data", "results"])
def test_the_name_before_the_rename_leads_to_the_same(module: str) -> None:
    sys.modules.pop("dask_pytorch", None)
    with pytest.warns(DeprecationWarning, match="import dask_pytorch_ddp instead"):
        importlib.import_module("dask_pytorch")
    old = importlib.import_module(f"dask_pytorch.{module}")
    new = importlib.import_module(f"dask_pytorch_ddp.{module}")
    for name in new.__all__:
        assert getattr(old, name) is getattr(new, name)


def test_importing_the_old_name_warns_the_user_in_his_own_line() -> None:
    program = "import dask_pytorch.data"
    command = [sys.executable, "-W", "error::DeprecationWarning:__main__", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert "dask_pytorch was renamed" in done.stderr


def test_positional_parameters_of_the_image_folder_are_those_of_0_2_2() -> None:
    names = list(inspect.signature(data.S3ImageFolder).parameters)
    assert names[:5] == ["s3_bucket", "s3_prefix", "transform", "target_transform", "anon"]


def test_parameters_of_process_results_are_those_of_0_2_2() -> None:
    names = list(inspect.signature(results.DaskResultsHandler.process_results).parameters)
    assert names == ["self", "prefix", "futures", "raise_errors"]


def test_the_three_packages_are_pinned_to_this_version() -> None:
    pins = {name.partition(";")[0].replace(" ", "") for name in requires("dask-pytorch-ddp") or ()}
    for package in ("ddp-core", "ddp-s3data[vision]", "ddp-results[pandas,plot,rich,s3]"):
        assert f"{package}=={version('dask-pytorch-ddp')}" in pins
    assert dask_pytorch_ddp.__version__ == ddp_core.__version__
