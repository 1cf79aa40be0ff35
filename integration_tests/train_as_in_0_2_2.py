"""The training script of the README of dask-pytorch-ddp 0.2.2, for the CPU, as its users wrote it.

What differs from that README, and why: the imports it left out are there, the device is the CPU and
the backend is gloo (no GPU needed), and the checkpoint interval is 2 instead of 100 (few images).
"""

import argparse
import datetime
import json
import multiprocessing as mp
import pickle
import uuid

import numpy as np
import torch
import torch.distributed as dist
from dask.distributed import Client, LocalCluster
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data.sampler import SubsetRandomSampler
from torchvision import models, transforms

from dask_pytorch_ddp import dispatch
from dask_pytorch_ddp.data import S3ImageFolder
from dask_pytorch_ddp.results import DaskResultsHandler

transform = transforms.Compose(
    [transforms.Resize(256), transforms.CenterCrop(250), transforms.ToTensor()]
)
key = uuid.uuid4().hex
rh = DaskResultsHandler(key)


def run_transfer_learning(bucket, prefix, n_epochs, batch_size, num_workers, train_sampler):
    worker_rank = int(dist.get_rank())
    device = torch.device("cpu")
    net = models.resnet18(weights=None)
    model = net.to(device)
    model = DDP(model)

    criterion = nn.CrossEntropyLoss()
    lr = 0.001
    optimizer = optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    whole_dataset = S3ImageFolder(bucket, prefix, transform=transform)

    train_loader = torch.utils.data.DataLoader(
        whole_dataset,
        sampler=train_sampler,
        batch_size=batch_size,
        num_workers=num_workers,
        multiprocessing_context=mp.get_context("fork"),
    )

    count = 0
    for epoch in range(n_epochs):
        # Each epoch has a training and validation phase
        model.train()  # Set model to training mode
        for inputs, labels in train_loader:
            dt = datetime.datetime.now().isoformat()
            inputs = inputs.to(device)
            labels = labels.to(device)
            outputs = model(inputs)
            _, preds = torch.max(outputs, 1)
            loss = criterion(outputs, labels)

            # zero the parameter gradients
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            count += 1

            # statistics
            rh.submit_result(
                f"worker/{worker_rank}/data-{dt}.json",
                json.dumps(
                    {"loss": loss.item(), "epoch": epoch, "count": count, "worker": worker_rank}
                ),
            )
            if (count % 2) == 0 and worker_rank == 0:
                rh.submit_result(f"checkpoint-{dt}.pkl", pickle.dumps(model.state_dict()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("bucket")
    parser.add_argument("prefix")
    parser.add_argument("results")
    arguments = parser.parse_args()

    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster:
        client = Client(cluster)
        indices = list(range(len(S3ImageFolder(arguments.bucket, arguments.prefix))))
        np.random.shuffle(indices)
        futures = dispatch.run(
            client,
            run_transfer_learning,
            bucket=arguments.bucket,
            prefix=arguments.prefix,
            n_epochs=2,
            batch_size=4,
            num_workers=2,
            train_sampler=SubsetRandomSampler(indices),
            backend="gloo",
        )
        rh.process_results(arguments.results, futures, raise_errors=False)
        client.close()
