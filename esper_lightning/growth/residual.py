"""Residual branches of a block, found by what it does: with the last layer of each at zero it returns its input."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from esper_lightning.runtime.nested import ExampleInput, call_network, evaluation_mode, iter_tensors, preserved_buffers

NOISE_RNG_SEED = 0


class _BlockHasRun(Exception):
    """Raised behind a block to end the forward pass, because the rest of the network need not run."""


class _BlockCall(NamedTuple):
    """Inputs and output of one call of a block, in the forward pass of its network."""

    inputs: list[Tensor]  # copies of the floating-point ones
    output: Tensor  # the first tensor of the output


def branch_ends(network: nn.Module, block: nn.Module, example: ExampleInput) -> list[str]:
    """Return the names of the last parameters of each residual branch of a block.

    With these at zero the block returns its input on the example, bit for bit. They are found by trial: all parameters
    of the block become zero. Then each one, in the order of use, becomes noise; if the block no longer returns its
    input, the parameter is one of those sought, and becomes zero again. Noise stands for the present values, of which
    some may be zero by chance. The parameters of experts that no token of the example chose follow other experts'.

    Raises ValueError, and leaves the network as it is, if the example does not run all of the block, if the block never
    returns its input, such as one that normalises the sum of input and branch, or if these parameters have no gradient
    at zero, as before a ReLU that ends a branch.
    """
    parameters = {name: p for name, p in block.named_parameters() if p.is_floating_point()}
    saved = {name: p.detach().clone() for name, p in parameters.items()}
    requires_grad = {p: p.requires_grad for p in network.parameters()}
    generator = torch.Generator().manual_seed(NOISE_RNG_SEED)
    noise = {name: _noise(p, generator) for name, p in parameters.items()}
    try:
        with evaluation_mode(network), preserved_buffers(network), torch.random.fork_rng():
            for parameter in requires_grad:
                parameter.requires_grad_(False)
            used = _used_parameters(network, block, example, values=noise)
            for parameter in parameters.values():
                parameter.detach().zero_()
            if not _returns_input(network, block, example):
                raise ValueError(
                    f"stack: {type(block).__name__} does not return its input where all its parameters are zero, so no "
                    f"layer at zero makes it change nothing at first; use stack(…, new='copy')"
                )
            ends = []
            for name in used:
                parameters[name].detach().copy_(noise[name])
                if not _returns_input(network, block, example):
                    ends.append(name)
                    parameters[name].detach().zero_()
            with_gradient = _with_gradient(
                network, block, example, parameters={name: parameters[name] for name in ends}
            )
    finally:
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(saved[name])
        for parameter, value in requires_grad.items():
            parameter.requires_grad_(value)
    patterns_with_gradient = {_pattern(name) for name in with_gradient}
    stuck = [name for name in ends if _pattern(name) not in patterns_with_gradient]
    if stuck:
        raise ValueError(
            f"stack: {type(block).__name__} returns its input with {', '.join(ends)} at zero, but "
            f"{', '.join(stuck)} then have no gradient and never learn; use stack(…, new='copy')"
        )
    unused = [name for name in parameters if name not in used]
    used_patterns = {_pattern(name) for name in used}
    unknown = [name for name in unused if _pattern(name) not in used_patterns]
    if unknown:
        raise ValueError(
            f"stack: the example does not run {', '.join(unknown[:3])} of a block, so it does not show whether it must "
            f"be zero; give an example that does, or name the last layer of each residual branch in zero="
        )
    end_patterns = {_pattern(name) for name in ends}
    return [name for name in parameters if name in ends or (name in unused and _pattern(name) in end_patterns)]


def outputs(network: nn.Module, example: ExampleInput) -> list[Tensor]:
    """Return the tensors that a network in evaluation mode returns for an example.

    Tensors of a sequence within another container are left out, because a cache, or the hidden states, have one for
    each block. Raises ValueError if no tensor is left.
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


def are_equal(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Return True if two lists of tensors are equal, bit for bit."""
    return len(some) == len(others) and all(map(torch.equal, some, others))


def _compared(output: Any, *, within: bool = False) -> Iterator[Tensor]:
    """Yield the tensors of an output; none of a sequence if `within`, which says that a container holds the output."""
    if is_dataclass(output) and not isinstance(output, Mapping):
        output = {field.name: getattr(output, field.name) for field in fields(output)}
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping) or (isinstance(output, tuple | list) and not within):
        for part in output.values() if isinstance(output, Mapping) else output:
            yield from _compared(part, within=True)


def _pattern(name: str) -> str:
    """Return the name of a parameter with each number as #: equal for layers that are alike, such as experts."""
    return re.sub(r"\d+", "#", name)


def _noise(parameter: Tensor, generator: torch.Generator) -> Tensor:
    """Return noise in the shape of a parameter, so small that features keep their size, in any precision."""
    fan_in = max(1, parameter.numel() // len(parameter)) if parameter.ndim > 1 else 1
    noise = torch.randn(parameter.shape, generator=generator) / (2 * fan_in**0.5)
    return noise.to(parameter.device, parameter.dtype)


def _used_parameters(
    network: nn.Module, block: nn.Module, example: ExampleInput, *, values: dict[str, Tensor]
) -> list[str]:
    """Set a block's parameters to `values`; return the names of those that its output depends on, in order of use."""
    calls: dict[str, int] = {}  # position of each module in the order of their first calls
    names = {module: name for name, module in block.named_modules()}

    def note_call(module: nn.Module, _: Any) -> None:
        calls.setdefault(names[module], len(calls))

    hooks = [module.register_forward_pre_hook(note_call) for module in names]
    parameters = {name: block.get_parameter(name) for name in values}
    with torch.enable_grad():
        for name, parameter in parameters.items():
            parameter.detach().copy_(values[name])
            parameter.requires_grad_(True)
        try:
            output = _run(network, block, example).output
        finally:
            for hook in hooks:
                hook.remove()
        if not output.requires_grad:
            return []
        gradients = torch.autograd.grad(output.sum(), list(parameters.values()), allow_unused=True)

    def position(name: str) -> int:
        """Return the position of the module that owns a parameter, or of its nearest parent that was called."""
        while "." in name:
            name = name.rpartition(".")[0]
            if name in calls:
                return calls[name]
        return calls[""]

    used = [name for name, gradient in zip(parameters, gradients, strict=True) if gradient is not None]
    return sorted(used, key=position)  # parameters of one module stay in their order


def _with_gradient(
    network: nn.Module, block: nn.Module, example: ExampleInput, *, parameters: dict[str, Tensor]
) -> list[str]:
    """Return the names of those parameters of a block that get a gradient other than zero from one of its output."""
    if not parameters:
        return []
    generator = torch.Generator().manual_seed(NOISE_RNG_SEED)
    with torch.enable_grad():
        for parameter in parameters.values():
            parameter.requires_grad_(True)
        output = _run(network, block, example).output
        output_gradient = torch.randn(output.shape, generator=generator).to(output)
        gradients = torch.autograd.grad(output, list(parameters.values()), output_gradient, allow_unused=True)
    return [name for name, grad in zip(parameters, gradients, strict=True) if grad is not None and grad.any()]


def _returns_input(network: nn.Module, block: nn.Module, example: ExampleInput) -> bool:
    """Return True if a block returns one of its inputs, bit for bit."""
    with torch.no_grad():
        call = _run(network, block, example)
    return any(torch.equal(x, call.output) for x in call.inputs if x.shape == call.output.shape)


def _run(network: nn.Module, block: nn.Module, example: ExampleInput) -> _BlockCall:
    """Run a network until a block has run, and return this call. Raises ValueError if the block does not run."""
    inputs: list[Tensor] = []
    output_tensors: list[Tensor] = []

    def before(_: nn.Module, args: Any, kwargs: Any) -> None:
        inputs[:] = [x.detach().clone() for x in iter_tensors((args, kwargs)) if x.is_floating_point()]

    def behind(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        output_tensors[:] = iter_tensors(output)
        raise _BlockHasRun

    hooks = [
        block.register_forward_pre_hook(before, with_kwargs=True),
        block.register_forward_hook(behind, with_kwargs=True),
    ]
    try:
        call_network(network, example)
    except _BlockHasRun:
        if output_tensors:
            return _BlockCall(inputs, output_tensors[0])
    finally:
        for hook in hooks:
            hook.remove()
    raise ValueError("stack: the example does not run a block that is copied; give one that does")
