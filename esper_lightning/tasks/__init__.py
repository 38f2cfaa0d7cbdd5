"""What hosts learn."""

from esper_lightning.tasks.augment import AugmentConfig, draw_choices
from esper_lightning.tasks.batches import Batches, fetch
from esper_lightning.tasks.digits import Digits
from esper_lightning.tasks.integrity import check_data, fingerprint
from esper_lightning.tasks.task import Measures, Split, Task, TaskData
from esper_lightning.tasks.variants import Variant, vary

__all__ = [
    "AugmentConfig",
    "Batches",
    "Digits",
    "Measures",
    "Split",
    "Task",
    "TaskData",
    "Variant",
    "check_data",
    "draw_choices",
    "fetch",
    "fingerprint",
    "vary",
]
