"""What TensorBoard shows beside scalars: layout, histograms, figures, texts and hyper-parameters."""

from collections.abc import Mapping
from pathlib import Path

import torch
from matplotlib.figure import Figure
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from esper_lightning.telemetry.tags import guide

LAYOUT = {
    "Is she learning?": {
        "objective": ["Multiline", ["rollout/objective"]],
        "return, p10 p50 p90": ["Margin", ["rollout/return.p50", "rollout/return.p10", "rollout/return.p90"]],
        "explained variance": ["Multiline", ["train/explained_variance"]],
        "KL, two estimators": ["Multiline", ["train/kl", "train/kl_k1"]],
        "entropy by head": ["Multiline", [r"train/entropy\..*"]],
    },
    "What does she grow?": {
        "ops": ["Multiline", [r"rollout/op\..*"]],
        "kept, by blueprint": ["Multiline", ["blueprint/.*/kept"]],
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
"""Custom scalars: charts by category. Multiline: tags by patterns; Margin: a tag, its lower and its upper bound."""

METRICS = ("rollout/objective", "rollout/accuracy", "rollout/parameters")
"""By which runs are compared in the table of hyper-parameters."""

LONGEST = 100
"""Characters of a setting in that table."""


class Board:
    """Writes to one run's TensorBoard files.

    Args:
        writer: Of the run's logger.
    """

    def __init__(self, writer: SummaryWriter) -> None:
        self.writer = writer

    def go_on(self, tick: int) -> None:
        """What an earlier process wrote after `tick` is void: readers drop it."""
        if tick:
            start = SessionLog(status=SessionLog.START)
            self.writer.file_writer.add_event(Event(step=tick + 1, session_log=start))

    @property
    def has_earlier_files(self) -> bool:
        """Has another process written to this folder?"""
        return len(list(Path(self.writer.log_dir).glob("events.out.tfevents.*"))) > 1

    def introduce(self, settings: Mapping[str, str]) -> None:
        """Shows what does not change in a run: the layout, the guide, and hyper-parameters."""
        self.writer.add_custom_scalars(LAYOUT)
        self.writer.add_text("guide", guide(), 0)
        values = {name: as_number(value) for name, value in settings.items()}
        for summary in hparams(values, dict.fromkeys(METRICS, 0.0)):
            self.writer.file_writer.add_summary(summary)

    def histogram(self, tag: str, values: Tensor, tick: int) -> None:
        """Of what is finite among `values`; nothing if nothing is."""
        values = values.flatten()
        values = values[torch.isfinite(values)]
        if values.numel():
            self.writer.add_histogram(tag, values, tick)

    def figure(self, tag: str, figure: Figure, tick: int) -> None:
        """As an image."""
        self.writer.add_figure(tag, figure, tick)

    def text(self, tag: str, text: str, tick: int) -> None:
        """As Markdown."""
        self.writer.add_text(tag, text, tick)


def as_number(value: str) -> float | bool | str:
    """A setting as what it is, so that TensorBoard can order runs by it."""
    if value in ("True", "False"):
        return value == "True"
    try:
        return float(value)
    except ValueError:
        return value if len(value) <= LONGEST else f"{value[:LONGEST]}…"
