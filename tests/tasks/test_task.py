"""Measures of outputs, further metrics, checks of data, and the synthetic task."""

import math

import numpy as np
import pytest
import torch
from scipy.special import log_softmax
from sklearn.metrics import r2_score, recall_score
from sklearn.neighbors import KNeighborsClassifier
from torch import Tensor

from esper_lightning.tasks import (
    CIFAR10,
    Digits,
    Measures,
    Split,
    Synthetic,
    Tabular,
    Task,
    TaskData,
    Text,
    check_data,
    check_measures,
    check_outputs,
    fingerprint,
)

TASK = Digits()  # a task with the default measure
META = torch.device("meta")  # it has shapes and dtypes only; operations that mix it with CPU tensors fail


def drawn(*shape: int, classes: int = 7, scale: float = 3.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(sum(shape))
    outputs = scale * torch.randn(*shape, classes, generator=generator)
    return outputs, torch.randint(classes, shape, generator=generator)


@pytest.mark.parametrize("shape", [(1,), (64,), (5, 1), (16, 9)], ids=str)
@pytest.mark.parametrize("scale", [0.01, 3.0, 200.0])
def test_measures_agree_with_double_precision(shape: tuple[int, ...], scale: float) -> None:
    outputs, targets = drawn(*shape, scale=scale)
    measures = TASK.measure(outputs, targets)
    logs = log_softmax(outputs.numpy().astype(np.float64), axis=-1)
    losses = -np.take_along_axis(logs, targets.numpy()[..., None], axis=-1)[..., 0]
    right = logs.argmax(-1) == targets.numpy()
    within = tuple(range(1, targets.ndim))
    assert measures.loss.shape == measures.score.shape == shape[:1]
    np.testing.assert_allclose(measures.loss.numpy(), losses.mean(within), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(measures.score.numpy(), right.mean(within), rtol=1e-6)


def test_one_measure_serves_images_and_sequences() -> None:
    """F15: a task measures loss and accuracy per sample for targets [B] and [B, T], in the outputs' dtype."""
    chances = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1], [0.2, 0.2, 0.6], [0.7, 0.2, 0.1]]).double()
    targets = torch.tensor([0, 1, 2, 2])
    images = TASK.measure(chances.log(), targets)
    sequences = TASK.measure(chances.log().view(2, 2, 3), targets.view(2, 2))
    torch.testing.assert_close(images.loss, -torch.tensor([0.5, 0.8, 0.6, 0.1]).double().log(), rtol=0, atol=1e-7)
    assert images.score.tolist() == [1, 1, 1, 0] and sequences.score.tolist() == [1, 0.5]
    torch.testing.assert_close(sequences.loss, images.loss.view(2, 2).mean(1))
    assert {measure.dtype for measure in (*images, *sequences)} == {torch.float64}


def test_a_likelihood_is_0_for_uniform_guesses_and_follows_the_perplexity() -> None:
    task = Text(score="likelihood")
    logits, targets = drawn(6, 8, classes=9)
    measures = task.measure(logits, targets)
    found = 1.0 - math.log(task.test_metrics(logits, targets)["perplexity"]) / math.log(9)
    assert measures.score.mean().item() == pytest.approx(found, abs=1e-6)
    torch.testing.assert_close(measures.loss, TASK.measure(logits, targets).loss)
    assert task.measure(torch.zeros(6, 8, 9), targets).score.abs().max() < 1e-6


@pytest.mark.parametrize("shape", [(40,), (40, 3)], ids=["one quantity", "several"])
def test_the_score_of_quantities_is_r2_about_the_mean_of_the_training_data(shape: tuple[int, ...]) -> None:
    class Mine(Synthetic):
        score = "r2"

    random = np.random.default_rng(0)
    targets = random.normal(size=shape).astype(np.float32)
    outputs = torch.from_numpy(0.5 * targets + 0.1).view(len(targets), -1)
    measures = Mine().measure(outputs, torch.from_numpy(targets))
    squared = np.square(targets.reshape(40, -1) - outputs.numpy())
    np.testing.assert_allclose(measures.loss.numpy(), squared.mean(1), rtol=1e-5)
    np.testing.assert_allclose(measures.score.numpy(), 1.0 - squared.mean(1), rtol=1e-5)
    found = Mine().test_metrics(outputs, torch.from_numpy(targets))["r2"]
    assert found == pytest.approx(r2_score(targets, outputs.numpy().reshape(shape)), abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(6,), (6, 5)], ids=["images", "sequences"])
@pytest.mark.parametrize("task", [CIFAR10(), Digits(), Synthetic()], ids=lambda task: type(task).__name__)
def test_every_task_measures_on_the_device_of_the_outputs(
    task: Task, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """F15: every task measures on another device than the CPU, without tensors from elsewhere."""
    outputs = torch.zeros(*shape, 3, device=META, dtype=dtype)
    measures = task.measure(outputs, torch.zeros(shape, device=META, dtype=torch.int64))
    assert [(measure.device, measure.shape) for measure in measures] == [(META, (6,))] * 2
    assert {measure.dtype for measure in measures} == {torch.promote_types(dtype, torch.float32)}


def test_a_class_is_measured_by_the_share_of_its_samples_that_are_recognised() -> None:
    logits, targets = drawn(300, classes=4)
    targets = targets % 3  # none of the last class
    found = TASK.test_metrics(logits, targets)
    recalls = recall_score(targets, logits.argmax(1), average=None, labels=range(3))
    assert [found[f"accuracy.{c}"] for c in range(3)] == pytest.approx(recalls.tolist())
    assert np.isnan(found["accuracy.3"]), "no sample, no accuracy"


@pytest.mark.parametrize("scale", [5.0, 0.1], ids=["any logits", "logits that look like probabilities"])
def test_the_calibration_error_is_the_gap_between_confidence_and_accuracy(scale: float) -> None:
    logits, targets = drawn(300, classes=4)
    logits = scale * logits.sigmoid()
    probabilities = np.exp(logits.double().numpy())
    probabilities /= probabilities.sum(1, keepdims=True)
    confidence, correct = probabilities.max(1), probabilities.argmax(1) == targets.numpy()
    bins = np.digitize(confidence, np.linspace(0.0, 1.0, 16))
    gaps = [abs(correct[bins == b].mean() - confidence[bins == b].mean()) * (bins == b).mean() for b in np.unique(bins)]
    assert TASK.test_metrics(logits, targets)["calibration_error"] == pytest.approx(sum(gaps), abs=1e-5)


def data(inputs: Tensor | None = None, targets: Tensor | None = None, classes: int = 2) -> TaskData:
    good = Split(torch.randn(8, 3), torch.arange(8) % 2)
    bad = Split(good.inputs if inputs is None else inputs, good.targets if targets is None else targets)
    return TaskData(bad if inputs is not None and inputs.ndim > 2 else good, bad, good, classes)


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (data(torch.zeros(0, 3), torch.zeros(0)), "its validation data have 0 inputs and 0 targets"),
        (data(torch.zeros(7, 3)), "its validation data have 7 inputs and 8 targets"),
        (data(torch.zeros(8, 4)), r"its validation data have inputs \[4\], the training data \(3,\)"),
        (data(torch.full((8, 3), torch.nan)), "its validation data have inputs that are not finite"),
        (data(torch.ones(8, 3, 4, 4).long()), "its train data have images of torch.int64; give floats, or uint8"),
        (data(targets=torch.ones(8)), "its validation data have targets of torch.float32"),
        (data(targets=torch.arange(8)), r"its validation data have targets 0 … 7, outside of 0 … 1"),
        (data(targets=-torch.arange(8)), r"targets -7 … 0, outside of 0 … 1"),
    ],
)
def test_data_that_no_host_can_learn_from_are_refused_in_one_line(bad: TaskData, said: str) -> None:
    check_data(data(), "Mine")
    with pytest.raises(ValueError, match=f"^task Mine: .*{said}|{said}"):
        check_data(bad, "Mine")


@pytest.mark.parametrize(
    ("targets", "outputs", "said"),
    [
        (torch.randn(8) + 5.0, 1, "mean .* and standard deviation .* scale them to 0 and 1"),
        (torch.arange(8), 1, "targets of torch.int64, or not finite; the score r2 needs quantities"),
        (torch.tensor([1.0, -1.0]).repeat(4), 2, "1 quantities per sample, and `outputs` is 2"),
    ],
)
def test_quantities_that_are_not_scaled_or_do_not_fit_are_refused(targets: Tensor, outputs: int, said: str) -> None:
    split = Split(torch.randn(8, 3), targets)
    with pytest.raises(ValueError, match=said):
        check_data(TaskData(split, split, split, outputs), "Mine", "r2")


def test_outputs_and_measures_of_another_shape_are_refused() -> None:
    check_outputs(torch.zeros(4, 3), 2, "accuracy")
    check_measures(Measures(torch.zeros(4), torch.zeros(4)), 4, "Mine")
    for outputs, said in ((None, "returned a NoneType"), (torch.zeros(4, 1), r"returned \[4, 1\], .* 2 classes")):
        with pytest.raises(ValueError, match=said):
            check_outputs(outputs, 2, "accuracy")
    with pytest.raises(ValueError, match=r"returned \[4, 3\], .* 2 quantities"):
        check_outputs(torch.zeros(4, 3), 2, "r2")
    with pytest.raises(ValueError, match="task Mine: measure returned other shapes"):
        check_measures(Measures(torch.zeros(()), torch.zeros(4)), 4, "Mine")
    with pytest.raises(ValueError, match=r"returned torch\.float32 and torch\.bool; return floats"):
        check_measures(Measures(torch.zeros(4), torch.zeros(4) == 0), 4, "Mine")
    with pytest.raises(ValueError, match="a score is 97; divide it by the largest possible one"):
        check_measures(Measures(torch.zeros(4), torch.full((4,), 97.0)), 4, "Mine")


def test_a_score_that_does_not_exist_is_not_accuracy() -> None:
    task = Tabular("wine")
    task.score = "acuracy"  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ValueError, match="task Tabular: unknown score 'acuracy'; did you mean 'accuracy'"):
        task.measure(torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64))


def test_data_move_to_a_device_as_a_whole_and_may_lie_on_several() -> None:
    moved = data().copy_to([META])
    assert {tensor.device.type for part in moved[:3] for tensor in part} == {"meta"}
    assert (moved.input_shape, moved.outputs, moved.train.samples) == ((3,), 2, 8)
    both = data().copy_to([torch.device("cpu"), META])
    assert both.test.inputs.device.type == "cpu" and both.test.to(META).inputs.device.type == "meta"
    assert both.test.to(META).inputs is both.test.to(META).inputs, "it is not copied again"


def test_synthetic_data_are_the_same_each_time_and_their_classes_can_be_told_apart() -> None:
    assert fingerprint(Synthetic().load()) == fingerprint(Synthetic().load())
    made = Synthetic((80,), 3, train=900, validation=20, test=90).load()
    check_data(made, "Synthetic")
    assert [split.samples for split in made[:3]] == [900, 20, 90] and made.outputs == 3
    neighbours = KNeighborsClassifier(5).fit(made.train.inputs, made.train.targets)
    assert neighbours.score(made.test.inputs, made.test.targets) > 0.95
    for settings in ({"classes": 1}, {"train": 0}, {"shape": (3, 0)}):
        with pytest.raises(ValueError, match="Synthetic: sizes and counts must be positive"):
            Synthetic(**settings)
