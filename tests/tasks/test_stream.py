"""Training data that do not fit into memory: chunks, resume, memory, and what is refused."""

import gc
import json
import multiprocessing
import pickle
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import chain, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning import seed_everything
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from esper_lightning.envs import HostPool
from esper_lightning.tasks import FromDataModule, Split, Stream, Task, TaskData
from tests.runs import ROOT, Run, continuation, differences, fit, fit_saving_ticks
from tests.tasks.large import Pictures, make_pool, play, write
from tests.tiers import rest_is_slow


def gathered(batches: Any) -> Split:
    return Split(*map(torch.cat, zip(*batches, strict=True)))


class Numbers(IterableDataset):
    """The numbers 0 … 59, without random access."""

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return ((i, i % 3) for i in range(60))


def test_chunks_are_whole_batches_and_go_on_in_the_next_pass() -> None:
    stream = Stream(DataLoader(Numbers(), batch_size=10), gathered)

    chunks = [stream.chunk(0, tick, 25).inputs.tolist() for tick in range(3)]

    assert chunks == [[*range(30)], [*range(30, 60)], [*range(30)]]


def test_an_episode_sees_each_sample_of_a_pass_once_in_an_order_of_its_own() -> None:
    stream = Stream(DataLoader(list(Numbers()), batch_size=10, shuffle=True), gathered)

    def episode(rng_seed: int) -> list[list[int]]:
        return [stream.chunk(rng_seed, tick, 20).inputs.tolist() for tick in range(6)]

    first, other = episode(4), episode(6)
    for chunks in (first, other):
        assert sorted(chain(*chunks[:3])) == sorted(chain(*chunks[3:])) == list(range(60))
        assert chunks[:3] != chunks[3:]
    assert first != other and episode(4) == first


@pytest.mark.parametrize(
    ("workers", "source"),
    rest_is_slow(product([0, 2], ["global", "loader", "sampler"]), lambda case: case[0] == 0 or case[1] == "global"),
)
def test_a_chunk_is_the_same_whatever_was_read_and_drawn_before(workers: int, source: str) -> None:
    def stream() -> Stream:
        data, generator = Pictures().data, torch.Generator().manual_seed(random.randrange(100))
        settings: dict[str, Any] = {
            "global": {"shuffle": True},
            "loader": {"shuffle": True, "generator": generator},
            "sampler": {"sampler": RandomSampler(data, generator=generator)},
        }[source]
        return Stream(DataLoader(data, batch_size=24, num_workers=workers, **settings), gathered)

    one, another = stream(), stream()
    last = [one.chunk(2, tick, 48).inputs for tick in range(4)][-1]
    seed_everything(1)
    expected = random.Random(1).random(), np.random.RandomState(1).rand(), torch.get_rng_state()

    for other in (another, one, pickle.loads(pickle.dumps(one))):
        assert torch.equal(other.chunk(2, 3, 48).inputs, last)
    assert not torch.equal(one.chunk(4, 3, 48).inputs, last)
    assert (random.random(), np.random.rand()) == expected[:2], "the global generators do not advance"
    assert torch.equal(torch.get_rng_state(), expected[2])


def test_a_stream_that_is_dropped_ends_its_workers_at_once() -> None:
    before = set(multiprocessing.active_children())
    stream = Stream(DataLoader(Pictures().data, batch_size=24, num_workers=2), gathered)
    stream.chunk(0, 0, 24)
    workers = set(multiprocessing.active_children()) - before
    gc.disable()  # which would find it later
    try:
        del stream
        assert len(workers) == 2 and not any(worker.is_alive() for worker in workers)
    finally:
        gc.enable()


class AsFloats(Task):
    """The first images of `Pictures`, as floats in memory."""

    def load(self) -> TaskData:
        inputs = torch.from_numpy(Pictures(number=64).data.images.astype(np.float32) / np.float32(255))
        return TaskData(*[Split(inputs, torch.arange(64) % 10)] * 3, outputs=10)


def state(pool: HostPool) -> list[Any]:
    weights = [weight.tolist() for env in pool.envs for weight in env.network.state_dict().values()]
    return [*weights, *(vars(env.history) for env in pool.envs), *map(Tensor.tolist, pool.test_scores())]


@pytest.mark.parametrize("executor", ["loop", "threads", "fused"])
def test_hosts_on_chunks_that_are_the_whole_data_equal_hosts_on_floats_in_memory(executor: str) -> None:
    stream = FromDataModule(Pictures(number=64, jitter=False, shuffle=False), stream=True)

    pools = [make_pool(task, executor=executor) for task in (stream, AsFloats())]
    for pool in pools:
        play(pool, 3)

    assert pools[0].data.validation.inputs.dtype is torch.uint8
    assert state(pools[0]) == state(pools[1])


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_on_a_stream_resumes_bit_for_bit(workers: int, tmp_path: Path) -> None:
    data = {"class_path": "tests.tasks.large.Pictures", "dict_kwargs": {"num_workers": workers}}
    task = {"class_path": "FromDataModule", "init_args": {"data": data, "stream": True}}
    flags = ("--data.task", json.dumps(task), "--trainer.max_epochs=2")
    whole, run = fit_saving_ticks(tmp_path / "whole", *flags), Run(tmp_path / "part" / "version_0")
    run.checkpoints.mkdir(parents=True)
    checkpoint = shutil.copy(whole.checkpoints / "tick8.ckpt", run.checkpoints)  # in the second rollout of five ticks

    fit(tmp_path / "part", *flags, "--ckpt_path", str(checkpoint))

    assert differences(continuation(run.last), continuation(whole.last)) == []


def test_with_a_budget_a_chunk_has_the_samples_of_a_host_without_seeds() -> None:
    pool, seen = make_pool(FromDataModule(Pictures(), stream=True), batches=None, flops=1e7), []
    pool.envs[0].on_batches = lambda batches: seen.append(batches.indices.flatten())

    play(pool)

    assert len(seen[0]) == pool.env_factory.samples_per_epoch == len(seen[0].unique())


def streamed(**settings: Any) -> FromDataModule:
    return FromDataModule(Pictures(**settings), stream=True)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: make_pool(streamed(), batches=None), "training.batches must say how many minibatches"),
        (lambda: streamed(num_workers=1, persistent_workers=True).load(), "leave persistent_workers .* off$"),
        (lambda: Stream([], gathered).chunk(0, 0, 1), "the training loader has no batches; give it data$"),
        (lambda: streamed(collate_fn=dict).load(), "training batches must be pairs of tensors"),
    ],
)
def test_what_cannot_be_streamed_is_refused_in_one_line(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()


def test_a_class_that_appears_late_is_refused_in_one_line() -> None:
    pictures = Pictures(number=2000, shuffle=False)
    rest = pictures.val_dataloader()
    pictures.val_dataloader = pictures.test_dataloader = lambda: rest
    pictures.data = [(image, number + (i > 1500)) for i, (image, number) in enumerate(pictures.data)]
    pool = make_pool(FromDataModule(pictures, stream=True), batches=100)

    with pytest.raises(ValueError, match=r"^task FromDataModule: its training data have targets 0 … 10, outside of"):
        play(pool)


@pytest.mark.slow
def test_four_gigabytes_of_images_are_learned_from_in_one_and_a_half(tmp_path: Path) -> None:
    write(tmp_path / "images", 4 * 2**30)

    command = [sys.executable, "-m", "tests.tasks.large", str(tmp_path / "images")]
    trained = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=1800)

    (tmp_path / "images").unlink()
    measured = json.loads(trained.stdout.splitlines()[-1])
    print(f"peak {measured['peak']:.2f} GB; {measured['speed']:.2f} times the speed of data in memory")
    assert measured["peak"] < 1.5
