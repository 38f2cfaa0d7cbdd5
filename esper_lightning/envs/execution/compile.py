"""Compilation of hosts: torch.compile is applied to each part without slots, so seeds cause no recompilation."""

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import MethodType
from typing import Any

import torch
from torch import nn

from esper_lightning.envs.execution import LoopExecutor
from esper_lightning.envs.host_env import HostEnv
from esper_lightning.envs.host_training import CompileConfig
from esper_lightning.growth.attach import parts_without_slots
from esper_lightning.tasks import Split

logger = logging.getLogger(__name__)


def compile_hosts(envs: Sequence[HostEnv], trials: Sequence[HostEnv], executor: LoopExecutor, *, batch: Split) -> None:
    """Compile the hosts of `envs` after a trial: one training and validation pass of `trials` on `batch`.

    Raises ValueError if the trial fails, unless the settings allow a fallback to uncompiled hosts.

    Args:
        envs: Environments whose hosts are compiled in place.
        trials: One equal environment on each device; they cannot be used afterwards.
        executor: Executor that trains and validates the trials.
        batch: Minibatch of training data.
    """
    config = trials[0].training.compile
    assert config is not None, "the settings ask for it"
    try:
        for trial in trials:
            _try_out(trial, executor, batch)
    except RuntimeError as error:  # the closest public base class of the errors of torch.compile
        reason = " ".join(str(error).partition("\n\n")[0].split()).rstrip(".")
        if not config.fallback:
            raise ValueError(
                f"the hosts cannot be compiled: {reason}; mend that, set training.compile.fallback, or leave "
                f"training.compile out"
            ) from error
        _warn_once(f"the hosts are not compiled: {reason}")
        return
    for env in envs:
        compile_parts(env.network, config)


def _try_out(trial: HostEnv, executor: LoopExecutor, batch: Split) -> None:
    batch = Split(*(part.clone() for part in batch))  # the first part, compiled for a view, would be recompiled
    trial.training = replace(trial.training, batches=1)
    assert trial.training.compile is not None, "that of all trials"
    compile_parts(trial.network, trial.training.compile)
    generators = {"cuda": [trial.device]}.get(trial.device.type, [])  # beside that of the CPU; hosts may use dropout
    with torch.random.fork_rng(generators):
        executor.train_epoch([trial], batch)
        executor.validate([trial], batch)


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning(message)


def compile_parts(network: nn.Module, config: CompileConfig) -> None:
    """Compile the parts of a network in place. State dict and hooks do not change; deep copies are compiled, too."""
    parts = parts_without_slots(network)
    if not parts:
        raise ValueError(
            "the hosts cannot be compiled: no module of theirs holds parameters and no slot; leave training.compile out"
        )
    for part in parts:
        device = next(part.parameters()).device
        part.forward = MethodType(_compiled_forward(repr(part), device, config), part)


@functools.cache
def _compiled_forward(layout: str, device: torch.device, config: CompileConfig) -> Callable[..., Any]:
    """Return a compiled forward pass, cached so that all parts of one layout share it across hosts."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return type(self).forward(self, *args, **kwargs)

    # torch compiles a code object at most eight times and runs it uncompiled afterwards, so each layout gets its own.
    # nn.Module.compile shares one code object between all modules, and in torch 2.11 skips modules of torch itself.
    forward.__code__ = forward.__code__.replace(co_name=f"forward_{layout.partition('(')[0]}")
    return torch.compile(forward, fullgraph=not config.fallback, dynamic=config.dynamic, backend=config.backend)
