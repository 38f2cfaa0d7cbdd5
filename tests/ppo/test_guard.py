"""Numbers that are not finite, at every place of a rollout and of an update."""

import math
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adam

from esper_lightning.envs.vector_env import ChoiceAction, VectorStep
from esper_lightning.module import skip_unless
from esper_lightning.ppo.collector import RolloutCollector
from esper_lightning.ppo.losses import PPOConfig, ppo_terms
from esper_lightning.ppo.running_norm import RunningMeanStd
from esper_lightning.runtime.checkpoint import DivergedError
from tests.cue import CueMemory
from tests.ppo.loops import cue_loop, total
from tests.runs import differences

STEPS, ENVS = 10, 3


class BrokenCue(CueMemory):
    """Memory games in which a number at `place` and step `at` is replaced, in environment 1 or in all of them."""

    def __init__(self, place: str, at: int, value: float, *, everywhere: bool = False, horizon: int = STEPS) -> None:
        self.place, self.at, self.value, self.steps = place, at, value, 0
        self.broken = slice(None) if everywhere else slice(1, 2)
        super().__init__(ENVS, horizon, delay=2, time_limit=2)

    def step(self, action: ChoiceAction) -> VectorStep:
        step = super().step(action)
        terms = {}
        if self.steps == self.at and self.place == "reward":
            step.reward[self.broken] = self.value
            terms = {"right": torch.zeros(ENVS), "wrong": step.reward.double()}
        if self.steps == self.at and self.place == "final feature" and step.final is not None:
            step.final[0].features[self.broken] = self.value
        self.steps += 1
        return step._replace(terms=terms)

    def _update_observation(self) -> None:
        super()._update_observation()
        if self.steps + 1 == self.at and self.place == "feature":
            self.observation.features[self.broken, 2] = self.value
        if self.steps + 1 == self.at and self.place == "privileged feature":
            self.privileged[self.broken, 2] = self.value


def collector_of(pool: CueMemory, **ppo: int) -> RolloutCollector:
    return cue_loop(pool, PPOConfig(**ppo), asymmetric=True)


def play_broken(collector: RolloutCollector) -> None:
    """Play one rollout; where the place is `state`, the recurrent state is replaced before its step."""
    collector.reset()
    for _ in range(STEPS):
        if collector.pool.place == "state" and collector.pool.steps == collector.pool.at:
            collector.state.cell[1] = collector.pool.value
        collector.step()


@pytest.mark.parametrize(
    ("place", "at", "value", "left_out"),
    [
        ("reward", 0, math.nan, True),
        ("reward", 4, 1e38, True),
        ("reward", 9, -math.inf, True),
        ("feature", 0, math.nan, False),  # the first observation was made before it could be replaced
        ("feature", 3, math.nan, True),
        ("feature", 5, 1e38, True),
        ("privileged feature", 7, math.inf, True),
        ("final feature", 1, math.nan, True),
        ("final feature", 1, math.inf, False),  # clipped
        ("final feature", 2, math.nan, False),  # read at every second step
        ("state", 6, math.nan, True),
        ("state", 6, -math.inf, True),
        ("state", 9, math.inf, False),  # an infinite cell has a finite output until the episode ends
    ],
)
def test_a_rollout_with_a_number_that_is_none_is_learned_from_without_its_environment(
    place: str, at: int, value: float, left_out: bool
) -> None:
    collector = collector_of(BrokenCue(place, at, value))
    play_broken(collector)
    features = collector.raw_features.clone()
    rollout, summary = collector.finish()

    norms = (collector.observation_norm, collector.privileged_norm, collector.value_norm)
    assert all(part.isfinite().all() for norm in norms for part in norm.state_dict().values())
    (learned,) = rollout.minibatches(1, 1, collector.generator, usable=summary.usable)
    loss = total(ppo_terms(collector.policy, learned, PPOConfig()))
    gradients = torch.autograd.grad(loss, list(collector.policy.parameters()), allow_unused=True)
    assert all(gradient is None or gradient.isfinite().all() for gradient in gradients)
    assert summary.metrics["left_out"] == left_out
    if left_out:
        assert summary.defect.startswith("in environment 1 at step "), summary.defect
        assert len(summary.returns) == ENVS - 1
        assert collector.value_norm.count == STEPS * (ENVS - 1)
        good = torch.tensor([0, 2])
        expected = RunningMeanStd(features.shape[2:])
        expected.update(features[:, good])
        assert differences(collector.observation_norm.state_dict(), expected.state_dict()) == []
        expected = collector.buffer.steps.log_prob[:, good].sum()
        assert learned.steps.log_prob.sum().item() == pytest.approx(expected.item(), rel=1e-5)
        groups = rollout.minibatches(1, 3, collector.generator, usable=summary.usable)
        assert [len(minibatch.steps.log_prob[0]) for minibatch in groups] == [1, 1]
    play_broken(collector)  # the next rollout has all environments again
    assert collector.finish()[1].metrics["left_out"] == 0


def test_a_rollout_without_any_usable_environment_ends_the_run_and_changes_no_statistics() -> None:
    collector = collector_of(BrokenCue("reward", 4, 1e38, everywhere=True))
    play_broken(collector)
    before = deepcopy(collector.value_norm.state_dict()), deepcopy(collector.observation_norm.state_dict())

    with pytest.raises(DivergedError, match=r"in environment 0 at step 5 the reward term wrong is 1e\+38; for"):
        collector.finish()

    assert differences((collector.value_norm.state_dict(), collector.observation_norm.state_dict()), before) == []


@pytest.mark.parametrize("fused", [None, True])
def test_a_skipped_step_changes_neither_weights_nor_moments_nor_step_counts(fused: bool | None) -> None:
    """Whatever is in between, weights and moments are those of an optimizer that never met the skipped steps."""
    gradients = torch.randn(10, 4, generator=torch.Generator().manual_seed(0))
    skipped = {1, 2, 5, 9}

    def optimize(steps: list[int], guarded: bool) -> tuple[Tensor, dict[str, Tensor]]:
        weight = nn.Parameter(torch.ones(4))
        optimizer = Adam([weight], lr=0.1, fused=fused)
        for step in steps:
            weight.grad = gradients[step] * (math.nan if step in skipped else 1.0)
            if guarded:
                skip_unless(weight.grad.norm().isfinite(), optimizer)
            optimizer.step()
        return weight.detach(), optimizer.state[weight]

    met = optimize(list(range(10)), guarded=True)
    assert differences(met, optimize([step for step in range(10) if step not in skipped], guarded=False)) == []
    assert met[1]["step"] == 6
