"""Check before training that a stack computes the same as its hosts by themselves, on the host at hand."""

from collections.abc import Iterator, Sequence
from copy import deepcopy
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn

from esper_lightning.blueprints import blueprint_names
from esper_lightning.envs.executors.fused.flat_params import FlatParameters
from esper_lightning.envs.executors.fused.stacked_host import HostStack
from esper_lightning.envs.host_env import HostEnv
from esper_lightning.envs.host_training import ConvolutionMethod
from esper_lightning.envs.spaces.actions import STYLES
from esper_lightning.growth.blend import BlendStyle, Ramp
from esper_lightning.growth.counterfactual import forward_variants, leave_one_out
from esper_lightning.growth.lifecycle import germinate, slots_of
from esper_lightning.growth.probe import probe_seeds
from esper_lightning.growth.stages import Stage
from esper_lightning.hosts.dropout import dropout_generators

N_HOSTS, N_SAMPLES = 3, 4
"""Numbers of hosts in the stack and of samples per host.

They differ, so that a mix-up of the two axes shows. With three hosts the first and the last have seeds of one kind, so
that the stack has to reorder the hosts."""

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
"""Errors that the host's code, or torch, may raise for stacked shapes."""

ResultPair = tuple[str, Sequence[Tensor], Sequence[Tensor]]
"""Name of a result, its tensors from the stack, and its tensors from the separate hosts."""


class Trial(NamedTuple):
    """Hosts and inputs for the comparison."""

    hosts: list[nn.Module]
    inputs: Tensor  # [N_HOSTS·N_SAMPLES, …], host by host
    growable: set[tuple[str, str]]  # pairs (slot, blueprint) that can grow
    generator: torch.Generator
    tolerance: float


def check_stack(env: HostEnv, inputs: Tensor, convolutions: ConvolutionMethod | None = None) -> None:
    """Compare a few stacked hosts with the same hosts by themselves, with every kind of seed that can grow on them.

    Args:
        env: Environment of the host, which is not changed.
        inputs: Some inputs of the host.
        convolutions: How the stack computes convolutions; see `HostTraining.convolutions`.

    Raises ValueError if the host cannot be stacked: a layer is not supported, or the results differ.
    """
    gpus = [env.device] if env.device.type == "cuda" else []
    try:
        with torch.inference_mode(False), torch.random.fork_rng(gpus):
            _check_all_seeds(env, inputs, convolutions)
    except HOST_ERRORS as error:
        first, *_ = str(error).splitlines() or [type(error).__name__]
        raise ValueError(
            f"executor fused cannot stack this host: {first}; use env.executor loop, threads or streams"
        ) from error


def _check_all_seeds(env: HostEnv, inputs: Tensor, convolutions: ConvolutionMethod | None) -> None:
    trial = _most_exact_trial(env, inputs)
    stack = HostStack(trial.hosts[0], convolutions)
    for blueprints, style in _seed_cases(env):
        _germinate_seeds(trial, blueprints, style)
        _check_weights(trial.hosts[-1])
        random_state = _random_state(env.device)
        for result, stacked_tensors, separate_tensors in _compare(stack, trial):
            if not torch.equal(_random_state(env.device), random_state):
                raise ValueError("it draws random numbers (Dropout?), and a stack would draw others")
            difference = _difference(stacked_tensors, separate_tensors)
            if not difference <= trial.tolerance:
                seeds = f"{style} seeds {blueprints[0]}" if blueprints else "no seeds"
                raise ValueError(f"{result} with {seeds} are off by {difference:.1g} of the largest number")


def _most_exact_trial(env: HostEnv, inputs: Tensor) -> Trial:
    """Return a trial in float64 if all growable seeds run in it, else in the host's precision."""
    slots = slots_of(env.network).values()
    growable = {
        (slot.name, name) for slot in slots for name in env.space.blueprint if name in blueprint_names(slot.layout)
    }
    try:
        float64_trial = _make_trial(env, inputs, torch.float64, tolerance=TOLERANCE)
    except RuntimeError:  # the host requires its own precision
        float64_trial = None
    if float64_trial is not None and float64_trial.growable == growable:
        return float64_trial
    native_trial = _make_trial(env, inputs, next(env.network.parameters()).dtype, tolerance=LOOSE_TOLERANCE)
    return (
        float64_trial if float64_trial is not None and float64_trial.growable == native_trial.growable else native_trial
    )


def _make_trial(env: HostEnv, inputs: Tensor, dtype: torch.dtype, *, tolerance: float) -> Trial:
    generator = torch.Generator(env.device).manual_seed(0)
    trial_inputs = inputs[torch.arange(N_HOSTS * N_SAMPLES, device=inputs.device) % len(inputs)]
    if trial_inputs.is_floating_point():
        trial_inputs = (
            trial_inputs
            + NOISE_SCALE * torch.randn(trial_inputs.shape, generator=generator, device=trial_inputs.device)
        ).to(dtype)
    hosts = [deepcopy(env.network).to(dtype) for _ in range(N_HOSTS)]
    for host in hosts:
        for slot in slots_of(host).values():
            slot.empty()
        _randomise(host, generator)
    refusal_reasons = probe_seeds(
        deepcopy(hosts[0]), env.space.blueprint, lambda host: host(trial_inputs).square().mean(), birth="random"
    )
    return Trial(
        hosts, trial_inputs, {key for key, reasons in refusal_reasons.items() if not reasons}, generator, tolerance
    )


@torch.no_grad()
def _randomise(network: nn.Module, generator: torch.Generator) -> None:
    """Add noise to all weights, and positive noise to running statistics, because variances must stay positive."""
    for weight in network.parameters():
        weight += NOISE_SCALE * torch.randn(weight.shape, generator=generator, device=weight.device)
    for number in network.buffers():
        if number.is_floating_point():
            number += NOISE_SCALE * torch.rand(number.shape, generator=generator, device=number.device)


def _seed_cases(env: HostEnv) -> Iterator[tuple[list[str], BlendStyle]]:
    """Yield blueprints and style of each comparison: no blueprint, then every rotation of all blueprints.

    Only the first two blueprints that fit are grown (see `_germinate_seeds`), so the list is rotated until each
    blueprint has been the first. The first rotation comes with every style, the others with the first style only.
    """
    blueprints = list(env.space.blueprint)
    styles: list[BlendStyle] = list(dict.fromkeys(STYLES[style][1] for style in env.space.style))
    yield [], styles[0]
    for i in range(len(blueprints)):
        for style in styles if i == 0 else styles[:1]:
            yield blueprints[i:] + blueprints[:i], style


def _germinate_seeds(trial: Trial, blueprints: Sequence[str], style: BlendStyle) -> None:
    """Germinate seeds in every second slot of the first host and in every slot of the others.

    They alternate between the first two blueprints that can grow. One seed is isolated, all others are
    blended.
    """
    for i, host in enumerate(trial.hosts):
        slots = slots_of(host).values()
        for k, slot in enumerate(slots):
            slot.empty()
            fitting = [name for name in blueprints if (slot.name, name) in trial.growable]
            if fitting and (i or k % 2 == 0):
                blueprint = fitting[(i + k) % min(2, len(fitting))]
                germinate(
                    slot,
                    blueprint,
                    TRIAL_RAMP,
                    generator=trial.generator,
                    style=style,
                    birth="random",
                )
                _randomise(slot.seed, trial.generator)
                is_isolated = i == 1 and k == len(slots) - 1
                for stage in (Stage.TRAINING, Stage.BLENDING, Stage.PROBATIONARY)[: 1 if is_isolated else 3]:
                    slot.move_to(stage)


def _check_weights(host: nn.Module) -> None:
    """Raise ValueError if a weight cannot be stacked: shared by two layers, or not trainable."""
    first_name: dict[nn.Parameter, str] = {}
    for name, weight in host.named_parameters(remove_duplicate=False):
        if first_name.setdefault(weight, name) != name:
            raise ValueError(f"{first_name[weight]} and {name} are one weight")
        if not weight.requires_grad:
            raise ValueError(f"{name} does not learn (its requires_grad is off)")


def _random_state(device: torch.device) -> Tensor:
    """Return the state of torch's global random generators."""
    states = [torch.get_rng_state()]
    return torch.cat([*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states)


def _compare(stack: HostStack, trial: Trial) -> Iterator[ResultPair]:
    hosts, inputs = trial.hosts, trial.inputs
    weights = stack.load(hosts)
    weights.bind(requires_grad=True)
    generators = [generator for host in hosts for generator in dropout_generators(host)]  # copies, as the hosts are
    states = [generator.get_state() for generator in generators]
    stacked_outputs = stack.train(inputs)
    stacked_outputs.square().mean().backward()
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)  # the separate hosts must draw the same masks
    for host in hosts:
        host.train().zero_grad()
    separate_outputs = torch.cat([host(own) for host, own in zip(hosts, inputs.chunk(N_HOSTS), strict=True)])
    separate_outputs.square().mean().backward()
    yield "outputs in training", [stacked_outputs], [separate_outputs]
    for name, weight in chain.from_iterable(host.named_parameters() for host in hosts):
        if weight.grad is None:
            raise ValueError(f"{name} is not used in training")
    separate_grads = weights.gather([weight.grad for weight in weights.parameters if weight.grad is not None])
    stacked, separate = (list(chain.from_iterable(weights.views(grads))) for grads in (weights.grads, separate_grads))
    yield "gradients", stacked, separate
    stacked_statistics = _statistics(weights)
    weights.bind_buffers()
    yield "running statistics", stacked_statistics, _statistics(weights)
    with torch.inference_mode():
        yield from _compare_evaluation(stack, hosts, inputs[:N_SAMPLES])


def _statistics(weights: FlatParameters) -> list[Tensor]:
    """Return the running statistics held by the stacked layers."""
    modules = [section.assignment.stacked_module for section in weights.sections]
    layers = chain.from_iterable(module.layers.values() for module in modules)
    return [getattr(layer, name) for layer in layers for name in layer.buffer_names]


def _compare_evaluation(stack: HostStack, hosts: Sequence[nn.Module], inputs: Tensor) -> Iterator[ResultPair]:
    stack.load(hosts).bind(requires_grad=False)
    variants = leave_one_out(slots_of(hosts[0]))
    stacked_outputs = stack.evaluate(inputs, [variants] * N_HOSTS).unflatten(0, (-1, len(inputs)))
    for host, entry_indices in zip(hosts, stack.entries.entry_of_variant(), strict=True):
        separate_outputs, output_indices = forward_variants(host.eval(), variants, inputs)
        yield (
            "outputs in evaluation",
            [stacked_outputs[entry_indices]],
            [separate_outputs.unflatten(0, (-1, len(inputs)))[output_indices]],
        )
        # Validation data may be processed in pieces, so samples must not affect each other.
        yield "outputs for a sample by itself", [host(inputs[:1])], [host(inputs)[:1]]


def _difference(stacked_tensors: Sequence[Tensor], separate_tensors: Sequence[Tensor]) -> float:
    """Return the largest difference in any tensor, relative to the tensor's largest absolute value."""
    if any(a.shape != b.shape for a, b in zip(stacked_tensors, separate_tensors, strict=True)):
        return float("inf")
    sizes = [b.abs().max().item() for b in separate_tensors]
    floor = CANCELLATION_FLOOR * max(sizes, default=0.0)
    pairs = zip(stacked_tensors, separate_tensors, sizes, strict=True)
    differences = [(a - b).abs().max().item() / (max(size, floor) or 1.0) for a, b, size in pairs]
    return torch.tensor(differences or [0.0]).max().item()  # NaN if any difference is NaN
