"""Wrong input is answered with what is wrong and what to do, through the old names too."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from distributed import Client, LocalCluster

import ddp_core
import ddp_results
import ddp_s3data
from dask_pytorch_ddp.data import S3ImageFolder
from dask_pytorch_ddp.dispatch import run
from dask_pytorch_ddp.results import DaskResultsHandler, S3ResultsHandler
from s3_server import S3Server

pytestmark = pytest.mark.xdist_group("cluster")


def test_missing_bucket_is_named(s3: S3Server) -> None:
    with pytest.raises(ddp_s3data.S3DataError, match=r"no-such-bucket.*does not exist"):
        S3ImageFolder("no-such-bucket", "train/")


def test_empty_prefix_is_named(s3: S3Server) -> None:
    s3.create_bucket("sparse")
    s3.put_objects("sparse", {"train2/cat/1.png": b"x"})
    with pytest.raises((FileNotFoundError, ddp_s3data.S3DataError), match="s3://sparse/train"):
        S3ImageFolder("sparse", "train")


def test_missing_credentials_are_explained(s3: S3Server, tmp_path: Path) -> None:
    s3.create_bucket("private")
    environment = {name: value for name, value in os.environ.items() if "AWS_" not in name}
    environment |= {
        "AWS_ENDPOINT_URL": s3.endpoint_url,
        "AWS_EC2_METADATA_DISABLED": "true",
        "HOME": str(tmp_path),
    }
    program = "import ddp_s3data; ddp_s3data.S3ImageFolder('private', 'train/')"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "s3://private" in last
    assert "credentials" in last
    assert "anon=True" in last


def test_cluster_without_workers_is_said_to_have_none() -> None:
    options = ddp_core.LaunchOptions(wait_timeout_s=1)
    with (
        LocalCluster(n_workers=0, dashboard_address=":0") as cluster,
        Client(cluster) as client,
        pytest.raises(ddp_core.NotEnoughWorkersError, match="running: 0"),
    ):
        ddp_core.launch(client, print, options=options).result(timeout=60)


def test_unwritable_results_folder_is_named_before_the_training_ends(client: Client) -> None:
    handler = DaskResultsHandler()
    futures = run(client, lambda: None, backend="gloo")
    with pytest.raises(ddp_results.ResultsError, match="/sys/results"):
        handler.process_results("/sys/results", futures)  # not even root may write there


def test_missing_results_bucket_is_named_at_the_start(s3: S3Server) -> None:
    with pytest.raises(ddp_results.ResultsError, match="no-such-results"):
        S3ResultsHandler("s3://no-such-results/runs/1").submit_result("a.txt", "a")
