"""Transfers keep values unchanged; test_device_reads.py counts transfers and GPU synchronisations."""

from collections.abc import Callable

import pytest
import torch

from esper_lightning.envs import HostPool
from esper_lightning.envs.actions import relevance_table
from esper_lightning.envs.measurements import (
    LossAndScore,
    Validation,
    copy_to_device,
    download,
    pack_epochs,
    pack_training,
    unpack_epochs,
    unpack_validations,
    upload,
)
from esper_lightning.growth.gates import GradientStats
from esper_lightning.growth.stages import Stage
from tests.decisions import CPU
from tests.growth.grown import grow

GPU = torch.device("cuda", 0)


def test_on_the_cpu_a_tensor_is_there_already() -> None:
    tensor = torch.arange(3.0)

    assert copy_to_device(tensor, CPU) is tensor
    assert download(tensor) is tensor
    assert upload([1, 2], CPU).tolist() == [1, 2]
    assert upload([1, 2], CPU, torch.float64).dtype == torch.float64


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_numbers_come_back_from_a_gpu_as_they_went_after_what_is_queued_before() -> None:
    rows = torch.randn(5, 7).t()  # not contiguous
    for tensor in (rows, rows > 0.0, torch.arange(12), torch.zeros(0, 3)):
        there = copy_to_device(tensor, GPU)
        back = download(there)

        assert there.device == GPU and back.device == CPU
        assert torch.equal(back, tensor)
    x = torch.ones(2048, 2048, device=GPU)
    for _ in range(50):
        x = x @ x / 2048.0
    assert torch.equal(download(x), torch.ones(2048, 2048))


def test_the_table_of_relevance_is_cached_for_training_too() -> None:
    relevance_table.cache_clear()
    with torch.inference_mode():
        table = relevance_table(CPU)

    assert relevance_table(CPU) is table and not table.is_inference()


def test_measurements_are_read_by_name_as_they_were_packed(make_pool: Callable[..., HostPool]) -> None:
    (env,) = make_pool(1).envs
    for slot, stage in zip(env.slots, (Stage.FOSSILIZED, Stage.BLENDING, Stage.TRAINING), strict=True):
        grow(slot, stage, "norm")
    one, two, _ = (slot.name for slot in env.slots)
    names = {frozenset((one, two)): 0, frozenset((two,)): 1, frozenset((one,)): 2}
    # Loss and score of two hosts, with a different value for each combination of seeds.
    validated = torch.tensor([[[10.0 * row + names[v] for v in env.variants()] for row in range(2)]] * 2)
    gradients = torch.arange(2 * 4 * 4.0).view(2, 4, 4)
    trained = pack_training(torch.tensor([[0.5, 0.25], [1.5, 0.75]]), torch.tensor([0.0, 3.0]), gradients)

    first, second = unpack_epochs(pack_epochs(trained, validated), slots=3)

    assert (second.training.loss, second.training.score, second.training.skipped_steps) == (1.5, 0.75, 3)
    assert first.training.host_gradient == GradientStats(0.0, 1.0, 2.0, 3.0)
    assert second.training.seed_gradients == [GradientStats(*range(first, first + 4)) for first in (20, 24, 28)]
    whole, without_one, without_two = (LossAndScore(float(i), 10.0 + i) for i in range(3))
    expected = Validation(whole, [without_one, without_two, whole], without_two)
    assert first.validation == second.validation == expected
    assert unpack_validations(validated) == [expected] * 2
    assert Validation.from_pairs(expected.pairs()) == expected
