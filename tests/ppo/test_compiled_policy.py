"""A policy that runs through torch.compile acts and learns as one that does not."""

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from esper_lightning.ppo.collector import RolloutCollector
from esper_lightning.ppo.losses import PPOConfig, ppo_terms
from esper_lightning.runtime import compiled
from tests.cue import CueMemory
from tests.ppo.loops import cue_loop, total
from tests.runs import fit, only_run


def learned(loop: RolloutCollector, config: PPOConfig) -> list[torch.Tensor]:
    """Return the loss of two minibatches of a rollout, and the gradients of the second."""
    losses = []
    loop.reset()
    for _ in range(loop.buffer.ticks):
        loop.step()
    rollout, summary = loop.finish()
    for minibatch in rollout.minibatches(1, 2, loop.generator, usable=summary.usable, ranks=loop.ranks):
        loop.policy.zero_grad()
        loss = total(ppo_terms(loop.policy, minibatch, config))
        loss.backward()
        losses.append(loss.detach())
    return losses + [p.grad for p in loop.policy.parameters() if p.grad is not None]


@pytest.mark.parametrize(
    ("backend", "hosts"),
    [("eager", False), pytest.param("aot_eager", True, marks=pytest.mark.slow)],
)
def test_a_compiled_policy_acts_and_learns_alike(
    monkeypatch: pytest.MonkeyPatch, make_loop: Callable[..., RolloutCollector], backend: str, hosts: bool
) -> None:
    monkeypatch.setattr(compiled, "BACKEND", backend)
    warnings.filterwarnings("error", message="the policy cannot be compiled")  # pytest resets the filters
    config, results = PPOConfig(minibatches=2), []
    for enabled in (False, True):
        loop = make_loop(4, minibatches=2) if hosts else cue_loop(CueMemory(4, 8, delay=2), config, asymmetric=True)
        loop.policy.compiled.enabled = enabled
        results.append(learned(loop, config))

    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.slow
def test_a_compiled_run_resumes_and_counts_its_graphs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    warnings.filterwarnings("error", message=".* cannot be compiled")
    flags = ("--model.ppo.compile=true", "--data.env.training.compile=true", "--data.env.horizon=2")
    fit(tmp_path, *flags, "--trainer.max_epochs=1")
    fit(tmp_path, *flags, "--trainer.max_epochs=2", "--ckpt_path=last")

    numbers = [number for _, number in only_run(tmp_path).scalars()["compile/recompilations"]]
    assert len(numbers) == 2 and min(numbers) > 4, "a resumed run compiles its own"
