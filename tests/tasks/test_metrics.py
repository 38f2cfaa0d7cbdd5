"""Further test metrics of tasks, compared with references of their own."""

import numpy as np
import pytest
import torch
from sklearn.metrics import r2_score, recall_score

from esper_lightning.tasks import Digits, Text

SAMPLES, CLASSES = 300, 4


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def test_a_class_is_measured_by_the_share_of_its_samples_that_are_recognised() -> None:
    logits = 3.0 * torch.randn(SAMPLES, CLASSES, generator=generator())
    targets = torch.randint(CLASSES - 1, (SAMPLES,), generator=generator())  # none of the last class

    found = Digits().test_metrics(logits, targets)

    recalls = recall_score(targets, logits.argmax(1), average=None, labels=range(CLASSES - 1))
    assert [found[f"accuracy.{c}"] for c in range(CLASSES - 1)] == pytest.approx(recalls.tolist())
    assert np.isnan(found[f"accuracy.{CLASSES - 1}"]), "no sample, no accuracy"


@pytest.mark.parametrize("scale", [5.0, 0.1], ids=["any logits", "logits that look like probabilities"])
def test_the_calibration_error_is_the_gap_between_confidence_and_accuracy(scale: float) -> None:
    logits = scale * torch.rand(SAMPLES, CLASSES, generator=generator())
    targets = torch.randint(CLASSES, (SAMPLES,), generator=generator())

    found = Digits().test_metrics(logits, targets)["calibration_error"]

    probabilities = np.exp(logits.double().numpy())
    probabilities /= probabilities.sum(1, keepdims=True)
    confidence, correct = probabilities.max(1), probabilities.argmax(1) == targets.numpy()
    bins = np.digitize(confidence, np.linspace(0.0, 1.0, 16))
    gaps = [abs(correct[bins == b].mean() - confidence[bins == b].mean()) * (bins == b).mean() for b in np.unique(bins)]
    assert found == pytest.approx(sum(gaps), abs=1e-5)


def test_the_perplexity_of_text_is_the_exponential_of_its_loss() -> None:
    logits, targets = torch.randn(6, 8, 9, generator=generator()), torch.randint(9, (6, 8), generator=generator())

    found = Text().test_metrics(logits, targets)

    assert found == {"perplexity": pytest.approx(Text().measure(logits, targets).loss.mean().exp().item(), rel=1e-5)}
    uniform = Text().test_metrics(torch.zeros_like(logits), targets)
    assert uniform["perplexity"] == pytest.approx(9.0), "as many tokens as seem possible"


@pytest.mark.parametrize("shape", [(SAMPLES, 1), (SAMPLES, 2)], ids=["one quantity", "two"])
def test_quantities_are_measured_by_the_coefficient_of_determination(shape: tuple[int, int]) -> None:
    targets = torch.randn(*shape, generator=generator())
    estimates = targets + 0.5 * torch.randn(*shape, generator=generator().manual_seed(1))

    found = Digits().test_metrics(estimates, targets.squeeze(1))

    assert found == {"r2": pytest.approx(r2_score(targets, estimates), abs=1e-5)}
