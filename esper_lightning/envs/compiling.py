"""Compiled hosts: each part that holds no slot goes through torch.compile, so that seeds cause no compilation."""

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
from esper_lightning.envs.training import CompileConfig
from esper_lightning.growth.attach import attachments
from esper_lightning.growth.slot import SeedSlot
from esper_lightning.tasks import Split

logger = logging.getLogger(__name__)


def compile_hosts(envs: Sequence[HostEnv], trials: Sequence[HostEnv], executor: LoopExecutor, batch: Split) -> None:
    """Compiles the hosts of `envs`, once those of `trials` have learned from `batch` and been validated on it.

    Raises ValueError if that fails, unless the settings have a fallback: then the hosts stay as they are.

    Args:
        trials: An environment like the others on each of their devices; they are used up.
        executor: Trains and validates them.
    """
    config = trials[0].training.compile
    try:
        for trial in trials:
            _try_out(trial, executor, batch)
    except RuntimeError as error:  # the nearest public kin of what torch.compile raises
        reason = " ".join(str(error).partition("\n\n")[0].split()).rstrip(".")
        if not config.fallback:
            raise ValueError(
                f"the hosts cannot be compiled: {reason}; mend that, set training.compile.fallback, or leave "
                f"training.compile out"
            ) from error
        _say_once(f"the hosts are not compiled: {reason}")
        return
    for env in envs:
        compile_parts(env.network, config)


def _try_out(trial: HostEnv, executor: LoopExecutor, batch: Split) -> None:
    batch = Split(*(part.clone() for part in batch))  # for what is no view the first part would be compiled once more
    trial.training = replace(trial.training, batches=1)
    compile_parts(trial.network, trial.training.compile)
    generators = {"cuda": [trial.device]}.get(trial.device.type, [])  # beside the CPU's: a host may have dropout
    with torch.random.fork_rng(generators):
        executor.train_epoch([trial], batch)
        executor.validate([trial], batch)


@functools.cache
def _say_once(message: str) -> None:
    logger.warning(message)


def compile_parts(network: nn.Module, config: CompileConfig) -> None:
    """Compiles the parts in place. State dict and hooks are as before, and a deep copy is compiled too."""
    found = parts(network)
    if not found:
        raise ValueError(
            "the hosts cannot be compiled: no module of theirs holds parameters and no slot; leave training.compile out"
        )
    for part in found:
        device = next(part.parameters()).device
        part.forward = MethodType(_compiled_forward(repr(part), device, config), part)


def parts(network: nn.Module) -> list[nn.Module]:
    """The largest modules of `network` that have parameters, a forward pass and no slot in it."""
    behind = {module.get_submodule(entry["module"]) for module in network.modules() for entry in attachments(module)}

    def within(module: nn.Module) -> list[nn.Module]:
        if isinstance(module, SeedSlot) or not any(True for _ in module.parameters()):
            return []
        # A slot behind the module itself is a hook of it: that runs around the forward pass, not in it.
        slots = [m for m in module.modules() if isinstance(m, SeedSlot) or (m in behind and m is not module)]
        if slots or type(module).forward is nn.Module.forward:  # which a list of modules has not overridden
            return [part for child in module.children() for part in within(child)]
        return [module]

    return list(dict.fromkeys(within(network)))


@functools.cache
def _compiled_forward(layout: str, device: torch.device, config: CompileConfig) -> Callable[..., Any]:
    """A forward pass for all parts that look the same, in whatever host: compiled for one, it serves them all."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return type(self).forward(self, *args, **kwargs)

    # torch counts what it has compiled for a code object, and runs the rest as it is after eight. So nn.Module.compile
    # will not do: there all modules have the same code, and with torch 2.11 those of torch itself are never compiled.
    forward.__code__ = forward.__code__.replace(co_name=f"forward_{layout.partition('(')[0]}")
    return torch.compile(forward, fullgraph=not config.fallback, dynamic=config.dynamic, backend=config.backend)
