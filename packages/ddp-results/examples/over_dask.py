"""Two ranks on a Dask cluster submit metrics and results; the client stores and draws them."""

import math
import sys

from distributed import Client, LocalCluster

from ddp_results import DaskResultsHandler, open_run


def train(rank, results):
    """Stand for a training loop: a falling loss, and a summary in the last line."""
    for step in range(200):
        results.log_metrics({"loss": math.exp(-step / 50) + rank / 10}, step=step)
    results.submit_result(f"worker/{rank}/summary.json", '{"steps": 200}')


def main(folder):
    """Run the ranks and look at what they left."""
    with LocalCluster(n_workers=2, threads_per_worker=1) as cluster, Client(cluster) as client:
        results = DaskResultsHandler()
        futures = [client.submit(train, rank, results, pure=False) for rank in range(2)]
        print(results.process_results(folder, futures))

    run = open_run(folder)
    print(run.results())
    print(run.to_pandas().groupby("src")["loss"].describe())
    run.plot("loss", f"{folder}/loss.png")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "example-results")
