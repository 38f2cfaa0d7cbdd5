"""Tasks that hosts learn: data sets, minibatches, augmentation and measures."""

from esper_lightning.tasks.augment import (
    TRANSFORMS,
    AugmentConfig,
    Batches,
    check_transform,
    draw_augment_params,
    fetch,
    make_variants,
)
from esper_lightning.tasks.data_sets import CIFAR10, Digits, Source, Tabular, Text
from esper_lightning.tasks.datamodule import FromDataModule, Stream
from esper_lightning.tasks.glyphs import Glyphs
from esper_lightning.tasks.task import (
    Measures,
    Score,
    Split,
    Synthetic,
    Task,
    TaskData,
    check_data,
    check_measures,
    check_outputs,
    check_split,
    fingerprint,
)

__all__ = [
    "CIFAR10",
    "TRANSFORMS",
    "AugmentConfig",
    "Batches",
    "Digits",
    "FromDataModule",
    "Glyphs",
    "Measures",
    "Score",
    "Source",
    "Split",
    "Stream",
    "Synthetic",
    "Tabular",
    "Task",
    "TaskData",
    "Text",
    "check_data",
    "check_measures",
    "check_outputs",
    "check_split",
    "check_transform",
    "draw_augment_params",
    "fetch",
    "fingerprint",
    "make_variants",
]
