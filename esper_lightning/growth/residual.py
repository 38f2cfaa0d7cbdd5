"""Residual branches of a block, found by what it does: with the last layer of each at zero it returns its input."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from esper_lightning.runtime.nested import ExampleInput, call_network, evaluation_mode, iter_tensors, preserved_buffers

NOISE_RNG_SEED = 0


class _BlockHasRun(Exception):
    """Raised behind a block, since the rest of the network need not run."""


def branch_ends(network: nn.Module, block: nn.Module, example: ExampleInput) -> list[str]:
    """Return the names of the last parameters of each residual branch of a block.

    With these at zero the block returns its input on the example, bit for bit. They are found by trial: all parameters
    of the block become zero, and each one, in the order in which they are used, gets noise if the block still returns
    its input then. Noise stands for the present values, of which some may be zero by chance. The parameters of experts
    that no token of the example chose follow those of other experts.

    Raises ValueError, and leaves the network as it is, if the example does not run all of the block, if the block never
    returns its input, such as one that normalises the sum of input and branch, or if these parameters have no gradient
    at zero, as before a ReLU that ends a branch.
    """
    parameters = {name: p for name, p in block.named_parameters() if p.is_floating_point()}
    saved = {name: p.detach().clone() for name, p in parameters.items()}
    learning = [(p, p.requires_grad) for p in network.parameters()]
    generator = torch.Generator().manual_seed(NOISE_RNG_SEED)
    noise = {name: _noise(p, generator) for name, p in parameters.items()}
    try:
        with evaluation_mode(network), preserved_buffers(network), torch.random.fork_rng():
            for parameter, _ in learning:
                parameter.requires_grad_(False)
            used = _used_parameters(network, block, example, noise)
            for parameter in parameters.values():
                parameter.detach().zero_()
            if not _returns_input(network, block, example):
                raise ValueError(
                    f"stack: {type(block).__name__} does not return its input where all its parameters are zero, so no "
                    f"layer at zero makes it change nothing at first; use new='copy'"
                )
            ends = []
            for name in used:
                parameters[name].detach().copy_(noise[name])
                if not _returns_input(network, block, example):
                    ends.append(name)
                    parameters[name].detach().zero_()
            learn = _with_gradient(network, block, example, {name: parameters[name] for name in ends})
    finally:
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(saved[name])
        for parameter, requires_grad in learning:
            parameter.requires_grad_(requires_grad)
    patterns, known = ({_pattern(name) for name in names} for names in (ends, used))
    learning_patterns = {_pattern(name) for name in learn}
    stuck = [name for name in ends if _pattern(name) not in learning_patterns]
    if stuck:
        raise ValueError(
            f"stack: {type(block).__name__} returns its input with {', '.join(ends)} at zero, but "
            f"{', '.join(stuck)} then have no gradient and never learn; use new='copy'"
        )
    unused = [name for name in parameters if name not in used]
    unknown = [name for name in unused if _pattern(name) not in known]
    if unknown:
        raise ValueError(
            f"stack: the example does not run {', '.join(unknown[:3])} of a block, so it does not show whether it must "
            f"be zero; give an example that does, or name the last layer of each residual branch in zero="
        )
    return [name for name in parameters if name in ends or (name in unused and _pattern(name) in patterns)]


def outputs(network: nn.Module, example: ExampleInput) -> list[Tensor]:
    """Return the tensors that a network in evaluation mode returns for an example.

    Those of a sequence within another container are left out, since a cache, or the hidden states, have one for each
    block. Raises ValueError if no tensor is left.
    """
    with evaluation_mode(network), preserved_buffers(network), torch.random.fork_rng(), torch.no_grad():
        output = call_network(network, example)
    tensors = list(_compared(output))
    if not tensors:
        raise ValueError(
            f"stack: {type(network).__name__} returns a {type(output).__name__} without tensors that can be compared; "
            f"leave out example=, name zero=, and compare the outputs yourself"
        )
    return tensors


def _compared(output: Any, within: bool = False) -> Iterator[Tensor]:
    """Yield the tensors of an output, but for those of a sequence `within` another container."""
    if is_dataclass(output) and not isinstance(output, Mapping):
        output = vars(output)
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping) or (isinstance(output, tuple | list) and not within):
        for part in output.values() if isinstance(output, Mapping) else output:
            yield from _compared(part, within=True)


def _pattern(name: str) -> str:
    """Return the name of a parameter without the numbers of parts that are alike, such as experts."""
    return re.sub(r"\d+", "#", name)


def _noise(parameter: Tensor, generator: torch.Generator) -> Tensor:
    """Return noise in the shape of a parameter that keeps the size of features in any precision."""
    inputs = max(1, parameter.numel() // len(parameter)) if parameter.ndim > 1 else 1
    noise = torch.randn(parameter.shape, generator=generator) / (2 * inputs**0.5)
    return noise.to(parameter.device, parameter.dtype)


def _used_parameters(
    network: nn.Module, block: nn.Module, example: ExampleInput, values: dict[str, Tensor]
) -> list[str]:
    """Fill a block with values, and return the names of the parameters that its output depends on, in order of use."""
    calls: dict[str, int] = {}
    names = {part: name for name, part in block.named_modules()}

    def note(part: nn.Module, _: Any) -> None:
        calls.setdefault(names[part], len(calls))

    hooks = [part.register_forward_pre_hook(note) for part in names]
    parameters = {name: block.get_parameter(name) for name in values}
    with torch.enable_grad():
        for name, parameter in parameters.items():
            parameter.detach().copy_(values[name])
            parameter.requires_grad_(True)
        try:
            _, output = _run(network, block, example)
        finally:
            for hook in hooks:
                hook.remove()
        if not output.requires_grad:
            return []
        gradients = torch.autograd.grad(output.sum(), list(parameters.values()), allow_unused=True)

    def position(name: str) -> int:
        """Return when the part that has the parameter was called, or else the nearest one that has that part."""
        while "." in name:
            name = name.rpartition(".")[0]
            if name in calls:
                return calls[name]
        return calls[""]

    used = [name for name, gradient in zip(parameters, gradients, strict=True) if gradient is not None]
    return sorted(used, key=position)  # those of one part stay in their order


def _with_gradient(
    network: nn.Module, block: nn.Module, example: ExampleInput, parameters: dict[str, Tensor]
) -> list[str]:
    """Return the names of those parameters that get a gradient other than zero from a random change of the output."""
    if not parameters:
        return []
    generator = torch.Generator().manual_seed(NOISE_RNG_SEED)
    with torch.enable_grad():
        for parameter in parameters.values():
            parameter.requires_grad_(True)
        _, output = _run(network, block, example)
        change = torch.randn(output.shape, generator=generator).to(output)
        gradients = torch.autograd.grad(output, list(parameters.values()), change, allow_unused=True)
    return [name for name, x in zip(parameters, gradients, strict=True) if x is not None and x.any()]


def _returns_input(network: nn.Module, block: nn.Module, example: ExampleInput) -> bool:
    """Return True if a block returns one of its inputs, bit for bit."""
    with torch.no_grad():
        inputs, output = _run(network, block, example)
    return any(torch.equal(x, output) for x in inputs if x.shape == output.shape)


def _run(network: nn.Module, block: nn.Module, example: ExampleInput) -> tuple[list[Tensor], Tensor]:
    """Run a network until a block has run; return the inputs and the first output of the block."""
    inputs: list[Tensor] = []
    found: list[Tensor] = []

    def before(_: nn.Module, args: Any, kwargs: Any) -> None:
        inputs[:] = [x.detach().clone() for x in iter_tensors((args, kwargs)) if x.is_floating_point()]

    def behind(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        found[:] = list(iter_tensors(output))[:1]
        raise _BlockHasRun

    hooks = [
        block.register_forward_pre_hook(before, with_kwargs=True),
        block.register_forward_hook(behind, with_kwargs=True),
    ]
    try:
        call_network(network, example)
    except _BlockHasRun:
        if found:
            return inputs, found[0]
    finally:
        for hook in hooks:
            hook.remove()
    raise ValueError("stack: the example does not run a block that is copied; give one that does")
