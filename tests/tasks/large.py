"""Images that are read one by one, and a training on more of them than fit into memory."""

import json
import random
import re
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from esper_lightning.envs import EnvConfig, HostPool
from esper_lightning.envs.actions import ActionConfig, to_action
from esper_lightning.envs.host_training import HostTraining
from esper_lightning.hosts import CNN
from esper_lightning.tasks import FromDataModule, Task

BLOCKS, BLOCK = 64, 1000
"""Numbers of stretches of a large file that have content, and of images in one; the rest is empty."""


class Stored(Dataset):
    """Images of uint8 in ten classes, each of which is shifted anew by all global generators whenever it is read."""

    def __init__(self, images: np.ndarray, jitter: bool) -> None:
        self.images, self.jitter = images, jitter

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        image = torch.from_numpy(np.array(self.images[i]))
        shift = int(torch.randint(8, ())) + random.randrange(8) + int(np.random.randint(8)) if self.jitter else 0
        return image.roll(shift, -1), i % 10


class Pictures(LightningDataModule):
    """Data module of a file of images of 3×32×32, the first `number` of them; without a file, of small random ones."""

    def __init__(self, path: str | None = None, number: int | None = 100, jitter: bool = True, **loader: Any) -> None:
        super().__init__()
        drawn = np.random.default_rng(0).integers(0, 256, (number or 0, 1, 8, 8), dtype=np.uint8)
        images = drawn if path is None else np.memmap(path, np.uint8, "r").reshape(-1, 3, 32, 32)[:number]
        self.data, self.loader = Stored(images, jitter), {"batch_size": 24, "shuffle": True} | loader

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.data, **self.loader)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(Stored(self.data.images[:500], False), batch_size=100)

    test_dataloader = val_dataloader


def write(path: Path, size: int) -> None:
    """Write a file of `size` bytes of images, of which some stretches have content."""
    images = np.memmap(path, np.uint8, "w+", shape=(size // 3072, 3, 32, 32))
    drawn = np.random.default_rng(0)
    for start in np.linspace(0, len(images) - BLOCK, BLOCKS, dtype=int):
        images[start : start + BLOCK] = drawn.integers(0, 256, (BLOCK, 3, 32, 32), dtype=np.uint8)


def make_pool(task: Task, *, executor: str = "loop", hosts: int = 3, **settings: Any) -> HostPool:
    """Return a pool of small CNNs on a task, at the beginning of an episode."""
    training = HostTraining(**{"batch_size": 16, "batches": 4} | settings)
    config = EnvConfig(training=training, executor=executor, actions=ActionConfig(blueprints=["norm"]))
    data, host, device = task.load(), partial(CNN, base=4), torch.device("cpu")
    return HostPool(task, data, host, config=config, n_envs=hosts, device=device)


def play(pool: HostPool, ticks: int = 1) -> float:
    """Train all hosts for some ticks without actions, and return the seconds that it took."""
    started = time.perf_counter()
    for _ in range(ticks):
        pool.step(to_action([(0,) * len(pool.space)] * pool.n_envs, pool.device))
    return time.perf_counter() - started


def measure(path: str, pairs: int) -> dict[str, float]:
    """Train on a file, then also on a part of it in memory.

    Returns the largest memory of the process in GB until then, and the speed of ticks on the file relative to those in
    memory, the median of alternating pairs.
    """
    torch.set_num_threads(1)
    loader, settings = {"jitter": False, "batch_size": 640}, {"hosts": 4, "batches": 20, "batch_size": 32}
    streamed = make_pool(FromDataModule(Pictures(path, None, **loader), stream=True), **settings)
    play(streamed, 8)
    # `getrusage` would count the memory of the process that has forked this one.
    peak = int(re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[0]) / 2**20
    pools = streamed, make_pool(FromDataModule(Pictures(path, 20_000, **loader)), **settings)
    for pool in pools:
        pool.reset(range(4))
        play(pool)  # which begins a pass
    seconds = [[play(pool) for pool in pools] for _ in range(pairs)]
    return {"peak": peak, "speed": statistics.median(in_memory / on_file for on_file, in_memory in seconds)}


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], pairs=5)))
