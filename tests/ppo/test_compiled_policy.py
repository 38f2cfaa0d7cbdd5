"""A policy that runs through torch.compile acts and learns as one that does not."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from esper_lightning.ppo.collector import RolloutCollector
from esper_lightning.ppo.losses import PPOConfig, ppo_terms
from esper_lightning.runtime import compiled
from esper_lightning.runtime.compiled import Compiled
from tests.cue import CueMemory
from tests.ppo.loops import cue_loop, total
from tests.runs import TINY, fit, load, measured, only_run


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
    config, results = PPOConfig(minibatches=2), []
    for run in (None, Compiled("the policy")):
        loop = make_loop(4, minibatches=2) if hosts else cue_loop(CueMemory(4, 8, delay=2), config, asymmetric=True)
        loop.policy.compiled = run
        results.append(learned(loop, config))

    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)
    assert run is not None and not run.failed


@pytest.mark.slow
def test_a_compiled_run_is_the_uncompiled_one_and_counts_what_was_compiled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    runs: dict[str, Any] = {}
    for name in ("false", "true"):
        fit(tmp_path / name, *TINY, f"--model.ppo.compile={name}", f"--data.env.training.compile={name}")
        runs[name] = only_run(tmp_path / name)

    counted = measured(runs["true"])
    numbers = [number for _, number in counted.pop("compile/recompilations")]
    assert len(numbers) == 3 and numbers[0] > 4 and min(numbers) >= 0
    assert counted.keys() == measured(runs["false"]).keys()
    saved, plain = load(runs["true"].last), load(runs["false"].last)
    assert saved["state_dict"].keys() == plain["state_dict"].keys()
    for key, weights in plain["state_dict"].items():
        torch.testing.assert_close(saved["state_dict"][key], weights)
