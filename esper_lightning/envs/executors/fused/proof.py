"""Check before training that batched hosts compute the same as the hosts by themselves."""

from collections.abc import Iterator, Sequence
from copy import deepcopy
from itertools import chain

import torch
from torch import Tensor, nn

from esper_lightning.envs.executors.fused.hosts import BatchedHosts
from esper_lightning.envs.host_env import HostEnv
from esper_lightning.growth.blend import Ramp
from esper_lightning.growth.counterfactual import forward_variants, leave_one_out, mixes_rows
from esper_lightning.growth.depth import DepthSlot, depths
from esper_lightning.growth.lifecycle import germinate, slots_of
from esper_lightning.growth.probe import probe_seeds
from esper_lightning.growth.stages import Stage

N_HOSTS, N_SAMPLES = 3, 4
"""Numbers of batched hosts and of samples per host.

They differ, so that a mix-up of the two axes shows. With three hosts the first and the last have seeds of one kind, so
that the hosts have to be reordered."""

TOLERANCE, LOOSE_TOLERANCE = 1e-7, 1e-2
"""Largest allowed difference within a tensor, relative to its largest absolute value.

In float64 rounding errors stay far below and wrong results far above. The loose tolerance is for hosts and seeds that
do not run in float64."""

CANCELLATION_FLOOR = 1e-3
"""Fraction of the largest value of all tensors below which a tensor may hold only rounding errors."""

NOISE_SCALE = 0.1
"""Scale of the noise added to weights and inputs, so that hosts differ, no weight is zero and no two pixels are equal.

With equal pixels rounding would decide which of them a max-pool selects, and so where its gradient goes."""

TRIAL_RAMP = Ramp(2)
"""Ramp of the blended seeds, whose alpha begins at 1/2: both the host's and the seed's part of the output count."""

HOST_ERRORS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""Errors that the host's code, or torch, may raise for batched shapes."""


def check_batched(env: HostEnv, inputs: Tensor) -> None:
    """Compare a few batched hosts with the same hosts by themselves, with every kind of seed that can grow on them.

    Args:
        env: Environment of the host, which is not changed.
        inputs: Some inputs of the host.

    Raises ValueError if the host cannot be batched: a layer is not supported, or the results differ.
    """
    gpus = [env.device] if env.device.type == "cuda" else []
    blueprints = list(env.space.blueprint)
    try:
        with torch.inference_mode(False), torch.random.fork_rng(gpus):
            trial = Trial(env, inputs, next(env.network.parameters()).dtype, LOOSE_TOLERANCE)
            try:
                exact = Trial(env, inputs, torch.float64, TOLERANCE)
            except RuntimeError:  # the host requires its own precision
                exact = trial
            trial = exact if exact.growable == trial.growable else trial  # some seeds may require it, too
            batched = BatchedHosts(trial.hosts[0])
            trial.compare(batched, "no seeds")
            # A trial grows the first two blueprints that fit, so each blueprint is the first once.
            for i, first in enumerate(blueprints):
                trial.germinate(blueprints[i:] + blueprints[:i])
                trial.compare(batched, f"seeds {first}")
            if depths(env.slots):
                trial.deepen()
                trial.compare(BatchedHosts(trial.hosts[0]), "all blocks")
    except HOST_ERRORS as error:
        reason, *_ = str(error).splitlines() or [type(error).__name__]
        raise ValueError(
            f"executor fused cannot batch this host: {reason}; use env.executor loop, threads or streams"
        ) from error


class Trial:
    """Copies of a host with different weights, and inputs, to compare batched hosts with."""

    def __init__(self, env: HostEnv, inputs: Tensor, dtype: torch.dtype, tolerance: float) -> None:
        self.device, self.tolerance = env.device, tolerance
        self.generator = torch.Generator(env.device).manual_seed(0)
        self.inputs = inputs[torch.arange(N_HOSTS * N_SAMPLES, device=inputs.device) % len(inputs)]
        if self.inputs.is_floating_point():
            noise = torch.randn(self.inputs.shape, generator=self.generator, device=inputs.device)
            self.inputs = (self.inputs + NOISE_SCALE * noise).to(dtype)
        self.hosts: list[nn.Module] = [deepcopy(env.network).to(dtype) for _ in range(N_HOSTS)]
        for host in self.hosts:
            for slot in slots_of(host).values():
                slot.empty()
            self._randomise(host)
        reasons = probe_seeds(
            deepcopy(self.hosts[0]), env.space.blueprint, lambda host: host(self.inputs).square().mean(), birth="random"
        )
        self.growable = {place for place, against in reasons.items() if not against}  # slots and blueprints

    @torch.no_grad()
    def _randomise(self, network: nn.Module) -> None:
        """Add noise to all weights, and positive noise to running statistics, because variances must stay positive."""
        for weight in network.parameters():
            weight += NOISE_SCALE * torch.randn(weight.shape, generator=self.generator, device=weight.device)
        for number in network.buffers():
            if number.is_floating_point():
                number += NOISE_SCALE * torch.rand(number.shape, generator=self.generator, device=number.device)

    def germinate(self, blueprints: Sequence[str]) -> None:
        """Germinate seeds in every second slot of the first host and in every slot of the others.

        They alternate between the first two blueprints that can grow. One seed is isolated, all others are blended.
        """
        for i, host in enumerate(self.hosts):
            slots = [slot for slot in slots_of(host).values() if slot.is_judged]
            for k, slot in enumerate(slots):
                slot.empty()
                fitting = [name for name in blueprints if (slot.name, name) in self.growable][:2]
                if fitting and (i or k % 2 == 0):
                    blueprint = fitting[(i + k) % len(fitting)]
                    germinate(slot, blueprint, TRIAL_RAMP, generator=self.generator, birth="random")
                    self._randomise(slot.seed)
                    slot.move_to(Stage.TRAINING)
                    if not (i == 1 and k == len(slots) - 1):
                        slot.move_to(Stage.BLENDING)
                        slot.move_to(Stage.PROBATIONARY)

    def deepen(self) -> None:
        """Let all lists of blocks grow as far as they can."""
        for slot in chain.from_iterable(slots_of(host).values() for host in self.hosts):
            if isinstance(slot, DepthSlot):
                germinate(slot, "stack", generator=self.generator)
                for block in slot.grown:
                    self._randomise(block)

    def compare(self, batched: BatchedHosts, seeds: str) -> None:
        """Raise ValueError if these hosts cannot be computed at once, or come out different."""
        first_name: dict[nn.Parameter, str] = {}
        for name, weight in self.hosts[-1].named_parameters(remove_duplicate=False):
            if first_name.setdefault(weight, name) != name:
                raise ValueError(f"{first_name[weight]} and {name} are one weight")
            if not weight.requires_grad:
                raise ValueError(f"{name} does not learn (its requires_grad is off)")
        before = self._random_state()
        for result, ours, separate in chain(self._training_results(batched), self._evaluation_results(batched)):
            if not torch.equal(self._random_state(), before):
                raise ValueError("it draws random numbers (Dropout?), and batched hosts would draw others")
            off = difference(ours, separate)
            if not off <= self.tolerance:
                raise ValueError(f"{result} with {seeds} are off by {off:.1g} of the largest number")

    def _random_state(self) -> Tensor:
        cuda = [torch.cuda.get_rng_state(self.device)] if self.device.type == "cuda" else []
        return torch.cat([torch.get_rng_state(), *cuda])

    def _training_results(self, batched: BatchedHosts) -> Iterator[tuple[str, Sequence[Tensor], Sequence[Tensor]]]:
        """Yield the name of each result, its tensors from the batched hosts, and those from the separate hosts."""
        weights = batched.load(self.hosts)
        weights.bind(requires_grad=True)
        for host in self.hosts:
            host.train().zero_grad()
        parts = zip(self.hosts, self.inputs.chunk(N_HOSTS), strict=True)
        batched_outputs, separate_outputs = batched.train(self.inputs), torch.cat([host(part) for host, part in parts])
        for outputs in (batched_outputs, separate_outputs):
            outputs.square().mean().backward()
        yield "outputs in training", [batched_outputs], [separate_outputs]
        for name, weight in chain.from_iterable(host.named_parameters() for host in self.hosts):
            if weight.grad is None:
                raise ValueError(f"{name} is not used in training")
        separate = weights.gather([weight.grad for weight in weights.parameters if weight.grad is not None])
        ours, theirs = (list(chain.from_iterable(weights.views(grads))) for grads in (weights.grads, separate))
        yield "gradients", ours, theirs
        for section in weights.sections:
            yield "running statistics", section.statistics, section.gather_statistics()

    @torch.inference_mode()
    def _evaluation_results(self, batched: BatchedHosts) -> Iterator[tuple[str, Sequence[Tensor], Sequence[Tensor]]]:
        inputs = self.inputs[:N_SAMPLES]
        batched.load(self.hosts).bind(requires_grad=False)
        variants = leave_one_out(slots_of(self.hosts[0]))
        outputs = batched.evaluate(inputs, [variants] * N_HOSTS).unflatten(0, (-1, N_SAMPLES))
        for host, entries in zip(self.hosts, batched.entries.entry_of_variant(), strict=True):
            separate, indices = forward_variants(host.eval(), variants, inputs)
            yield "outputs in evaluation", [outputs[entries]], [separate.unflatten(0, (-1, N_SAMPLES))[indices]]
            if mixes_rows(host, (inputs,)):  # validation data may be processed in pieces
                raise ValueError("rows of a batch see each other in evaluation")


def difference(batched: Sequence[Tensor], separate: Sequence[Tensor]) -> float:
    """Return the largest difference in any tensor, relative to the tensor's largest absolute value."""
    if any(a.shape != b.shape for a, b in zip(batched, separate, strict=True)):
        return float("inf")
    sizes = [b.abs().max().item() for b in separate]
    floor = CANCELLATION_FLOOR * max(sizes, default=0.0)
    pairs = zip(batched, separate, sizes, strict=True)
    differences = [(a - b).abs().max().item() / (max(size, floor) or 1.0) for a, b, size in pairs]
    return torch.tensor([0.0, *differences]).max().item()  # NaN if any difference is NaN
