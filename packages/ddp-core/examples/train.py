"""Train a small model with DistributedDataParallel on a Dask cluster of two local workers."""

from dask.distributed import Client, LocalCluster

from ddp_core import LaunchOptions, launch


def train(epochs: int) -> float:
    """Runs in every rank, inside a process group, as it would under torchrun."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    from ddp_core import current_rank

    me = current_rank()
    torch.manual_seed(me.rank)
    x = torch.randn(512, 8)
    y = x @ torch.arange(8.0)[:, None] + 1

    model = DistributedDataParallel(torch.nn.Linear(8, 1).to(me.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(epochs):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x.to(me.device)), y.to(me.device))
        loss.backward()
        optimizer.step()
    return loss.item()


if __name__ == "__main__":
    with LocalCluster(n_workers=2, threads_per_worker=1) as cluster, Client(cluster) as client:
        job = launch(client, train, kwargs={"epochs": 50}, options=LaunchOptions(backend="gloo"))
        print(job)
        print("loss of each rank:", job.result())
