"""Does a stack compute what its hosts compute? Shown on the host at hand before anything is trained."""

from collections.abc import Iterator, Sequence
from copy import deepcopy

import torch
from torch import Tensor, nn

from esper_lightning.blueprints import names
from esper_lightning.envs.actions import STYLES
from esper_lightning.envs.execution.fused.stack import HostStack
from esper_lightning.envs.host_env import HostEnv
from esper_lightning.growth.alpha import Ramp
from esper_lightning.growth.blend import Style
from esper_lightning.growth.counterfactual import forward_variants
from esper_lightning.growth.network import germinate, slots_of
from esper_lightning.growth.stages import Stage

SAMPLES = 3
"""Of the data, for each host: more than one, so that hosts and samples cannot be taken for each other."""

TOLERANCE = 1e-7
"""Largest difference relative to the largest number, in float64: rounding stays far below, a wrong number far above."""

ALPHA = 0.5
"""Of the seeds: both the host's part and the seed's part count."""


def check_stack(env: HostEnv, inputs: Tensor) -> None:
    """Compares two stacked hosts with the same two by themselves, with every kind of seed that can grow on them.

    Args:
        env: A fresh environment; it is not touched.
        inputs: Some of its data.

    Raises ValueError if the host cannot be stacked: a layer is unknown, or the results differ.
    """
    inputs = inputs[:SAMPLES]
    if inputs.is_floating_point():
        inputs = inputs.double()
    hosts = [deepcopy(env.network).double() for _ in range(2)]
    generator = torch.Generator(env.device).manual_seed(0)
    try:
        stack = HostStack(hosts[0])
        for blueprints, style in _kinds(env):
            _grow(hosts, blueprints, style, generator)
            for what, ours, theirs in _compare(stack, hosts, inputs):
                off = (ours - theirs).abs().max().item() if ours.shape == theirs.shape else float("inf")
                if not off <= TOLERANCE * max(1.0, theirs.abs().max().item()):
                    raise ValueError(f"{what} with {style} seeds {blueprints[0]} are off by {off:.1g}")
    except (ValueError, RuntimeError) as problem:  # torch's shape errors are RuntimeErrors
        raise ValueError(
            f"executor fused cannot stack this host: {problem}; use env.executor loop, threads or streams"
        ) from problem


def _kinds(env: HostEnv) -> Iterator[tuple[list[str], Style]]:
    """All blueprints, in turn another one first, and each style."""
    blueprints = list(env.space.blueprint)
    styles = list(dict.fromkeys(STYLES[style][1] for style in env.space.style))
    for i in range(len(blueprints)):
        for style in styles if i == 0 else styles[:1]:
            yield blueprints[i:] + blueprints[:i], style


def _grow(hosts: Sequence[nn.Module], blueprints: Sequence[str], style: Style, generator: torch.Generator) -> None:
    """Every second slot of one host and every slot of the other get a seed, the first two that fit by turns."""
    for i, host in enumerate(hosts):
        for k, slot in enumerate(slots_of(host).values()):
            slot.empty()
            fitting = [name for name in blueprints if name in names(slot.layout)]
            if fitting and (i or k % 2 == 0):
                blueprint = fitting[(i + k) % min(2, len(fitting))]
                germinate(slot, blueprint, Ramp(0.0, ALPHA, 1, "linear"), generator, style, "random")
                for stage in (Stage.TRAINING, Stage.BLENDING, Stage.PROBATIONARY)[: 1 if i and k == 0 else 3]:
                    slot.move_to(stage)


def _compare(stack: HostStack, hosts: Sequence[nn.Module], inputs: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
    """What the stack says, and what the hosts say."""
    arena = stack.load(hosts)
    arena.give(learn=True)
    both = inputs.repeat(2, *[1] * (inputs.ndim - 1))
    ours = stack.train(both)
    ours.square().mean().backward()
    outputs = [host.train()(inputs) for host in hosts]
    for host in hosts:
        host.zero_grad()
    torch.cat(outputs).square().mean().backward()
    yield "outputs in training", ours, torch.cat(outputs)
    yield "gradients", arena.grads, arena.gather([_gradient(p) for p in arena.parameters])
    with torch.inference_mode():
        stack.load(hosts).give(learn=False)
        names = list(slots_of(hosts[0]))
        variants = [frozenset(names), *(frozenset(names) - {name} for name in names)]
        entries = stack.evaluate(inputs, [variants, variants]).unflatten(0, (-1, len(inputs)))
        for i, host in enumerate(hosts):
            parts, places = forward_variants(host.eval(), variants, inputs)
            alone = parts.unflatten(0, (-1, len(inputs)))[places]
            yield "outputs in evaluation", entries[stack.views.places(i)], alone


def _gradient(p: nn.Parameter) -> Tensor:
    return torch.zeros_like(p) if p.grad is None else p.grad
