"""What hosts learn."""

from esper_lightning.tasks.digits import Digits
from esper_lightning.tasks.task import Measures, Split, Task, TaskData

__all__ = ["Digits", "Measures", "Split", "Task", "TaskData"]
