"""Reference executor: one host after another. N environments, K slots, V variants (see `HostEnv.variants`)."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from esper_lightning.envs.host_env import HostEnv
from esper_lightning.envs.host_training import HostTraining
from esper_lightning.envs.measurements import pack_training
from esper_lightning.growth.blend import Ramp
from esper_lightning.growth.blueprints import blueprint_names, default_blueprints
from esper_lightning.growth.counterfactual import TRIED_ROWS, forward_variants, fossilized_only, mixes_rows
from esper_lightning.growth.gates import NO_GRADIENT
from esper_lightning.growth.lifecycle import germinate, slots_of
from esper_lightning.growth.stages import Stage
from esper_lightning.runtime.compiled import Compiled
from esper_lightning.runtime.machine import FLOAT32_PARTS, PhaseClock, first_line, is_out_of_memory
from esper_lightning.runtime.nested import BATCH_LENGTH_ERRORS, copy_module
from esper_lightning.tasks import Batches, Split, Task, fetch

PREDICTED_SAMPLES = 1024
"""Number of samples in one pass of `LoopExecutor.predict`."""

MAX_VALIDATED_ELEMENTS = {"cpu": 2**26, "cuda": 2**22}
"""Most input elements of one validation pass of a host, by type of device; see `Split.elements`.

On a GPU, where many hosts may be validated at the same time, 1,365 images of 3×32×32 or 256 texts of 64 tokens; on the
CPU 16 times as many, so that most splits take one pass."""


def stack_rows(rows: Sequence[Tensor]) -> Tensor:
    """Stack one row per environment into one tensor on the device of the first row."""
    return torch.stack([row.to(rows[0].device, non_blocking=True) for row in rows])


def may_mix_rows(env: HostEnv, inputs: Tensor) -> bool:
    """Return True if rows of a batch see each other in the host, or in a seed of a user's blueprint that runs there."""
    network = copy_module(env.network).eval()
    slots = slots_of(network).values()
    for slot in slots:
        slot.empty()
    if mixes_rows(network, (inputs,)):
        return True
    generator = torch.Generator(env.device).manual_seed(0)
    for slot in slots:
        for name in set(env.space.blueprint) & set(blueprint_names(slot.layout)) - set(default_blueprints(slot.layout)):
            germinate(slot, name, Ramp(2), generator=generator, birth="random")
            slot.move_to(Stage.TRAINING)
            slot.move_to(Stage.BLENDING)
            with torch.no_grad(), suppress(*BATCH_LENGTH_ERRORS):  # it may not fit here
                network(inputs)
                if mixes_rows(network, (inputs,)):
                    return True
            slot.empty()
    return False


@contextmanager
def isolate_oom(env: HostEnv) -> Iterator[None]:
    """Turn an out-of-memory error in this block into `env.failure`: it ends the host's episode, and not the run."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        env.failure = first_line(error)
        env.optimizer.zero_grad()  # frees the memory of its gradients


class LoopExecutor:
    """Trains and validates hosts on data on their device. Results stay on the device: nothing is read back."""

    def __init__(self, task: Task, training: HostTraining) -> None:
        self.task = task
        self.training = training
        self.compiled = Compiled("hosts", training.compile)
        self.mixing: set[str] = set()  # architectures whose rows see each other in evaluation

    @contextmanager
    def kernels_of_settings(self, device: torch.device) -> Iterator[None]:
        """Choose the kernels of hosts on `device` by the settings; torch has one choice for the whole process."""
        # Torch lets cuDNN round float32 to TF32 by default, and matrix products not.
        precision = "tf32" if self.training.precision == "tf32" else "ieee"
        settings: list[tuple[Any, str, Any]] = [(torch.backends.mkldnn, "enabled", self.training.onednn)]
        if device.type == "cuda":  # the former interface, allow_tf32, raises where the user has set the new one
            settings += [(part, "fp32_precision", precision) for part in FLOAT32_PARTS]
        previous = [getattr(part, name) for part, name, _ in settings]
        try:
            for part, name, value in settings:
                setattr(part, name, value)
            yield
        finally:
            for (part, name, _), value in zip(settings, previous, strict=True):
                setattr(part, name, value)

    def prepare(self, envs: Sequence[HostEnv], data: Split) -> None:
        """Check on `data` that these environments, one for each kind of host, can run. Raises ValueError if not."""
        for env in envs:
            with self.kernels_of_settings(env.device):
                if may_mix_rows(env, data.to(env.device).batch(slice(8 * TRIED_ROWS)).inputs):
                    self.mixing.add(env.architecture)

    def train_and_validate(
        self, envs: Sequence[HostEnv], train: Split, validation: Split, *, clock: PhaseClock
    ) -> tuple[Tensor, Tensor]:
        """Run one host epoch of every environment, then validate: returns what `train_epoch` and `validate` return."""
        with clock.measure("train"):
            trained = self.train_epoch(envs, train)
        with clock.measure("validate"):
            validated = self.validate(envs, validation)
        return trained, validated

    def train_epoch(self, envs: Sequence[HostEnv], data: Split) -> Tensor:
        """Train every environment for one host epoch. Returns one row of `HostEpoch.result` each, [N, …]."""
        with self.kernels_of_settings(envs[0].device):
            return stack_rows([self._train(env, data) for env in envs])

    def _train(self, env: HostEnv, data: Split) -> Tensor:  # a row as `pack_training` makes it
        with isolate_oom(env):
            epoch = HostEpoch(env, self.task, data.to(env.device), compiled=self.compiled)
            for i in range(len(epoch)):
                epoch.step(i)
            return epoch.result()
        return nan_training_row(env)

    def validate(self, envs: Sequence[HostEnv], data: Split) -> Tensor:
        """Return loss and score [N, 2, V] on `data` of every environment's variants (see `HostEnv.variants`)."""
        with self.kernels_of_settings(envs[0].device):
            return stack_rows([self._measure(env, data) for env in envs])

    @torch.inference_mode()  # here, because it is local to a thread
    def _measure(self, env: HostEnv, data: Split) -> Tensor:  # [2, V]
        variants, means = env.variants(), []
        if env.failure is None:
            with isolate_oom(env):
                data = data.to(env.device).variant(env.context.variant_index)
                env.network.eval()
                mixes = env.architecture in self.mixing
                for part in data.parts(max(1, MAX_VALIDATED_ELEMENTS[env.device.type] // data.elements)):
                    inputs, targets = part
                    with self.training.autocast(env.device):
                        outputs, output_index = forward_variants(env.network, variants, inputs, mixes=mixes)
                    n_outputs = max(output_index) + 1
                    measures = self.task.measure(outputs, targets.repeat(n_outputs, *[1] * (targets.ndim - 1)))
                    rows = torch.stack([values.view(n_outputs, -1).mean(1) for values in measures])
                    # Slices, because an index list would be copied to the device synchronously.
                    means.append(torch.stack([rows[:, i] for i in output_index], 1) * (part.samples / data.samples))
                return torch.stack(means).sum(0)
        return torch.full((2, len(variants)), torch.nan, device=env.device)

    @torch.inference_mode()
    def predict(self, env: HostEnv, data: Split) -> tuple[Tensor, Tensor]:
        """Return outputs and targets [samples, …] of one environment on `data`, with its fossilized seeds only."""
        data = data.to(env.device).variant(env.context.variant_index)
        env.network.eval()
        fossilized = [fossilized_only(env.network)]
        outputs, targets = [], []
        with self.kernels_of_settings(env.device), self.training.autocast(env.device):
            for part in data.parts(PREDICTED_SAMPLES):
                outputs.append(forward_variants(env.network, fossilized, part.inputs)[0])
                targets.append(part.targets)
        return torch.cat(outputs), torch.cat(targets)


class HostEpoch:
    """One epoch of training of one host in progress, minibatch by minibatch, with data and results on its device."""

    def __init__(self, env: HostEnv, task: Task, data: Split, *, compiled: Compiled) -> None:
        self.env, self.task, self.data, self.compiled, self.structure = env, task, data, compiled, env.structure
        self.micro_batches = env.training.micro_batches
        # Seeds that fail in this episode on purpose get zero gradients: see `HostEnv.failing_slots`.
        self.failing_parameters = [parameter for slot in env.failing_slots for parameter in slot.grown_parameters()]
        self.batches = env.draw_batches(data.samples).split(self.micro_batches)  # [batches · parts, B / parts]
        self.totals = torch.zeros(2, device=env.device, dtype=env.score_dtype)  # loss, score
        self.skipped_steps = torch.zeros_like(self.totals[0])  # steps with non-finite gradients
        env.network.train()
        if env.loss_scale is not None and isinstance(env.optimizer, torch.optim.SGD):
            # If its first step is skipped, fused SGD leaves momentum buffers undefined.
            for parameter in (p for group in env.optimizer.param_groups for p in group["params"]):
                env.optimizer.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))

    def __len__(self) -> int:
        return len(self.batches.indices) // self.micro_batches

    def step(self, i: int) -> None:
        """Train on the i-th minibatch, in `micro_batches` parts.

        On the last one also keep the gradient statistics, before clipping.
        """
        env, optimizer = self.env, self.env.optimizer
        optimizer.zero_grad()
        for part in range(i * self.micro_batches, (i + 1) * self.micro_batches):
            self._accumulate_gradients(self.batches.minibatch(part))
        for parameter in self.failing_parameters:
            if parameter.grad is not None:
                parameter.grad.zero_()
        if env.loss_scale is not None:
            env.loss_scale.unscale(optimizer)
        if i == len(self) - 1:
            self.gradients = env.growing.gradient_stats_tensor()
        if env.training.max_grad_norm is not None:
            for group in optimizer.param_groups:
                clip_grad_norm_(group["params"], env.training.max_grad_norm)
        if env.loss_scale is not None:
            self.skipped_steps += ~env.loss_scale.step(optimizer)
        else:
            optimizer.step()

    def _accumulate_gradients(self, batch: Batches) -> None:
        env = self.env
        inputs, targets = fetch(self.data, batch, env.training.augment)
        with env.training.autocast(env.device):
            outputs = self.compiled(env.network, inputs, kind=self.structure)
            measures = self.task.measure(outputs, targets)
            loss = measures.loss.mean() / self.micro_batches
        (loss if env.loss_scale is None else loss * env.loss_scale.scale).backward()
        self.totals += torch.stack([loss.detach(), measures.score.mean() / self.micro_batches])

    def result(self) -> Tensor:  # a row as `pack_training` makes it
        """Return the packed `TrainingStats` of the epoch, on the host's device."""
        return pack_training(self.totals / len(self), self.skipped_steps, self.gradients)


def nan_training_row(env: HostEnv) -> Tensor:  # a row as `pack_training` makes it
    """Return a row of NaN in place of `HostEpoch.result` for a host that did not train."""
    reference = next(env.network.parameters())
    gradients = reference.new_full((1 + len(env.slots), len(NO_GRADIENT)), torch.nan)
    return pack_training(reference.new_full((2,), torch.nan), reference.new_zeros(()), gradients)
