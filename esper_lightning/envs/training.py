"""How a host learns in one tick."""

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import nn

from esper_lightning.growth.optimizer import HOST_GROUP
from esper_lightning.tasks import AugmentConfig

OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
}

PRECISIONS: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""What matrix products and convolutions of hosts are computed in."""

INITIAL_SCALE = 2.0**12
"""Of the loss with fp16. Eight digits hosts skipped 3 of their first 64 steps; from torch's own 2^16 down it was 26."""


@dataclass(frozen=True, kw_only=True)
class CompileConfig:
    """How hosts are compiled: each of their parts that holds no slot, by itself."""

    backend: str = "inductor"
    """The compiler, as torch.compile knows it. On the CPU this one needs a C++ compiler."""

    dynamic: bool = True
    """Compile once for batches of all sizes. False: anew for every size, of which validation has as many as there are
    combinations of seeds; the ninth is an error."""

    fallback: bool = False
    """Say so once, and go on without, where a host cannot be compiled. Otherwise it is an error."""


@dataclass(frozen=True, kw_only=True)
class HostTraining:
    """How a host learns in one tick."""

    optimizer: Literal["adam", "adamw", "sgd"] = "adam"
    """Update rule of the host and its seeds."""

    lr: float = 0.02
    """Learning rate of the host."""

    seed_lr_factor: float = 1.0
    """Learning rate of seeds over that of the host."""

    weight_decay: float = 0.0
    """Weight decay of host and seeds."""

    momentum: float = 0.9
    """Momentum; read by sgd alone."""

    batch_size: int = 32
    """Samples B in a host minibatch."""

    batches: int | None = None
    """Minibatches in a tick. None: one pass over the training data, without the incomplete last batch."""

    micro_batches: int = 1
    """Parts that a minibatch goes through the host in, to save memory; their gradients are added up. BatchNorm then
    normalises each part by itself."""

    max_grad_norm: float | None = 5.0
    """Clip the gradient of the host, and of each seed, to this norm. None: do not clip."""

    carry_over: bool = True
    """Keep the optimizer's momentum when the host changes. False forgets all of it at each germination, advance,
    fossilization and cull: an ablation."""

    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """What hosts compute in, in training and validation: torch's autocast for the lower two. With fp16 every host's
    loss is scaled, and a step whose gradients leave its range is skipped."""

    onednn: bool | None = None
    """Let oneDNN run convolutions on the CPU. Off, torch's own kernels do: for hosts of a few channels they need 1.3 to
    1.8 times less processor time (measured on digits), for wide ones more. None: whatever is faster with executor auto,
    on with any other."""

    augment: AugmentConfig = field(default_factory=AugmentConfig)
    """How training images are varied."""

    compile: CompileConfig | None = None
    """Compile the hosts, by torch.compile; seeds run as they are. A start takes 10 to 30 s longer. On one CPU core a
    training step then took 0.97 to 1.03 times the processor time (a CNN of base 32, a GPT of width 128), and on the
    digits host, where a part is a single tiny layer, 1.6 to 1.8 times. None: do not."""

    def __post_init__(self) -> None:
        for name in ("lr", "seed_lr_factor", "batch_size", "batches", "micro_batches", "max_grad_norm"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"training.{name} must be {'finite' if value > 0 else 'positive'}, got {value}")
        if self.batch_size % self.micro_batches != 0:
            raise ValueError(
                f"training.micro_batches must divide batch_size, {self.micro_batches} does not divide {self.batch_size}"
            )
        if not 0 <= self.weight_decay < math.inf or not 0 <= self.momentum < 1:
            raise ValueError(
                f"training: weight_decay must not be negative and momentum must lie in [0, 1), "
                f"got {self.weight_decay} and {self.momentum}"
            )

    def steps(self, samples: int) -> int:
        """Minibatches in a tick, with so many training samples."""
        return self.batches or samples // self.batch_size

    def options(self, group: str) -> dict[str, float]:
        """Of the host's or (any other name) a seed's parameter group."""
        lr = self.lr if group == HOST_GROUP else self.lr * self.seed_lr_factor
        options = {"lr": float(lr), "weight_decay": float(self.weight_decay)}
        return options | ({"momentum": float(self.momentum)} if self.optimizer == "sgd" else {})

    def make_optimizer(self, network: nn.Module) -> torch.optim.Optimizer:
        """An optimizer with the host's group alone."""
        group = {"params": list(network.parameters()), "name": HOST_GROUP}
        # Fused: one kernel for all tensors, and on CUDA no read-back of the scaler's verdict.
        return OPTIMIZERS[self.optimizer]([group], fused=True, **self.options(HOST_GROUP))

    def begin_momenta(self, optimizer: torch.optim.Optimizer) -> None:
        """Sets to zero the momenta that an optimizer does not have yet, where it would not do so itself."""
        # Fused sgd takes what happens to lie in memory for the first momentum if the scaler makes it skip that step.
        if self.optimizer == "sgd" and self.momentum > 0.0:
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                if "momentum_buffer" not in optimizer.state[parameter]:
                    optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)

    def autocast(self, device: torch.device) -> AbstractContextManager:
        """Where hosts compute."""
        if self.precision == "fp32":
            return nullcontext()
        # Autocast's cache of converted weights is one for all streams and threads' hosts: off, it cannot mix them up.
        return torch.autocast(device.type, PRECISIONS[self.precision], cache_enabled=False)

    def make_scaler(self, device: torch.device) -> torch.amp.GradScaler:
        """Scales one host's loss; does nothing unless the precision is fp16."""
        return torch.amp.GradScaler(device.type, INITIAL_SCALE, enabled=self.precision == "fp16")
