"""Callback that adds the unfinished rollout and all random states to a checkpoint."""

import random
import warnings
from typing import Any

import numpy as np
import torch
from lightning import Callback, Trainer

from esper_lightning.module import TamiyoModule


class RolloutState(Callback):
    """Saves and restores the unfinished rollout, the recurrent state and every global random state.

    With it a resumed run equals an uninterrupted one, whatever the tick of the checkpoint. `fit` requires it.
    """

    def __init__(self) -> None:
        self._pending: dict[str, Any] | None = None

    def setup(self, trainer: Trainer, pl_module: TamiyoModule, stage: str) -> None:
        self._module = pl_module

    def state_dict(self) -> dict[str, Any]:
        return {"loop": self._module.collector.state_dict(), "random": random_states()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._pending = state_dict  # Lightning calls this before the loop exists

    def on_train_start(self, trainer: Trainer, pl_module: TamiyoModule) -> None:
        # Not earlier: devices must be set up, and the start of training draws random numbers.
        if self._pending is not None:
            pl_module.collector.load_state_dict(self._pending["loop"])
            set_random_states(self._pending["random"])
            self._pending = None


def random_states() -> dict[str, Any]:
    """Return the states of the global generators, in types that `torch.load(weights_only=True)` accepts."""
    name, keys, *rest = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": [name, keys.tolist(), *rest],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all(),
    }


def set_random_states(states: dict[str, Any]) -> None:
    """Restore the states of the global generators; warn if the number of GPUs differs."""
    version, keys, gauss = states["python"]
    random.setstate((version, tuple(keys), gauss))
    np.random.set_state(tuple(states["numpy"]))
    torch.set_rng_state(states["torch"].cpu())
    if len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([state.cpu() for state in states["cuda"]])
    else:
        saved = len(states["cuda"])
        warnings.warn(f"the checkpoint has the random states of {saved} GPUs: they are not restored", stacklevel=2)
