"""Hosts and data for comparisons of executors, and a plain PyTorch loop that trains the same hosts."""

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from esper_lightning.envs import EnvConfig, HostFactory, HostPool
from esper_lightning.envs.config import REQUIRED_DEVICE_TYPE
from esper_lightning.envs.executors import EXECUTORS
from esper_lightning.envs.governor import GovernorConfig
from esper_lightning.envs.host_training import HostTraining
from esper_lightning.growth.blueprints import blueprint_names, build_on
from esper_lightning.growth.gates import LifecycleConfig
from esper_lightning.growth.stages import Stage
from esper_lightning.hosts import CNN, GPT
from esper_lightning.tasks import Digits, Split, Task, TaskData

BATCHES, BATCH = 8, 32
"""Number of minibatches in a tick, and of samples in each."""

SeedPlacement = Literal["none", "equal", "different"]
"""Seeds on the hosts: none, the same on every host, or different ones. All are blended and never judged by gates."""

SEED_PLACEMENTS: tuple[SeedPlacement, ...] = get_args(SeedPlacement)


class Noise(Task):
    """Task with random inputs and targets, since speed does not depend on the data.

    Args:
        shape: Shape of one input; with one axis inputs are tokens below `classes`.
        classes: Number of outputs.
    """

    def __init__(self, shape: Sequence[int], classes: int) -> None:
        self.shape = tuple(shape)
        self.classes = classes

    def load(self) -> TaskData:
        generator = torch.Generator().manual_seed(0)

        def split(samples: int) -> Split:
            targets = (samples, *self.shape) if len(self.shape) == 1 else (samples,)
            words = torch.randint(self.classes, targets, generator=generator)
            inputs = words if len(self.shape) == 1 else torch.randn(samples, *self.shape, generator=generator)
            return Split(inputs, words)

        return TaskData(split(BATCHES * BATCH), split(2 * BATCH), split(BATCH), self.classes)


class ExecutorChoice(NamedTuple):
    """Executor and its kernels."""

    executor: str
    onednn: bool

    def __str__(self) -> str:
        return self.executor if self.onednn else f"{self.executor} without oneDNN"


class Case(NamedTuple):
    """Task and host of one measured case."""

    task: Task
    host: HostFactory
    onednn: bool | None  # None: executors are measured with and without oneDNN


def tiny(input_shape: Sequence[int], outputs: int, slots: list[str] | None = None) -> nn.Module:
    """Return the host of configs/digits.yaml."""
    return CNN(input_shape, outputs, base=4, kernel=1, pools=2, slots=slots, isolate=False, channels_last=False)


def small(input_shape: Sequence[int], outputs: int, slots: list[str] | None = None) -> nn.Module:
    """Return a CNN with 6,418 parameters."""
    return CNN(input_shape, outputs, slots=slots, isolate=True)


def wide(input_shape: Sequence[int], outputs: int, slots: list[str] | None = None) -> nn.Module:
    """Return a CNN with 94,762 parameters."""
    return CNN(input_shape, outputs, base=32, slots=slots, isolate=True)


def gpt(input_shape: Sequence[int], outputs: int, slots: list[str] | None = None) -> nn.Module:
    """Return a transformer with four blocks of width 64."""
    return GPT(input_shape, outputs, width=64, blocks=4, heads=4, context=64, slots=slots)


CASES: dict[str, Case] = {
    "digits": Case(Digits(), tiny, onednn=None),
    "16": Case(Noise((3, 16, 16), 10), small, onednn=True),
    "32x8": Case(Noise((3, 32, 32), 10), small, onednn=True),
    "32x32": Case(Noise((3, 32, 32), 10), wide, onednn=True),
    "gpt": Case(Noise((32,), 96), gpt, onednn=True),
}


def training_settings(case: Case, precision: str) -> HostTraining:
    """Return the training settings of the hosts of a case."""
    return HostTraining(
        lr=0.001,
        batch_size=BATCH,
        batches=BATCHES,
        max_grad_norm=None,
        precision=precision,
        onednn=case.onednn is not False,
    )


class RawLoop:
    """Plain training of N hosts one after the other, or of `grown` networks: no validation, torch's defaults."""

    def __init__(
        self, case: Case, data: TaskData, hosts: int, precision: str = "fp32", *, grown: Sequence[nn.Module] = ()
    ) -> None:
        self.case, self.train = case, data.train
        self.device = data.train.inputs.device
        self.settings = training_settings(case, precision)

        def build() -> nn.Module:
            generator = torch.Generator(self.device).manual_seed(0)
            return build_on(self.device, lambda: case.host(data.input_shape, data.outputs, slots=[]), generator)

        self.hosts = list(grown) or [build() for _ in range(hosts)]
        self.optimizers = [torch.optim.Adam(host.parameters(), lr=0.001) for host in self.hosts]
        is_scaled = precision == "fp16"
        self.scalers = [torch.amp.GradScaler(self.device.type, enabled=is_scaled) for _ in self.hosts]

    def __call__(self) -> None:
        for host, optimizer, scaler in zip(self.hosts, self.optimizers, self.scalers, strict=True):
            order = torch.randperm(self.train.samples, device=self.device)
            for batch in order[: BATCHES * BATCH].split(BATCH):
                optimizer.zero_grad()
                scaler.scale(self._loss(host, batch)).backward()
                scaler.step(optimizer)
                scaler.update()

    def _loss(self, host: nn.Module, batch: Tensor) -> Tensor:
        with self.settings.autocast(self.device):
            return self.case.task.measure(host(self.train.inputs[batch]), self.train.targets[batch]).loss.mean()

    def flops(self) -> float:
        """Return the FLOPs of one sample's forward and backward pass."""
        with FlopCounterMode(display=False) as counter:
            self._loss(self.hosts[0], torch.arange(BATCH, device=self.device)).backward()
        return counter.get_total_flops() / BATCH


def choices(case: Case, device: torch.device) -> list[ExecutorChoice]:
    """Return the executors that run on `device`, for digits with and without oneDNN."""
    kernels = [True, False] if case.onednn is None and device.type == "cpu" else [case.onednn is not False]
    names = [name for name in EXECUTORS if REQUIRED_DEVICE_TYPE.get(name) in (None, device.type)]
    return [ExecutorChoice(name, onednn) for name in names for onednn in kernels]


def make_pool(
    case: Case,
    data: TaskData,
    hosts: int,
    choice: ExecutorChoice,
    seeds: SeedPlacement,
    precision: str = "fp32",
) -> HostPool:
    """Return a pool of hosts with seeds for one executor. Raises ValueError if the executor does not support them."""
    settings = training_settings(case._replace(onednn=choice.onednn), precision)
    lifecycle = LifecycleConfig(auto_cull=False)
    config = EnvConfig(horizon=10**6, executor=choice.executor, training=settings, lifecycle=lifecycle)
    device, governor = data.train.inputs.device, GovernorConfig()
    pool = HostPool(case.task, data, case.host, config=config, n_envs=hosts, device=device, governor=governor)
    for i, env in enumerate(pool.envs if seeds != "none" else ()):
        row = 0 if seeds == "equal" else i
        for k, slot in enumerate(env.slots):
            blueprints = blueprint_names(slot.layout)
            if (row + k) % 2 == 0:
                env.growing.germinate(slot.name, blueprints[(row // 2 + k) % len(blueprints)])
                for stage in (Stage.TRAINING, Stage.BLENDING, Stage.PROBATIONARY):
                    slot.move_to(stage)
    return pool
