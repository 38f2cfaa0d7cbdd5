"""TensorBoard output beside scalars: layout, histograms, figures and texts."""

from pathlib import Path

import torch
from matplotlib.figure import Figure

# protobuf makes these classes at run time, and there are no stubs.
from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter

from esper_lightning.telemetry.tags import guide

CUSTOM_SCALARS = {
    "Is the policy learning?": {
        "objective": ["Multiline", ["rollout/objective"]],
        "return, p10 p50 p90": ["Margin", ["rollout/return.p50", "rollout/return.p10", "rollout/return.p90"]],
        "explained variance": ["Multiline", ["train/explained_variance"]],
        "KL, two estimators": ["Multiline", ["train/kl", "train/kl_k1"]],
        "entropy by head": ["Multiline", [r"train/entropy\..*"]],
    },
    "What does the policy grow?": {
        "ops": ["Multiline", [r"rollout/op\..*"]],
        "fossilized, by blueprint": ["Multiline", ["blueprint/.*/kept"]],
        "contribution, by blueprint": ["Multiline", ["blueprint/.*/contribution"]],
        "reward terms": ["Multiline", ["reward/.*"]],
    },
    "Is anything wrong?": {
        "anomalies": ["Multiline", ["anomaly/.*"]],
        "Governor": ["Multiline", ["governor/.*"]],
        "gradient health": ["Multiline", [".*_health"]],
    },
    "How fast is it?": {
        "host epochs per second": ["Multiline", ["time/env_steps_per_second"]],
        "where time goes": ["Multiline", [r"time/share\..*"]],
        "memory": ["Multiline", ["memory/process", "memory/cuda"]],
    },
}
"""Custom-scalar charts by category. `Multiline` takes patterns of tags; `Margin` a tag, its lower and upper bound."""


class TensorBoardWriter:
    """Writes to one run's TensorBoard files.

    Args:
        writer: TensorBoard writer of the run's logger.
    """

    def __init__(self, writer: SummaryWriter) -> None:
        self.writer = writer

    def discard_after(self, tick: int) -> None:
        """Make readers drop everything that an earlier process wrote after `tick`."""
        if tick:
            start = SessionLog(status=SessionLog.START)
            assert self.writer.file_writer is not None, "the run's logger is open"
            self.writer.file_writer.add_event(Event(step=tick + 1, session_log=start))

    @property
    def has_earlier_files(self) -> bool:
        """True if an earlier process has written to this folder."""
        return len(list(Path(self.writer.log_dir).glob("events.out.tfevents.*"))) > 1

    def write_static(self) -> None:
        """Write what does not change in a run: the layout, and the guide to all plots."""
        self.writer.add_custom_scalars(CUSTOM_SCALARS)
        self.writer.add_text("guide", guide(), 0)

    def histogram(self, tag: str, values: Tensor, tick: int) -> None:
        """Write a histogram of the finite `values`; write nothing if there are none."""
        values = values.flatten()
        values = values[torch.isfinite(values)]
        if values.numel():
            self.writer.add_histogram(tag, values, tick)

    def figure(self, tag: str, figure: Figure, tick: int) -> None:
        """Write a figure as an image."""
        self.writer.add_figure(tag, figure, tick)

    def text(self, tag: str, text: str, tick: int) -> None:
        """Write a text in Markdown."""
        self.writer.add_text(tag, text, tick)
