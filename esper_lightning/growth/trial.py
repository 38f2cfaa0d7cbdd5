"""Trial passes: gradients of the loss with a seed at full alpha, for seeds that do not change the host's output yet."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from esper_lightning.growth.attach import parts_without_slots
from esper_lightning.growth.lifecycle import slots_of
from esper_lightning.growth.nested import iter_tensors, map_tensors, preserved_buffers
from esper_lightning.growth.slot import SeedSlot

LossFunction = Callable[[nn.Module], Tensor]
"""Function that runs a network on a minibatch and returns its loss, with a graph."""


def backward_with_trials(network: nn.Module, slots: Sequence[SeedSlot], loss_of: LossFunction) -> Tensor:
    """Accumulate the gradients of a host's loss, then for the seed in each of `slots` those of a trial pass.

    A trial pass computes the loss with this seed at full alpha, and all others as they are. Its gradient goes to this
    seed alone. Behind the slot, layers with running statistics (BatchNorm) use them, as in evaluation: those of the
    minibatch would hide a shift of the feature that the host shows as soon as the seed is switched on. The pass takes
    over the outputs of the layers before the slot, so that only what lies behind is computed twice. Parameters,
    gradients and buffers of the host, and torch's random numbers, are as without trial passes.

    Args:
        network: Network in training mode.
        slots: Slots of the network whose seeds learn by trial.
        loss_of: Called once for the host and once for each seed, always with the same minibatch.

    Returns the host's loss.
    """
    if not slots:
        loss = loss_of(network)
        loss.backward()
        return loss
    features = _Features()
    with features.recording(network, slots):
        loss = loss_of(network)
    if loss.requires_grad:  # otherwise the host is frozen, and the seeds take no part in its loss
        loss.backward()
    for slot in slots:
        if slot in features.calls_before:  # the forward pass has reached the slot
            _accumulate_trial_gradients(network, slot, loss_of, features=features)
    return loss


def _accumulate_trial_gradients(
    network: nn.Module, slot: SeedSlot, loss_of: LossFunction, *, features: "_Features"
) -> None:
    device = slot.alpha.device
    parameters = [parameter for parameter in slot.seed.parameters() if parameter.requires_grad]
    slot.override = SeedSlot.trial_output
    try:
        with (
            torch.random.fork_rng([device] if device.type == "cuda" else []),
            _preserved_generators(network),
            preserved_buffers(network, but=slot.seed),
            _running_statistics(network, but=[slot.seed, *features.parts_before(slot)]),
            _replaced_forwards(features.replays(slot)),
        ):
            gradients = torch.autograd.grad(loss_of(network), parameters, allow_unused=True)
    finally:
        slot.override = None
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is not None:
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


@contextmanager
def _preserved_generators(network: nn.Module) -> Iterator[None]:
    """Restore the state of the random generators in lists of the network's modules (dropout) after this context."""
    lists = [value for module in network.modules() for value in vars(module).values() if isinstance(value, list)]
    generators = {item for values in lists for item in values if isinstance(item, torch.Generator)}
    states = [(generator, generator.get_state()) for generator in generators]
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)


@contextmanager
def _running_statistics(network: nn.Module, but: Iterable[nn.Module]) -> Iterator[None]:
    """Let layers with running statistics use them within this context, except in the parts `but` of the network."""
    exempt = {module for part in but for module in part.modules()}
    layers = [
        module
        for module in network.modules()
        if module not in exempt and module.training and getattr(module, "running_mean", None) is not None
    ]
    for layer in layers:
        layer.training = False
    try:
        yield
    finally:
        for layer in layers:
            layer.training = True


class _Call(NamedTuple):
    """Call of a part of the network in the recorded pass."""

    part: nn.Module
    output: Any
    versions: list[int]
    """Version of each tensor of the output: PyTorch raises it when a tensor is modified in place."""


class _Features:
    """Outputs of a network's parts in one forward pass: of those that hold no slot, and of slots without a trial.

    Attributes:
        calls_before: Number of calls before each slot that the pass has reached.
    """

    def __init__(self) -> None:
        self.calls: list[_Call] = []
        self.calls_before: dict[SeedSlot, int] = {}

    @contextmanager
    def recording(self, network: nn.Module, slots: Sequence[SeedSlot]) -> Iterator[None]:
        """Record the forward pass within this context."""
        others = [slot for slot in slots_of(network).values() if slot not in slots]
        parts = [*parts_without_slots(network), *others]
        recorders = {part: partial(self._record, part, part.forward) for part in parts}
        for slot in slots:
            slot.override = self._reach
        try:
            with _replaced_forwards(recorders):
                yield
        finally:
            for slot in slots:
                slot.override = None

    def _record(self, part: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        self.calls.append(_Call(part, output, _versions(output)))
        return output

    def _reach(self, slot: SeedSlot, x: Tensor) -> Tensor:
        self.calls_before.setdefault(slot, len(self.calls))
        return slot.blend_output(x)

    def parts_before(self, slot: SeedSlot) -> list[nn.Module]:
        """Return the parts that were called before `slot`."""
        return [call.part for call in self.calls[: self.calls_before[slot]]]

    def replays(self, slot: SeedSlot) -> dict[nn.Module, Callable[..., Any]]:
        """Return forward functions that return the recorded outputs of the parts before `slot`.

        Parts that were called again, or whose output was modified in place, are left out.
        """
        called = [call.part for call in self.calls]
        return {
            call.part: partial(_detached, call.output)
            for call in self.calls[: self.calls_before[slot]]
            if called.count(call.part) == 1 and _versions(call.output) == call.versions
        }


def _versions(output: Any) -> list[int]:
    return [tensor._version for tensor in iter_tensors(output)]


def _detached(output: Any, *args: Any, **kwargs: Any) -> Any:
    return map_tensors(output, Tensor.detach)


@contextmanager
def _replaced_forwards(forwards: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Replace the forward functions of these modules within the context; their hooks stay."""
    originals = {module: vars(module).get("forward") for module in forwards}
    for module, forward in forwards.items():
        module.forward = forward
    try:
        yield
    finally:
        for module, original in originals.items():
            if original is None:
                del module.forward
            else:
                module.forward = original
