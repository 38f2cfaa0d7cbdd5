"""Short trainings of a user's modules, with and without Grow."""

from pathlib import Path
from typing import Any

import lightning as L
from lightning import Callback, LightningDataModule, LightningModule, Trainer

from esper_lightning.callbacks import Grow
from esper_lightning.envs import Action, Op
from esper_lightning.envs.actions import to_action
from esper_lightning.envs.host_pool import SinglePool
from esper_lightning.growth.gates import LifecycleConfig
from tests.callbacks import gpt
from tests.callbacks.grow.trainings import Classifier, DigitsData
from tests.decisions import WAIT, Row, cull, decide, germinate

QUICK = LifecycleConfig(training_ticks=1, min_contribution=None, auto_cull=False, min_gradient_health=0.0)
"""Seeds are blended after one tick, and kept whatever they contribute."""

LIFE = {0: germinate(0, 0), 1: germinate(1, 1), 6: decide(Op.FOSSILIZE, slot=0), 7: cull(1)}
"""conv_light lives in the first slot until it is kept, and bottleneck in the second one until it is removed."""


class Plan:
    """Decider of a user: actions by tick, and nothing else. It has no state of its own.

    Args:
        actions: Action of a tick; in others it waits.
    """

    def __init__(self, actions: dict[int, Row] | None = None) -> None:
        self.actions = actions or {}

    def reset(self, pool: SinglePool) -> None:
        self.seen: list[int] = []

    def act(self, pool: SinglePool) -> Action:
        tick = pool.envs[0].tick
        self.seen.append(tick)
        return to_action([self.actions.get(tick, WAIT)], pool.device)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, pool: SinglePool, state: dict[str, Any]) -> None:
        self.reset(pool)


def trainer(*callbacks: Callback, epochs: int = 6, **settings: Any) -> Trainer:
    return gpt.trainer(*callbacks, **{"max_epochs": epochs, "log_every_n_steps": 5, **settings})


def equal(one: LightningModule, other: LightningModule) -> bool:
    return gpt.equal(one.state_dict(), other.state_dict())


def classifier(scheduler: str | None = None, kind: type[Classifier] = Classifier, **settings: Any) -> Classifier:
    """Return a classifier with the same weights every time."""
    L.seed_everything(0, verbose=False)
    return kind(scheduler, **settings)


def train(
    module: LightningModule,
    *callbacks: Callback,
    resume_from: Path | str | None = None,
    data: LightningDataModule | None = None,
    **settings: Any,
) -> Trainer:
    """Train a module on digits; weights and dropout depend on nothing else than the arguments."""
    made = trainer(*callbacks, **settings)
    L.seed_everything(1, verbose=False)
    made.fit(module, data or DigitsData(), ckpt_path=resume_from)
    return made


def grow(plan: dict[int, Row] | None = None, **settings: Any) -> Grow:
    """Return a Grow that follows a plan in two slots of the classifier."""
    defaults: dict[str, Any] = {
        "slots": ["3", "5"],
        "blueprints": ["conv_light", "bottleneck"],
        "decider": Plan(plan),
        "lifecycle": QUICK,
        "batches": 2,
    }
    return Grow(**{**defaults, **settings})
