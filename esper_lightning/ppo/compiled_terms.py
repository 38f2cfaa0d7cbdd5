"""Compilation of the loss of the PPO update."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from esper_lightning.errors import is_out_of_memory
from esper_lightning.ppo.losses import PPOConfig, PPOTerms, ppo_terms_of_hidden
from esper_lightning.ppo.rollout_buffer import Rollout
from esper_lightning.tamiyo.policy import Policy


class CompiledTerms:
    """`ppo_terms` with action heads, critic and loss compiled by torch.compile, once for all sizes of minibatches.

    The layers up to the LSTM run uncompiled, since torch does not compile an LSTM.

    Args:
        backend: Backend of torch.compile.

    Raises ValueError if there is no such backend, or if the compilation fails at the first call.
    """

    def __init__(self, backend: str) -> None:
        # The table of relevant heads is constant: it makes no difference that each graph has a copy of its own.
        warnings.filterwarnings("ignore", "Dynamo detected a call to a `functools.lru_cache`")
        with _errors_in_one_line():
            self._compiled = torch.compile(ppo_terms_of_hidden, backend=backend, dynamic=True, fullgraph=True)

    def __call__(self, policy: Policy, rollout: Rollout, config: PPOConfig) -> PPOTerms:
        """Return what `ppo_terms` returns, apart from rounding."""
        hidden, _ = policy.encode(rollout.observation, rollout.state, rollout.starts)
        with _errors_in_one_line():
            return self._compiled(policy, hidden, rollout, config)


@contextmanager
def _errors_in_one_line() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # the closest public base class of the errors of torch.compile
        if is_out_of_memory(error):
            raise
        reason = " ".join(str(error).partition("\n\n")[0].split()).rstrip(".")
        raise ValueError(f"ppo.compile: {reason}; mend that, or leave ppo.compile out") from error
