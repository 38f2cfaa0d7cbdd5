"""Data sets that tests write in the formats of the real ones."""

import hashlib
import pickle
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
from torchvision.datasets import CIFAR10


def pack_cifar10(root: Path, patch: pytest.MonkeyPatch) -> None:
    """Put an archive in the place of the files that `write_cifar10` has written."""
    folder, archive = root / CIFAR10.base_folder, root / CIFAR10.filename
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folder, CIFAR10.base_folder)
    patch.setattr(CIFAR10, "tgz_md5", hashlib.md5(archive.read_bytes()).hexdigest())
    shutil.rmtree(folder)


def write_cifar10(root: Path, patch: pytest.MonkeyPatch, each: int) -> Path:
    """Write six files of `each` random images below `root`, and make torchvision expect their checksums."""
    folder = root / CIFAR10.base_folder
    folder.mkdir()
    random = np.random.default_rng(0)

    def write(name: str, content: dict[str, object]) -> str:
        packed = pickle.dumps(content)
        (folder / name).write_bytes(packed)
        return hashlib.md5(packed).hexdigest()

    def batch(name: str) -> list[str]:
        images = random.integers(0, 256, (each, 3 * 32 * 32), dtype=np.uint8)
        return [name, write(name, {"data": images, "labels": random.integers(0, 10, each).tolist()})]

    patch.setattr(CIFAR10, "train_list", [batch(f"data_batch_{i}") for i in range(1, 6)])
    patch.setattr(CIFAR10, "test_list", [batch("test_batch")])
    names = {"label_names": [f"class {i}" for i in range(10)]}
    patch.setattr(CIFAR10, "meta", CIFAR10.meta | {"md5": write("batches.meta", names)})
    return root
