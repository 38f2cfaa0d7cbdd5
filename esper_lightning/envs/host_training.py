"""Settings of host training: optimizer, batches and precision; and the loss scale of a host in fp16."""

import functools
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor, nn

from esper_lightning.growth.param_groups import HOST_GROUP
from esper_lightning.tasks import AugmentConfig

OPTIMIZERS = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}

MOMENTUM = 0.9  # of sgd

PRECISIONS: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
"""Data types of matrix products and convolutions by name of the precision."""

DECAY = 0.2
"""Share of an episode over which the learning rate of the schedule decay falls."""

LR_SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda progress: 1.0,
    "cosine": lambda progress: (1.0 + math.cos(math.pi * progress)) / 2,
    "decay": lambda progress: min(1.0, (1.0 - progress) / DECAY),
}
"""Learning rate as a share of its nominal value after a share of the episode, 0 to 1."""

MAX_BATCHES = 100_000
"""Largest number of minibatches in a host epoch; their indices are drawn before the epoch and kept in memory."""

INITIAL_LOSS_SCALE = 2.0**12
"""Loss scale in fp16. Eight digits hosts skipped 3 of their first 64 steps; with torch's 2^16, 26."""

GROWTH, BACKOFF, GROWTH_INTERVAL = 2.0, 0.5, 2000
"""Factors of the scale after this many steps in a row, and after a skipped step: those of `torch.amp.GradScaler`."""


def next_scale(scale: Tensor, good_steps: Tensor, finite: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scales and the steps since their last change after one more step, of one host or of several.

    A host whose gradients are not `finite` skips the step.
    """
    good_steps = torch.where(finite, good_steps + 1, 0)
    is_due, higher = good_steps == GROWTH_INTERVAL, scale * GROWTH
    raised = torch.where(is_due & higher.isfinite(), higher, scale)
    return torch.where(finite, raised, scale * BACKOFF), torch.where(is_due, 0, good_steps)


class LossScale:
    """Loss scale of one host: that of `torch.amp.GradScaler`, but its state is read without waiting for a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.scale = torch.full((), INITIAL_LOSS_SCALE, device=device)
        self.good_steps = torch.zeros((), dtype=torch.int32, device=device)  # since it last changed
        # It divides gradients by the scale, and lets the optimizer skip a step without waiting for the GPU. The scale
        # is set from here, because `GradScaler.state_dict` reads it from the device.
        self._scaler = torch.amp.GradScaler(device.type, INITIAL_LOSS_SCALE)
        self._scaler.scale(self.scale)  # makes its scale

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients of an optimizer by the scale."""
        self._scaler.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer) -> Tensor:  # [] bool
        """Take the optimizer's step unless gradients are not finite, and adapt the scale. `unscale` comes before.

        Returns whether the step was taken.
        """
        overflowed: list[Tensor] = []  # found by `unscale`; a fused optimizer holds it during its step alone
        with optimizer.register_step_pre_hook(lambda stepping, *_: overflowed.append(vars(stepping)["found_inf"])):
            self._scaler.step(optimizer)
        finite = overflowed[0] == 0.0
        self.set(*next_scale(self.scale, self.good_steps, finite))
        return finite

    def set(self, scale: Tensor, good_steps: Tensor) -> None:
        """Set scale and steps in place."""
        self.scale.copy_(scale)
        self.good_steps.copy_(good_steps)
        self._scaler.update(self.scale)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state: the tensors themselves, which later steps change."""
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.set(**state)


@dataclass(frozen=True, kw_only=True)
class HostTraining:
    """Settings of host training in one epoch (one environment step)."""

    optimizer: Literal["adam", "adamw", "sgd"] = "adam"
    """Update rule of the host and its seeds; sgd has a momentum of 0.9."""

    lr: float = 0.001
    """Learning rate of the host. Tiny hosts learn faster with a larger one, as in configs/digits.yaml."""

    lr_schedule: Literal["constant", "cosine", "decay"] = "constant"
    """Learning rate over an episode. cosine falls to nearly 0 (https://arxiv.org/abs/1608.03983, eq. 5, no restarts);
    decay stays at lr for four fifths of the episode, and falls linearly to nearly 0 over the rest."""

    weight_decay: float = 0.0
    """Weight decay of host and seeds."""

    batch_size: int = 32
    """Samples B in a host minibatch."""

    batches: int | None = None
    """Minibatches in a host epoch. None: one pass over the training data, or as many as `flops` allows."""

    flops: float | None = None
    """FLOPs of training in a host epoch; what is left is added to the next one's. None: `batches` holds for all."""

    micro_batches: int = 1
    """Number of parts into which a minibatch is split to save memory; BatchNorm then normalises each separately."""

    max_grad_norm: float | None = 5.0
    """Norm to which the gradients of the host and of each seed are clipped. None: no clipping."""

    precision: Literal["fp32", "tf32", "bf16", "fp16", "auto"] = "fp32"
    """Precision of hosts; bf16 and fp16 by autocast. auto: bf16 or fp16 on a GPU; on a CPU bf16 for hosts that it makes
    faster there, else fp32. tf32 needs a GPU."""

    onednn: bool = True
    """Use oneDNN for convolutions on the CPU; for hosts of a few channels torch's own kernels are faster without it."""

    compile: bool = False
    """Train hosts through torch.compile. It compiles anew at each change of structure, for a minute; not for fused."""

    augment: AugmentConfig = field(default_factory=AugmentConfig)
    """Augmentation of training images."""

    def __post_init__(self) -> None:
        if self.lr_schedule not in LR_SCHEDULES:  # variables of a family are not checked by their type
            known = ", ".join(LR_SCHEDULES)
            raise ValueError(f"training.lr_schedule must be one of {known}, got {self.lr_schedule!r}")
        if self.batches is not None and self.flops is not None:
            raise ValueError("training.batches and training.flops both say how long a host epoch is; give one of them")
        for name in ("lr", "batch_size", "batches", "flops", "micro_batches", "max_grad_norm"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"training.{name} must be {'finite' if value > 0 else 'positive'}, got {value}")
        if self.batches is not None and self.batches > MAX_BATCHES:
            raise ValueError(f"training.batches must be at most {MAX_BATCHES}, got {self.batches}")
        if self.batch_size % self.micro_batches != 0:
            raise ValueError(
                f"training.micro_batches must divide batch_size, {self.micro_batches} does not divide {self.batch_size}"
            )
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"training.weight_decay must not be negative, got {self.weight_decay}")

    def steps_per_epoch(self, samples: int) -> int:
        """Return the number of minibatches in a host epoch on `samples` training samples, where `flops` is None."""
        return self.batches or samples // self.batch_size

    def lr_share(self, progress: float) -> float:
        """Return the learning rate as a share of `lr`, 0 to 1, after a share `progress` of the episode."""
        return LR_SCHEDULES[self.lr_schedule](min(1.0, progress))

    def group_options(self) -> dict[str, float]:
        """Return the optimizer options of every parameter group."""
        options = {"lr": float(self.lr), "weight_decay": float(self.weight_decay)}
        return options | ({"momentum": MOMENTUM} if self.optimizer == "sgd" else {})

    def make_optimizer(self, network: nn.Module) -> torch.optim.Optimizer:
        """Create an optimizer with the parameter group of the host only."""
        group = {"params": list(network.parameters()), "name": HOST_GROUP}
        # Fused: one kernel for all tensors, and on CUDA no synchronization to learn if the loss scale skips the step.
        return OPTIMIZERS[self.optimizer]([group], fused=True, **self.group_options())

    def autocast(self, device: torch.device) -> AbstractContextManager:
        """Return the autocast context of the precision."""
        dtype = PRECISIONS[self.precision]
        if dtype is torch.float32:
            return nullcontext()
        # Streams and threads share autocast's cache of converted weights, so it is off to keep hosts apart.
        return torch.autocast(device.type, dtype, cache_enabled=False)

    def on(self, device: torch.device, *, gains: bool) -> "HostTraining":
        """Return these settings with what `auto` means on a device, where bf16 on a CPU `gains` speed or not."""
        if self.precision != "auto":
            return self
        if device.type == "cuda":
            return replace(self, precision="bf16" if has_bf16(device) else "fp16")
        # Without oneDNN bf16 is several times slower than fp32.
        gains = gains and self.onednn and device.type == "cpu" and has_bf16(device)
        return replace(self, precision="bf16" if gains else "fp32")

    def make_loss_scale(self, device: torch.device) -> LossScale | None:
        """Create the loss scale of one host. None: the precision needs none."""
        return LossScale(device) if self.precision == "fp16" else None


@functools.cache
def has_bf16(device: torch.device) -> bool:
    """Return whether a GPU, or an x86 CPU, computes bf16 in hardware."""
    if device.type == "cpu":
        tell = getattr(torch.cpu, "get_capabilities", dict)  # torch 2.11 may lack it
        return any(tell().get(name, False) for name in ("avx512_bf16", "amx_bf16"))
    return torch.cuda.get_device_capability(device) >= (8, 0)
