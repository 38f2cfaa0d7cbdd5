"""Digits and CIFAR-10: fixed splits, standardised by the training images; a small copy stands for the real CIFAR-10."""

import shutil
from collections import Counter
from itertools import chain
from pathlib import Path
from urllib.error import URLError

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torchvision.datasets import CIFAR10 as Stored

from esper_lightning.tasks import CIFAR10, Digits, Split, TaskData, check_data
from tests.runs import cli
from tests.tasks.stored import pack_cifar10, write_cifar10

EACH = 12
"""Number of images in each of the five training files, and in the test file."""


@pytest.fixture(scope="module")
def digits() -> TaskData:
    return Digits().load()


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a small data set in the real format."""
    return write_cifar10(tmp_path, monkeypatch, EACH)


def test_no_digit_is_in_two_parts_and_none_is_lost(digits: TaskData) -> None:
    check_data(digits, "Digits")
    images, labels = load_digits(return_X_y=True)
    known = np.concatenate([images, labels[:, None]], 1).astype(np.int64)
    low, high = digits.train.inputs.min(), digits.train.inputs.max()

    def pictures(split: Split) -> list[bytes]:
        grey = ((split.inputs - low) / (high - low) * 16).round().to(torch.int64).flatten(1)
        return [row.tobytes() for row in torch.cat([grey, split.targets[:, None]], 1).numpy()]

    assert [split.samples for split in digits[:3]] == [897, 200, 700]
    assert Counter(chain(*map(pictures, digits[:3]))) == Counter(row.tobytes() for row in known)


def test_every_load_of_digits_gives_the_same_stratified_split(digits: TaskData) -> None:
    torch.manual_seed(1)
    np.random.seed(1)
    whole = torch.cat([split.targets for split in digits[:3]]).bincount() / 1797
    for split, again in zip(digits[:3], Digits().load()[:3], strict=True):
        assert torch.equal(split.inputs, again.inputs) and torch.equal(split.targets, again.targets)
        assert (split.targets.bincount(minlength=10) / split.samples - whole).abs().max() < 0.006
    train = digits.train.inputs.double()
    assert (train.mean().item(), train.std().item()) == pytest.approx((0.0, 1.0), abs=1e-5)


@pytest.mark.parametrize(("validation", "test"), [(9, 700), (200, 9), (200, 1588)])
def test_sizes_that_leave_a_part_of_digits_too_small_are_refused(validation: int, test: int) -> None:
    with pytest.raises(ValueError, match=rf"^digits: validation and test need .* got {validation} and {test}$"):
        Digits(validation=validation, test=test)


def test_cifar10_is_split_and_scaled_by_the_images_that_are_learned_from(root: Path) -> None:
    data = CIFAR10(str(root), validation=10).load()
    check_data(data, "CIFAR10")
    assert [split.samples for split in data[:3]] == [5 * EACH - 10, 10, EACH]
    assert data.input_shape == (3, 32, 32) and data.outputs == 10
    batch = data.train.batch().inputs
    assert batch.mean((0, 2, 3)).abs().max() < 1e-4
    assert (batch.std((0, 2, 3), correction=0) - 1.0).abs().max() < 1e-4
    assert len({image.sum().item() for split in data[:3] for image in split.inputs}) == 6 * EACH, "none is in two"

    stored = Stored(root, train=False)
    assert data.test.targets.tolist() == stored.targets
    pixels = torch.tensor(stored.data).permute(0, 3, 1, 2)
    assert data.train.inputs.dtype is torch.uint8
    learned = data.train.inputs.double()
    mean, deviation = learned.mean((0, 2, 3), keepdim=True), learned.std((0, 2, 3), correction=0, keepdim=True)
    torch.testing.assert_close(data.test.batch().inputs, ((pixels - mean) / deviation).float())


def offline(*_: object, **__: object) -> None:
    raise URLError("host unreachable")


def test_too_few_images_are_refused(root: Path) -> None:
    with pytest.raises(ValueError, match="validation must be at least 1 of 60 images, got 60"):
        CIFAR10(str(root), validation=60).load()


@pytest.mark.parametrize("name", ["data_batch_3", "test_batch", "batches.meta"])
@pytest.mark.parametrize("damage", ["missing", "short", "changed"])
def test_a_missing_or_damaged_file_is_refused_and_the_way_out_leads_out(
    name: str, damage: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = CIFAR10(str(root), validation=10).load()
    pack_cifar10(root, monkeypatch)
    monkeypatch.setattr("urllib.request.urlopen", offline)
    CIFAR10(str(root), validation=10, download=True).load()  # unpacks the archive, without a network
    path = root / Stored.base_folder / name
    content = bytearray(path.read_bytes())
    content[-9] ^= 1
    path.write_bytes(content[:-1] if damage == "short" else content)
    if damage == "missing":
        path.unlink()

    with pytest.raises(ValueError, match=r"^CIFAR10: no sound .*; give --data.task.init_args.download true .*170 MB"):
        CIFAR10(str(root), validation=10).load()
    if name == "batches.meta":  # torchvision does not miss it when it is asked to download
        with pytest.raises(ValueError, match=f"; remove {path.parent}, and without a network put cifar-10-python"):
            CIFAR10(str(root), validation=10, download=True).load()
        shutil.rmtree(path.parent)
    again = CIFAR10(str(root), validation=10, download=True).load()
    assert all(torch.equal(one.inputs, other.inputs) for one, other in zip(whole[:3], again[:3], strict=True))


def test_a_download_that_fails_is_told_in_one_line(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("urllib.request.urlopen", offline)
    empty = root / "empty"
    flags = (f"--data.task.init_args.root={empty}", "--data.task.init_args.download=true", "--trainer.accelerator=cpu")
    with pytest.raises(SystemExit) as ended:
        cli("--config", "cifar10", f"--trainer.default_root_dir={root / 'runs'}", *flags)

    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2
    assert line.startswith(f"error: CIFAR10: no sound data set in {str(empty)!r} (<urlopen error host unreachable>)")
