"""Tasks that hosts learn: data sets, minibatches, augmentation and measures."""

from esper_lightning.tasks.augment import AugmentConfig, draw_augment_params
from esper_lightning.tasks.batches import Batches, fetch
from esper_lightning.tasks.cifar10 import CIFAR10
from esper_lightning.tasks.datamodule import FromDataModule
from esper_lightning.tasks.digits import Digits
from esper_lightning.tasks.glyphs import Glyphs
from esper_lightning.tasks.integrity import check_data, find_doubts, fingerprint
from esper_lightning.tasks.source import Source
from esper_lightning.tasks.synthetic import Synthetic
from esper_lightning.tasks.tabular import Tabular
from esper_lightning.tasks.task import Measures, Split, Task, TaskData
from esper_lightning.tasks.text import Text
from esper_lightning.tasks.variants import Variant, make_variants

__all__ = [
    "CIFAR10",
    "AugmentConfig",
    "Batches",
    "Digits",
    "FromDataModule",
    "Glyphs",
    "Measures",
    "Source",
    "Split",
    "Synthetic",
    "Tabular",
    "Task",
    "TaskData",
    "Text",
    "Variant",
    "check_data",
    "draw_augment_params",
    "fetch",
    "find_doubts",
    "fingerprint",
    "make_variants",
]
