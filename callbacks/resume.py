"""Callbacks by which a run that was stopped goes on: all of its state is saved, also when it is asked to stop."""

import random
import signal
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lightning import Callback, Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from torch import Tensor

from esper_lightning.runtime.checkpoint import OTHER_RANKS_KEY
from esper_lightning.runtime.console import print_status

if TYPE_CHECKING:
    from esper_lightning.module import TamiyoModule

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that ask the process to stop: `kill`, Ctrl-C, and a terminal that was closed."""


class RolloutState(Callback):
    """Saves and restores the unfinished rollout, the LSTM's state and every global random state.

    With it a resumed run equals an uninterrupted one, whatever the tick of the checkpoint; `TamiyoModule` brings it to
    a Trainer that lacks it. A checkpoint of several ranks has the rollout of all environments, as one process would
    save it, and the random states of every rank. With another number of ranks only those of the first are restored.
    """

    def __init__(self) -> None:
        self._pending: dict[str, Any] | None = None

    def setup(self, trainer: Trainer, pl_module: "TamiyoModule", stage: str) -> None:
        self._module = pl_module

    def state_dict(self) -> dict[str, Any]:
        """Return the rollout of all ranks and the random states of each; {} if nothing has been trained."""
        if not hasattr(self._module, "collector"):
            return {}
        collector = self._module.collector
        ranks, collector_state, randoms = collector.ranks, collector.state_dict(), random_states()
        if ranks.world == 1:
            return {"loop": collector_state, "random": randoms}
        rows: list[Tensor] = []  # tensors with a row per environment of this rank, in the order of `map_rows`
        map_rows(collector_state, lambda tensor, _: rows.append(tensor) or tensor)
        sent_by_ranks = ranks.gather({"rows": rows, "random": randoms})
        if ranks.rank == 0:
            rows_of_ranks = zip(*(sent["rows"] for sent in sent_by_ranks), strict=True)  # each tensor from every rank
            collector_state |= map_rows(collector_state, lambda _, axis: ranks.join(next(rows_of_ranks), axis))
        others = [sent["random"] for sent in sent_by_ranks[1:]]
        return {"loop": collector_state, "random": randoms, OTHER_RANKS_KEY: others}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._pending = state_dict  # Lightning calls this before the loop exists

    def on_train_start(self, trainer: Trainer, pl_module: "TamiyoModule") -> None:
        """Restore the rollout, with the rows of this rank's environments, and the random states of this rank."""
        # Not earlier: devices must be set up, and the start of training draws random numbers.
        if self._pending is not None:
            collector_state, ranks = self._pending["loop"], pl_module.collector.ranks
            if ranks.world > 1 and "buffer" in collector_state:  # a rollout that begins anew has none
                collector_state = collector_state | map_rows(collector_state, ranks.rows)
            pl_module.collector.load_state_dict(collector_state)
            random_by_rank = [self._pending["random"], *self._pending.get(OTHER_RANKS_KEY, [])]
            if ranks.rank == 0 or len(random_by_rank) == ranks.world:
                set_random_states(random_by_rank[ranks.rank])
            self._pending = None


def map_rows(collector_state: dict[str, Any], change: Callable[[Tensor, int], Tensor]) -> dict[str, Any]:
    """Return the entries of a collector's state with one row per environment, each tensor changed by `change`.

    `change(tensor, axis)` gets the axis of the environments: 0, or 1 for tensors [T, N, …].
    """
    buffer = collector_state["buffer"]
    changed: dict[str, Any] = {"state": [change(tensor, 0) for tensor in collector_state["state"]]}
    for name, axis in (("starts", 0), ("raw_features", 1), ("raw_privileged", 1), ("final_values", 1)):
        if name in collector_state:
            changed[name] = change(collector_state[name], axis)
    buffer_axes = {"ticks": 1, "state": 0, "sequence_states": 1}
    changed["buffer"] = {name: [change(tensor, axis) for tensor in buffer[name]] for name, axis in buffer_axes.items()}
    return changed


def random_states() -> dict[str, Any]:
    """Return the states of all global random generators, in types that `torch.load(weights_only=True)` accepts."""
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


class Preemption(Checkpoint):
    """Saves a checkpoint at the end of the tick on SIGTERM, Ctrl-C or SIGHUP, and exits with 143, 130 or 129.

    It writes `last.ckpt` in the folder of the first ModelCheckpoint. A second signal ends the process at once. With
    several processes a signal to any of them stops all. Lightning alone would exit with 0 and save nothing within a
    rollout; it calls a `Checkpoint` last, after the other callbacks have processed this tick.
    """

    def __init__(self) -> None:
        self._received = 0
        self._previous: dict[int, Any] = {}  # handlers that were replaced

    def on_train_start(self, trainer: Trainer, pl_module: "TamiyoModule") -> None:
        # Not earlier: Lightning has installed its own handlers by now, and these must replace them.
        if threading.current_thread() is threading.main_thread():  # another one receives no signals
            handled = [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
            self._previous = {number: signal.signal(number, self._note) for number in handled}
        if trainer.received_sigterm:  # noted by Lightning's handler before this one was installed
            self._received = signal.SIGTERM

    def _note(self, number: int, frame: Any) -> None:
        self._received = number
        for replaced in self._previous:
            signal.signal(replaced, signal.SIG_DFL)

    def on_train_batch_end(self, trainer: Trainer, pl_module: "TamiyoModule", *_: object) -> None:
        if not trainer.is_last_batch:
            self.on_train_epoch_end(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: "TamiyoModule") -> None:
        """If any process has received a signal: save a checkpoint and exit."""
        number = self._received
        if pl_module.ranks.world > 1:
            number = int(pl_module.ranks.maximum(torch.tensor(number)))
        if not number:
            return
        folders = [saver.dirpath for saver in trainer.checkpoint_callbacks if isinstance(saver, ModelCheckpoint)]
        path = Path(next(filter(None, folders), trainer.log_dir or trainer.default_root_dir)) / "last.ckpt"
        trainer.save_checkpoint(path, weights_only=False)
        if trainer.is_global_zero:
            print_status(f"stopped by {signal.Signals(number).name}; go on from ckpt_path {path}")
        trainer.strategy.barrier()  # the first process to end makes Lightning end the others
        raise SystemExit(128 + number)

    def on_train_end(self, trainer: Trainer, pl_module: "TamiyoModule") -> None:
        # Not later: Lightning removes its own handlers before the teardown of callbacks, and they would come back.
        self.teardown(trainer, pl_module, "fit")

    def teardown(self, trainer: Trainer, pl_module: "TamiyoModule", stage: str) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}
