"""Callback that adds the unfinished rollout and all random states to a checkpoint."""

import random
import warnings
from typing import Any

import numpy as np
import torch
from lightning import Callback, Trainer
from torch import Tensor

from esper_lightning.checkpointing.resize import map_rows
from esper_lightning.checkpointing.validate import OTHER_RANKS_KEY
from esper_lightning.module import TamiyoModule
from esper_lightning.ppo.collector import RolloutCollector
from esper_lightning.serialization.checks import check_keys, check_matching_tensor


class RolloutState(Callback):
    """Saves and restores the unfinished rollout, the LSTM's state and every global random state.

    With it a resumed run equals an uninterrupted one, whatever the tick of the checkpoint. `fit` requires it.

    The statistics of the normalisers are restored with the module. A copy of them is saved here, because a rollout
    holds features normalised by them: a file whose module and rollout come from different moments is refused.

    A checkpoint of several ranks has the rollout of all environments, as one process would save it, and the random
    states of every rank. With another number of ranks only the first one's random states are restored.
    """

    def __init__(self) -> None:
        self._pending: dict[str, Any] | None = None

    def setup(self, trainer: Trainer, pl_module: TamiyoModule, stage: str) -> None:
        self._module = pl_module

    def state_dict(self) -> dict[str, Any]:
        collector = self._module.collector
        ranks = collector.ranks
        loop, random_of_own = collector.state_dict(), random_states()
        states = ranks.gather_state({"rows": row_tensors(loop), "random": random_of_own})
        others: dict[str, Any] = {}
        if len(states) > 1:
            columns = zip(*(state["rows"] for state in states), strict=True)
            loop |= map_rows(loop, lambda _, axis: ranks.join(next(columns), axis))
            others = {OTHER_RANKS_KEY: [state["random"] for state in states[1:]]}
        return {
            "loop": loop,
            "normalisers": normaliser_statistics(collector),
            "random": random_of_own,
            **others,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._pending = state_dict  # Lightning calls this before the loop exists

    def on_train_start(self, trainer: Trainer, pl_module: TamiyoModule) -> None:
        # Not earlier: devices must be set up, and the start of training draws random numbers.
        if self._pending is not None:
            check_normalisers(self._pending["normalisers"], normaliser_statistics(pl_module.collector))
            loop, ranks = self._pending["loop"], pl_module.collector.ranks
            own = loop if ranks.world == 1 else loop | map_rows(loop, ranks.rows)
            pl_module.collector.load_state_dict(own)
            of_ranks = [self._pending["random"], *self._pending.get(OTHER_RANKS_KEY, [])]
            if ranks.rank == 0 or len(of_ranks) == ranks.world:
                set_random_states(of_ranks[ranks.rank])
            self._pending = None


def row_tensors(loop: dict[str, Any]) -> list[Tensor]:
    """Return the tensors of a collector's state that have a row per environment, in the order of `map_rows`."""
    found: list[Tensor] = []
    map_rows(loop, lambda part, _: found.append(part) or part)
    return found


def normaliser_statistics(collector: RolloutCollector) -> dict[str, Tensor]:
    """Return copies of the statistics of the collector's normalisers, by name."""
    names = ("observation_norm", "value_norm", "privileged_norm", "reward_norm")
    norms = {name: getattr(collector, name) for name in names}
    return {
        f"{name}.{part}": value.clone()
        for name, norm in norms.items()
        if norm is not None
        for part, value in norm.state_dict().items()
    }


def check_normalisers(saved: Any, restored: dict[str, Tensor]) -> None:
    """Raise ValueError unless the statistics saved with the rollout are those that the module was restored with."""
    check_keys("the rollout's normalisers", saved, restored)
    for name, value in restored.items():
        with_rollout = check_matching_tensor(f"the rollout's {name}", saved[name], value)
        if not torch.equal(with_rollout.to(value.device), value):
            raise ValueError(f"{name} of the module is not that of the rollout: they are from different checkpoints")


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
