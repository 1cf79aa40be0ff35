"""Read a bucket in plain PyTorch: python plain_pytorch.py s3://bucket/prefix/ [--anon]."""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch
from PIL import Image

from ddp_s3data import S3DataLoader, S3ImageFolder


def to_tensor(image: Image.Image) -> torch.Tensor:
    """Return the image as a tensor of one size; torchvision's transforms do the same and more."""
    small = image.resize((64, 64))
    return torch.from_numpy(np.array(small)).permute(2, 0, 1).float() / 255


def main() -> None:
    """Print the classes, and the mean colour of each batch of one epoch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address", help="s3://bucket/prefix/, with one directory for each class")
    parser.add_argument("--anon", action="store_true", help="for public buckets")
    parser.add_argument("--num-workers", type=int, default=2)
    arguments = parser.parse_args()

    dataset = S3ImageFolder(arguments.address, transform=to_tensor, anon=arguments.anon)
    print(dataset)
    loader = S3DataLoader(dataset, batch_size=64, shuffle=True, num_workers=arguments.num_workers)
    started = time.perf_counter()
    for number, (images, targets) in enumerate(loader):
        colour = images.mean(dim=(0, 2, 3)).tolist()
        print(f"batch {number}: {len(targets)} images, mean colour {colour}")
    print(f"{len(dataset) / (time.perf_counter() - started):.0f} images/s")


if __name__ == "__main__":
    main()
