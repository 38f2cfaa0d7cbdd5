"""Callback that adds the unfinished rollout and all random states to a checkpoint."""

import random
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lightning import Callback, Trainer
from torch import Tensor

from esper_lightning.runtime.checkpoint import OTHER_RANKS_KEY

if TYPE_CHECKING:
    from esper_lightning.module import TamiyoModule


class RolloutState(Callback):
    """Saves and restores the unfinished rollout, the LSTM's state and every global random state.

    With it a resumed run equals an uninterrupted one, whatever the tick of the checkpoint. The statistics of the
    normalisers are buffers of `TamiyoModule`, which brings this callback to a Trainer that lacks it.

    A checkpoint of several ranks has the rollout of all environments, as one process would save it, and the random
    states of every rank. With another number of ranks only the first one's random states are restored.
    """

    def __init__(self) -> None:
        self._pending: dict[str, Any] | None = None

    def setup(self, trainer: Trainer, pl_module: "TamiyoModule", stage: str) -> None:
        self._module = pl_module

    def state_dict(self) -> dict[str, Any]:
        if not hasattr(self._module, "collector"):  # nothing has been trained: the policy alone is saved
            return {}
        collector = self._module.collector
        ranks, collector_state, own = collector.ranks, collector.state_dict(), random_states()
        if ranks.world == 1:
            return {"loop": collector_state, "random": own}
        rows: list[Tensor] = []  # the parts with a row per environment, in the order of `map_rows`
        map_rows(collector_state, lambda part, _: rows.append(part) or part)
        of_ranks = ranks.gather({"rows": rows, "random": own})
        if ranks.rank == 0:
            columns = zip(*(one["rows"] for one in of_ranks), strict=True)
            collector_state |= map_rows(collector_state, lambda _, axis: ranks.join(next(columns), axis))
        return {"loop": collector_state, "random": own, OTHER_RANKS_KEY: [one["random"] for one in of_ranks[1:]]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._pending = state_dict  # Lightning calls this before the loop exists

    def on_train_start(self, trainer: Trainer, pl_module: "TamiyoModule") -> None:
        # Not earlier: devices must be set up, and the start of training draws random numbers.
        if self._pending is not None:
            collector_state, ranks = self._pending["loop"], pl_module.collector.ranks
            if ranks.world > 1 and "buffer" in collector_state:  # a rollout that begins anew has none
                collector_state = collector_state | map_rows(collector_state, ranks.rows)
            pl_module.collector.load_state_dict(collector_state)
            of_ranks = [self._pending["random"], *self._pending.get(OTHER_RANKS_KEY, [])]
            if ranks.rank == 0 or len(of_ranks) == ranks.world:
                set_random_states(of_ranks[ranks.rank])
            self._pending = None


def map_rows(collector_state: dict[str, Any], change: Callable[[Tensor, int], Tensor]) -> dict[str, Any]:
    """Apply `change` to every tensor of a collector's state that has one row per environment, and return these parts.

    `change(tensor, axis)` gets the axis of the environments: 0, or 1 for tensors [T, N, …].
    """
    buffer = collector_state["buffer"]
    changed = {
        "state": [change(part, 0) for part in collector_state["state"]],
        "starts": change(collector_state["starts"], 0),
        **{
            name: change(collector_state[name], 1)
            for name in ("raw_features", "raw_privileged", "final_values")
            if name in collector_state
        },
    }
    axes = {"ticks": 1, "state": 0, "sequence_states": 1}
    rows = {name: [change(part, axis) for part in buffer[name]] for name, axis in axes.items() if name in buffer}
    return changed | {"buffer": rows}


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
