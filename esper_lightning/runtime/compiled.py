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
    """Runs functions of networks compiled; after a failure, of which one warning tells, as they are.

    Networks are arguments of the functions, so that networks of one structure share code, which is no part of them.
    `subject` names what is compiled. A copy, or what is loaded from a pickle, has compiled nothing.
    """

    total = 0  # graphs compiled in this process

    def __init__(self, subject: str) -> None:
        self.subject = subject
        self.failed = False
        self._functions: dict[Hashable, Callable[..., Any]] = {}  # that have run

    def __reduce__(self) -> tuple[type["Compiled"], tuple[str]]:
        return Compiled, (self.subject,)

    def has_code(self, function: Any, kind: Hashable) -> bool:
        """Return True if a call will not have to compile."""
        return self.failed or (function, kind) in self._functions

    def __call__(self, function: Any, *args: Any, kind: Hashable = None) -> Any:
        """Return `function(*args)`; networks of one `kind` share code. Until `has_code`, one thread may call."""
        if self.failed:
            return function(*args)
        # This takes seconds to import.
        from torch._dynamo.exc import BackendCompilerFailed, FailOnRecompileLimitHit, TorchDynamoException

        key, settings = (function, kind), nullcontext()
        if (run := self._functions.get(key)) is None:
            # Torch keeps at most 8 versions of a code object, and fails for a full graph beyond: each key has its own.
            own = FunctionType(function.__code__.replace(), function.__globals__)
            run = torch.compile(own, backend=_compile_graph, fullgraph=True, dynamic=True)
            # Else a constant of a module is an input of the graph, which fails in backward passes of our own.
            settings = torch._dynamo.config.patch(specialize_float=True)
        try:
            with settings:
                result = run(*args)
            self._functions[key] = run
            return result
        except (TorchDynamoException, FailOnRecompileLimitHit) as error:
            cause = error.inner_exception if isinstance(error, BackendCompilerFailed) else error
            reason = str(cause).strip().splitlines()[0]
        warnings.warn(f"{self.subject} cannot be compiled, and run uncompiled: {reason}", stacklevel=2)
        self.failed = True
        # Nothing has run yet: a whole graph and its backward pass are compiled ahead of the first operation.
        return function(*args)


def call(module: Callable[..., Any], inputs: Any) -> Any:
    """Return `module(inputs)`."""
    return module(inputs)


def _compile_graph(graph: Any, inputs: Any) -> Any:
    """Compile a graph and its backward pass, which draw the random numbers that they do uncompiled."""
    import torch._functorch.config
    import torch._inductor.config

    at_once = torch._functorch.config.patch(force_non_lazy_backward_lowering=True)
    with at_once, torch._inductor.config.patch(fallback_random=True):
        compiled = torch._dynamo.lookup_backend(BACKEND)(graph, inputs)
    Compiled.total += 1
    return compiled
