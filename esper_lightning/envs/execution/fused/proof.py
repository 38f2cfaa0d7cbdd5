"""Check before training that a stack computes the same as its hosts by themselves, on the host at hand."""

from collections.abc import Iterator, Sequence
from copy import deepcopy
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn

from esper_lightning.blueprints import names
from esper_lightning.envs.actions import STYLES
from esper_lightning.envs.execution.fused.arena import Arena
from esper_lightning.envs.execution.fused.stack import HostStack
from esper_lightning.envs.host_env import HostEnv
from esper_lightning.growth.alpha import Ramp
from esper_lightning.growth.blend import Style
from esper_lightning.growth.counterfactual import forward_variants, leave_one_out
from esper_lightning.growth.network import germinate, slots_of
from esper_lightning.growth.probe import probe_seeds
from esper_lightning.growth.stages import Stage

HOSTS, SAMPLES = 3, 4
"""Numbers of hosts in the stack and of samples per host.

They differ, so that a mix-up of the two axes shows. With three hosts the first and the last have seeds of one kind, so
that the stack has to reorder the hosts."""

TOLERANCE, LOOSE = 1e-7, 1e-2
"""Largest allowed difference within a tensor, relative to its largest absolute value.

In float64 rounding errors stay far below and wrong results far above. The loose tolerance is for hosts and seeds that
do not run in float64."""

CANCELLED = 1e-3
"""Fraction of the largest value of all tensors below which a tensor may hold only rounding errors."""

NOISE = 0.1
"""Scale of the noise added to weights and inputs, so that hosts differ, no weight is zero and no two pixels are equal.

With equal pixels rounding would decide which of them a max-pool selects, and so where its gradient goes."""

ALPHA = 0.5
"""Alpha of the blended seeds, at which both the host's and the seed's part of the output count."""

FAILURES = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""Errors that the host's code, or torch, may raise for stacked shapes."""

Finding = tuple[str, Sequence[Tensor], Sequence[Tensor]]
"""Name of a result, its tensors from the stack, and its tensors from the separate hosts."""


class Trial(NamedTuple):
    """Hosts and inputs for the comparison."""

    hosts: list[nn.Module]
    inputs: Tensor  # [N_HOSTS·N_SAMPLES, …], host by host
    growable: set[tuple[str, str]]  # pairs (slot, blueprint) that can grow
    generator: torch.Generator
    tolerance: float


def check_stack(env: HostEnv, inputs: Tensor) -> None:
    """Compare a few stacked hosts with the same hosts by themselves, with every kind of seed that can grow on them.

    Args:
        env: Environment of the host, which is not changed.
        inputs: Some inputs of the host.

    Raises ValueError if the host cannot be stacked: a layer is not supported, or the results differ.
    """
    gpus = [env.device] if env.device.type == "cuda" else []
    try:
        with torch.inference_mode(False), torch.random.fork_rng(gpus):
            _check(env, inputs)
    except FAILURES as problem:
        first, *_ = str(problem).splitlines() or [type(problem).__name__]
        raise ValueError(
            f"executor fused cannot stack this host: {first}; use env.executor loop, threads or streams"
        ) from problem


def _check(env: HostEnv, inputs: Tensor) -> None:
    trial = _best_trial(env, inputs)
    stack = HostStack(trial.hosts[0])
    for blueprints, style in _kinds(env):
        _grow(trial, blueprints, style)
        _check_weights(trial.hosts[-1])
        random = _random_state(env.device)
        for what, ours, theirs in _compare(stack, trial):
            if not torch.equal(_random_state(env.device), random):
                raise ValueError("it draws random numbers (Dropout?), and a stack would draw others")
            off = _difference(ours, theirs)
            if not off <= trial.tolerance:
                grown = f"{style} seeds {blueprints[0]}" if blueprints else "no seeds"
                raise ValueError(f"{what} with {grown} are off by {off:.1g} of the largest number")


def _best_trial(env: HostEnv, inputs: Tensor) -> Trial:
    """Return a trial in float64 if all growable seeds run in it, else in the host's precision."""
    slots = slots_of(env.network).values()
    fitting = {(slot.name, name) for slot in slots for name in env.space.blueprint if name in names(slot.layout)}
    try:
        exact = _trial(env, inputs, torch.float64, TOLERANCE)
    except RuntimeError:  # the host requires its own precision
        exact = None
    if exact is not None and exact.growable == fitting:
        return exact
    loose = _trial(env, inputs, next(env.network.parameters()).dtype, LOOSE)
    return exact if exact is not None and exact.growable == loose.growable else loose


def _trial(env: HostEnv, inputs: Tensor, dtype: torch.dtype, tolerance: float) -> Trial:
    generator = torch.Generator(env.device).manual_seed(0)
    some = inputs[torch.arange(HOSTS * SAMPLES, device=inputs.device) % len(inputs)]
    if some.is_floating_point():
        some = (some + NOISE * torch.randn(some.shape, generator=generator, device=some.device)).to(dtype)
    hosts = [deepcopy(env.network).to(dtype) for _ in range(HOSTS)]
    for host in hosts:
        for slot in slots_of(host).values():
            slot.empty()
        _stir(host, generator)
    against = probe_seeds(deepcopy(hosts[0]), env.space.blueprint, lambda host: host(some).square().mean(), "random")
    return Trial(hosts, some, {place for place, reasons in against.items() if not reasons}, generator, tolerance)


@torch.no_grad()
def _stir(network: nn.Module, generator: torch.Generator) -> None:
    """Add noise to all weights, and positive noise to running statistics, because variances must stay positive."""
    for weight in network.parameters():
        weight += NOISE * torch.randn(weight.shape, generator=generator, device=weight.device)
    for number in network.buffers():
        if number.is_floating_point():
            number += NOISE * torch.rand(number.shape, generator=generator, device=number.device)


def _kinds(env: HostEnv) -> Iterator[tuple[list[str], Style]]:
    """Yield blueprints and style of each comparison: no blueprint, then every rotation of all blueprints.

    The first rotation comes with every style, the others with the first style.
    """
    blueprints = list(env.space.blueprint)
    styles = list(dict.fromkeys(STYLES[style][1] for style in env.space.style))
    yield [], styles[0]
    for i in range(len(blueprints)):
        for style in styles if i == 0 else styles[:1]:
            yield blueprints[i:] + blueprints[:i], style


def _grow(trial: Trial, blueprints: Sequence[str], style: Style) -> None:
    """Germinate seeds in every second slot of the first host and in every slot of the others.

    They alternate between the first two blueprints that can grow. One seed trains straight-through, all others are
    blended.
    """
    for i, host in enumerate(trial.hosts):
        slots = slots_of(host).values()
        for k, slot in enumerate(slots):
            slot.empty()
            fitting = [name for name in blueprints if (slot.name, name) in trial.growable]
            if fitting and (i or k % 2 == 0):
                blueprint = fitting[(i + k) % min(2, len(fitting))]
                germinate(slot, blueprint, Ramp(0.0, ALPHA, 1, "linear"), trial.generator, style, "random")
                _stir(slot.seed, trial.generator)
                learns = i == 1 and k == len(slots) - 1
                for stage in (Stage.TRAINING, Stage.BLENDING, Stage.PROBATIONARY)[: 1 if learns else 3]:
                    slot.move_to(stage)


def _check_weights(host: nn.Module) -> None:
    """Raise ValueError if a weight cannot be stacked: shared by two layers, or not trainable."""
    first: dict[nn.Parameter, str] = {}
    for name, weight in host.named_parameters(remove_duplicate=False):
        if first.setdefault(weight, name) != name:
            raise ValueError(f"{first[weight]} and {name} are one weight")
        if not weight.requires_grad:
            raise ValueError(f"{name} does not learn (its requires_grad is off)")


def _random_state(device: torch.device) -> Tensor:
    """Return the state of torch's global random generators."""
    states = [torch.get_rng_state()]
    return torch.cat([*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states)


def _compare(stack: HostStack, trial: Trial) -> Iterator[Finding]:
    hosts, inputs = trial.hosts, trial.inputs
    arena = stack.load(hosts)
    arena.give(learn=True)
    ours = stack.train(inputs)
    ours.square().mean().backward()
    for host in hosts:
        host.train().zero_grad()
    theirs = torch.cat([host(own) for host, own in zip(hosts, inputs.chunk(HOSTS), strict=True)])
    theirs.square().mean().backward()
    yield "outputs in training", [ours], [theirs]
    for name, weight in chain.from_iterable(host.named_parameters() for host in hosts):
        if weight.grad is None:
            raise ValueError(f"{name} is not used in training")
    alone = arena.gather([weight.grad for weight in arena.parameters])
    yield "gradients", *(list(chain.from_iterable(arena.views(grads))) for grads in (arena.grads, alone))
    counted = _statistics(arena)
    for staffed in arena.staff:
        staffed.gather_buffers()
    yield "running statistics", counted, _statistics(arena)
    with torch.inference_mode():
        yield from _compare_evaluation(stack, hosts, inputs[:SAMPLES])


def _statistics(arena: Arena) -> list[Tensor]:
    """Return the running statistics held by the stacked layers."""
    layers = chain.from_iterable(program.layers.values() for program, _ in arena.staff)
    return [getattr(layer, name) for layer in layers for name in layer.buffer_names]


def _compare_evaluation(stack: HostStack, hosts: Sequence[nn.Module], inputs: Tensor) -> Iterator[Finding]:
    stack.load(hosts).give(learn=False)
    variants = leave_one_out(slots_of(hosts[0]))
    entries = stack.evaluate(inputs, [variants] * HOSTS).unflatten(0, (-1, len(inputs)))
    for host, places in zip(hosts, stack.views.places(), strict=True):
        parts, own_places = forward_variants(host.eval(), variants, inputs)
        yield "outputs in evaluation", [entries[places]], [parts.unflatten(0, (-1, len(inputs)))[own_places]]
        # Validation data may be processed in pieces, so samples must not affect each other.
        yield "outputs for a sample by itself", [host(inputs[:1])], [host(inputs)[:1]]


def _difference(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """Return the largest difference in any tensor, relative to the tensor's largest absolute value."""
    if any(a.shape != b.shape for a, b in zip(ours, theirs, strict=True)):
        return float("inf")
    sizes = [b.abs().max().item() for b in theirs]
    floor = CANCELLED * max(sizes, default=0.0)
    pairs = zip(ours, theirs, sizes, strict=True)
    differences = [(a - b).abs().max().item() / (max(size, floor) or 1.0) for a, b, size in pairs]
    return torch.tensor(differences or [0.0]).max().item()  # NaN if any difference is NaN
