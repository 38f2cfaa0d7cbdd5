"""Compilation of networks by `torch.compile`, by a setting of a run."""

import warnings
from collections.abc import Callable, Hashable
from contextlib import nullcontext
from types import FunctionType
from typing import Any

import torch

BACKEND = "inductor"
"""Backend of `torch.compile`."""


class Compiled:
    """Runs networks compiled while it is `enabled`. A failure to compile is a warning, and ends that.

    Networks of one kind share compiled code, which is kept here. `subject` names what is compiled.
    """

    total = 0  # graphs compiled in this process

    def __init__(self, subject: str, enabled: bool) -> None:
        self.subject = subject
        self.enabled = enabled
        self._calls: dict[Hashable, Callable[..., Any]] = {}  # compiled `_call`, by kind of network

    def has_code(self, kind: Hashable) -> bool:
        """Return True if a call for this kind of network will not have to compile."""
        return not self.enabled or kind in self._calls

    def __call__(self, network: Callable[..., Any], inputs: Any, *, kind: Hashable) -> Any:
        """Return `network(inputs)`. Only one thread may call for a kind of network without code; see `has_code`."""
        if not self.enabled:
            return network(inputs)
        # This takes seconds to import.
        from torch._dynamo.exc import BackendCompilerFailed, FailOnRecompileLimitHit, TorchDynamoException

        settings = nullcontext()
        if (run := self._calls.get(kind)) is None:
            # Torch keeps at most 8 versions of a code object, and fails for a full graph beyond: each kind has its own.
            own = FunctionType(_call.__code__.replace(), globals())
            run = torch.compile(own, backend=_compile_graph, fullgraph=True, dynamic=True)
            # Else a constant of a module is an input of the graph, which fails in backward passes of our own.
            settings = torch._dynamo.config.patch(specialize_float=True)
        try:
            with settings:
                outputs = run(network, inputs)
            self._calls[kind] = run
            return outputs
        except (TorchDynamoException, FailOnRecompileLimitHit) as error:
            cause = error.inner_exception if isinstance(error, BackendCompilerFailed) else error
            reason = (str(cause).strip() or type(cause).__name__).splitlines()[0]
        warnings.warn(f"{self.subject} cannot be compiled, and run uncompiled: {reason}", stacklevel=2)
        self.enabled = False
        # Nothing has run yet: a whole graph and its backward pass are compiled ahead of the first operation.
        return network(inputs)


def _call(network: Callable[..., Any], inputs: Any) -> Any:
    return network(inputs)


def _compile_graph(graph: Any, inputs: Any) -> Any:
    """Compile a graph and its backward pass, which draw the random numbers that they do uncompiled."""
    import torch._functorch.config
    import torch._inductor.config

    at_once = torch._functorch.config.patch(force_non_lazy_backward_lowering=True)
    with at_once, torch._inductor.config.patch(fallback_random=True):
        compiled = torch._dynamo.lookup_backend(BACKEND)(graph, inputs)
    Compiled.total += 1
    return compiled
