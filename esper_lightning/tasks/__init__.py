"""Tasks that hosts learn: data sets, minibatches, augmentation and measures."""

from esper_lightning.tasks.augment import AugmentConfig, Batches, draw_augment_params, fetch
from esper_lightning.tasks.datamodule import FromDataModule
from esper_lightning.tasks.glyphs import Glyphs
from esper_lightning.tasks.images import CIFAR10, Digits
from esper_lightning.tasks.stream import Stream
from esper_lightning.tasks.tabular import Tabular
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
from esper_lightning.tasks.text import Source, Text
from esper_lightning.tasks.variants import TRANSFORMS, check_transform, make_variants

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
