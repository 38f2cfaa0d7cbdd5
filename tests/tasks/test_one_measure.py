"""One function measures the outputs for images and for sequences, on any device."""

import pytest
import torch

from esper_lightning.tasks import CIFAR10, Digits, Synthetic, Task

META = torch.device("meta")
"""The meta device, which has shapes and dtypes only; operations that mix it with CPU tensors fail."""


def test_one_measure_serves_images_and_sequences() -> None:
    """F15: a task measures loss and accuracy per sample for targets [B] and [B, T], in the outputs' dtype."""
    chances = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1], [0.2, 0.2, 0.6], [0.7, 0.2, 0.1]]).double()
    targets = torch.tensor([0, 1, 2, 2])
    task = Digits()
    images = task.measure(chances.log(), targets)
    sequences = task.measure(chances.log().view(2, 2, 3), targets.view(2, 2))

    torch.testing.assert_close(images.loss, -torch.tensor([0.5, 0.8, 0.6, 0.1]).double().log(), rtol=0, atol=1e-7)
    assert images.correct.tolist() == [1, 1, 1, 0]
    torch.testing.assert_close(sequences.loss, images.loss.view(2, 2).mean(1))
    assert sequences.correct.tolist() == [1, 0.5]
    assert {measure.dtype for measure in (*images, *sequences)} == {torch.float64}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(6,), (6, 5)], ids=["images", "sequences"])
@pytest.mark.parametrize("task", [CIFAR10(), Digits(), Synthetic()], ids=lambda task: type(task).__name__)
def test_every_task_measures_on_the_device_of_the_outputs(
    task: Task, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """F15: every task measures on another device than the CPU, without tensors from elsewhere."""
    outputs = torch.zeros(*shape, 3, device=META, dtype=dtype)
    measures = task.measure(outputs, torch.zeros(shape, device=META, dtype=torch.int64))

    assert [measure.device for measure in measures] == [META] * 2
    assert [measure.shape for measure in measures] == [(6,)] * 2
    assert {measure.dtype for measure in measures} == {torch.promote_types(dtype, torch.float32)}
