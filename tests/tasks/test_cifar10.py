"""CIFAR-10: the real format, read from a small generated copy; the download up to its request."""

from collections.abc import Callable
from pathlib import Path
from urllib.error import URLError

import pytest
import torch
from torchvision.datasets import CIFAR10 as Stored

from esper_lightning.tasks import CIFAR10, check_data
from esper_lightning.tasks.cifar10 import channel_statistics
from tests.tasks.stored import write_cifar10

EACH = 12
"""Number of images in each of the five training files, and in the test file."""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a small data set in the real format."""
    return write_cifar10(tmp_path, monkeypatch, EACH)


def test_images_are_split_and_scaled_by_those_that_are_learned_from(root: Path) -> None:
    data = CIFAR10(str(root), validation=10).load()

    check_data(data, "CIFAR10")
    assert [split.samples for split in data[:3]] == [5 * EACH - 10, 10, EACH]
    assert data.input_shape == (3, 32, 32) and data.classes == 10
    assert data.train.inputs.mean((0, 2, 3)).abs().max() < 1e-4
    assert (data.train.inputs.std((0, 2, 3), correction=0) - 1.0).abs().max() < 1e-4


def test_pixels_and_labels_belong_together(root: Path) -> None:
    data = CIFAR10(str(root), validation=10).load()
    stored = Stored(root, train=False)

    assert data.test.targets.tolist() == stored.targets
    mean, deviation = data.test.inputs.mean(), data.test.inputs.std()
    pixels = torch.tensor(stored.data).permute(0, 3, 1, 2).float()
    again = (pixels - pixels.mean()) / pixels.std()
    assert (
        torch.corrcoef(torch.stack([again.flatten(), ((data.test.inputs - mean) / deviation).flatten()]))[0, 1] > 0.99
    )


def test_no_image_is_in_two_splits(root: Path) -> None:
    data = CIFAR10(str(root), validation=10).load()

    sums = [image.sum().item() for split in data[:3] for image in split.inputs]
    assert len(set(sums)) == 6 * EACH


def test_a_part_of_it_makes_ticks_shorter(root: Path) -> None:
    data = CIFAR10(str(root), validation=10, train=20, test=5).load()

    assert [split.samples for split in data[:3]] == [20, 10, 5]


def test_statistics_are_those_of_all_pixels() -> None:
    images = torch.randint(0, 256, (7, 3, 5, 4), dtype=torch.uint8)
    mean, deviation = channel_statistics(images)

    assert torch.allclose(mean.flatten(), images.float().mean((0, 2, 3)))
    assert torch.allclose(deviation.flatten(), images.float().std((0, 2, 3), correction=0))


def test_a_missing_data_set_is_reported_with_the_option_that_downloads_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no sound data set in .*; give --data.task.init_args.download true .*170 MB"):
        CIFAR10(str(tmp_path)).load()


def test_a_damaged_file_is_no_data_set(root: Path) -> None:
    path = root / Stored.base_folder / "data_batch_3"
    path.write_bytes(path.read_bytes()[:-1])

    with pytest.raises(ValueError, match="no sound data set"):
        CIFAR10(str(root)).load()


def test_a_download_asks_for_the_archive_and_says_what_became_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def offline(request: object, *_: object, **__: object) -> Callable:
        asked.append(request if isinstance(request, str) else request.full_url)
        raise URLError("host unreachable")

    monkeypatch.setattr("urllib.request.urlopen", offline)

    with pytest.raises(ValueError, match=r"the download to .* failed .*; put cifar-10-python.tar.gz there by hand"):
        CIFAR10(str(tmp_path), download=True).load()
    assert asked and all(url.endswith("toronto.edu/~kriz/cifar-10-python.tar.gz") for url in asked)


@pytest.mark.parametrize("settings", [{"validation": 0}, {"train": 0}, {"test": -1}])
def test_no_images_are_refused(settings: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be at least 1 image"):
        CIFAR10(**settings)


def test_more_images_than_there_are_are_refused(root: Path) -> None:
    with pytest.raises(ValueError, match="are more than there are, 60; lower validation or train"):
        CIFAR10(str(root), validation=50, train=11).load()
