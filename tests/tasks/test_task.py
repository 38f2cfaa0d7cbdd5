"""The measure of outputs, compared with double precision."""

import numpy as np
import pytest
import torch
from scipy.special import log_softmax
from torch import Tensor

from esper_lightning.tasks import Digits, Split, TaskData

TASK = Digits()  # a task with the default measure


def drawn(*shape: int, classes: int = 7, scale: float = 3.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(sum(shape))
    outputs = scale * torch.randn(*shape, classes, generator=generator)
    return outputs, torch.randint(classes, shape, generator=generator)


def reference(outputs: Tensor, targets: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return loss and accuracy of each sample in double precision."""
    logs = log_softmax(outputs.numpy().astype(np.float64), axis=-1)
    chosen = np.take_along_axis(logs, targets.numpy()[..., None], axis=-1)[..., 0]
    right = logs.argmax(-1) == targets.numpy()
    within = tuple(range(1, targets.ndim))
    return -chosen.mean(within), right.mean(within)


@pytest.mark.parametrize("shape", [(1,), (64,), (5, 1), (16, 9), (1, 33)], ids=str)
@pytest.mark.parametrize("scale", [0.01, 3.0, 200.0])
def test_measures_agree_with_double_precision(shape: tuple[int, ...], scale: float) -> None:
    outputs, targets = drawn(*shape, scale=scale)
    measures = TASK.measure(outputs, targets)
    loss, correct = reference(outputs, targets)
    assert measures.loss.shape == measures.correct.shape == shape[:1]
    np.testing.assert_allclose(measures.loss.numpy(), loss, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(measures.correct.numpy(), correct, rtol=1e-6)


def test_a_sequence_counts_its_right_predictions_by_hand() -> None:
    outputs = torch.tensor([[[9.0, 0.0], [9.0, 0.0]], [[0.0, 9.0], [9.0, 0.0]]])  # predicts 0 0 and 1 0
    measures = TASK.measure(outputs, torch.tensor([[0, 1], [1, 0]]))
    assert measures.correct.tolist() == [0.5, 1.0]


def test_knowing_nothing_costs_the_logarithm_of_the_classes() -> None:
    measures = TASK.measure(torch.zeros(4, 10), torch.tensor([0, 3, 7, 9]))
    assert measures.loss.tolist() == pytest.approx([2.302585] * 4)


def test_measures_are_of_the_outputs_precision() -> None:
    outputs, targets = drawn(6)
    measures = TASK.measure(outputs.double(), targets)
    assert measures.loss.dtype == measures.correct.dtype == torch.float64


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_outputs_in_half_precision_are_judged_in_float32(half: torch.dtype) -> None:
    outputs, targets = drawn(16, 9)
    measures = TASK.measure(outputs.to(half), targets)
    assert measures.loss.dtype == measures.correct.dtype == torch.float32
    for measured, expected in zip(measures, TASK.measure(outputs.to(half).float(), targets), strict=True):
        assert torch.equal(measured, expected)


def test_outputs_in_an_awkward_memory_order_are_measured_alike() -> None:
    outputs, targets = drawn(6, 4)
    turned = outputs.transpose(0, 1).contiguous().transpose(0, 1)
    assert not turned.is_contiguous()
    for expected, measured in zip(TASK.measure(outputs, targets), TASK.measure(turned, targets), strict=True):
        torch.testing.assert_close(measured, expected)
    strided = targets.T.contiguous().T
    torch.testing.assert_close(TASK.measure(outputs, strided).loss, TASK.measure(outputs, targets).loss)


def test_a_sample_learns_from_its_own_loss_alone() -> None:
    outputs, targets = drawn(5, 3)
    outputs.requires_grad_()
    TASK.measure(outputs, targets).loss[2].backward()
    touched = outputs.grad.flatten(1).any(1)
    assert touched.tolist() == [False, False, True, False, False]


@pytest.mark.parametrize(("outputs", "targets"), [((4, 10), (5,)), ((4, 3, 10), (4, 2)), ((4, 3, 10), (4,))], ids=str)
def test_outputs_and_targets_of_different_lengths_are_refused(
    outputs: tuple[int, ...], targets: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match="batch_size"):
        TASK.measure(torch.zeros(outputs), torch.zeros(targets, dtype=torch.int64))


def test_a_target_beyond_the_classes_is_refused() -> None:
    with pytest.raises(IndexError):
        TASK.measure(torch.zeros(2, 3), torch.tensor([0, 3]))


def test_data_move_to_a_device_as_a_whole() -> None:
    split = Split(torch.zeros(4, 2, 3), torch.zeros(4, dtype=torch.int64))
    data = TaskData(split, split, split, classes=2)
    moved = data.copy_to([torch.device("meta")])
    assert data.input_shape == moved.input_shape == (2, 3)
    assert {tensor.device.type for part in moved[:3] for tensor in part} == {"meta"}
    assert (moved.classes, moved.train.samples) == (2, 4)
