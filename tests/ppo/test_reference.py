"""GAE, ratio, masks, resets and the loss against an independent float64 reference that goes step by step."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from esper_lightning.envs.vector_env import VectorStep
from esper_lightning.ppo.collector import RolloutCollector
from esper_lightning.ppo.losses import CLIP, PPOConfig, ppo_terms
from esper_lightning.ppo.rollout_buffer import Rollout
from esper_lightning.ppo.running_norm import RunningMeanStd
from tests.cue import COLUMNS, CUE, ROWS, CueMemory
from tests.ppo import reference
from tests.ppo.loops import cue_loop, play, total
from tests.ppo.reference import ReferenceEvaluation, ReferenceRollout

TICKS, ENVS = 12, 3
LIMITS = np.array([2, 99, 4])
"""Step limits for games of 5 steps: always truncated, never truncated, truncated before the answer."""

CONFIG = PPOConfig(gamma=0.9, gae_lambda=0.8, value_clip=0.1)
TIGHT = {"rtol": 1e-4, "atol": 2e-5}
"""Tolerances for float32 against float64."""


def make_loop(config: PPOConfig = CONFIG, **policy: Any) -> RolloutCollector:
    return cue_loop(CueMemory(ENVS, TICKS, delay=3, time_limit=LIMITS), config, noise=0.3, **policy)


Played = tuple[Rollout, list[ReferenceRollout], list[reference.State]]


def play_first(loop: RolloutCollector) -> None:
    play(loop)
    loop.finish()


def play_twice(loop: RolloutCollector) -> Played:
    play_first(loop)
    return play_second(loop)


def play_second(loop: RolloutCollector) -> Played:
    """Collect a rollout that begins within games. Returns it in the forms of PPO and of the reference."""
    loop.reset()
    known = [(part * ~loop.starts[:, None]).double().numpy() for part in loop.state]
    before = list(zip(*known, strict=True))
    seen, hidden, possible, steps = [], [], [], []
    for _ in range(TICKS):
        look(loop, seen, hidden)
        possible.append(loop.pool.masks.possible.numpy().copy())
        steps.append(loop.step())
    look(loop, seen, hidden)
    played = [one_of(loop, n, np.stack(seen), np.stack(hidden), np.stack(possible), steps) for n in range(ENVS)]
    return loop.finish()[0], played, before


def normalised(norm: RunningMeanStd, x: Tensor) -> np.ndarray:
    mean, var = norm.mean.double().numpy(), norm.var.double().numpy()
    return np.clip((x.double().numpy() - mean) / np.sqrt(np.where(var > 1e-8, var, 1.0)), -10.0, 10.0)


def look(loop: RolloutCollector, seen: list[np.ndarray], hidden: list[np.ndarray]) -> None:
    seen.append(normalised(loop.observation_norm, loop.pool.observation.features))
    hidden.append(normalised(loop.privileged_norm or RunningMeanStd((CUE,)), loop.pool.privileged))


def one_of(
    loop: RolloutCollector, n: int, seen: np.ndarray, hidden: np.ndarray, possible: np.ndarray, steps: list[VectorStep]
) -> ReferenceRollout:
    asymmetric = loop.policy.asymmetric
    final = {
        t: (
            normalised(loop.observation_norm, step.final[0].features)[n],
            normalised(loop.privileged_norm, step.final[1])[n] if asymmetric else np.zeros(0),
        )
        for t, step in enumerate(steps)
        if step.truncated[n]
    }
    return ReferenceRollout(
        features=seen[:, n],
        privileged=hidden[:, n] if asymmetric else np.zeros((TICKS + 1, 0)),
        possible=possible[:, n],
        actions=np.stack([step.action.indices[n].numpy() for step in steps]),
        rewards=np.array([float(step.reward[n]) for step in steps]),
        terminated=np.array([bool(step.terminated[n]) for step in steps]),
        truncated=np.array([bool(step.truncated[n]) for step in steps]),
        final=final,
    )


def judged(
    loop: RolloutCollector, played: list[ReferenceRollout], before: list[reference.State]
) -> list[ReferenceEvaluation]:
    policy = reference.Policy(loop.policy.state_dict(), ROWS + 1, COLUMNS + 1)
    return [reference.evaluate(policy, one, state) for one, state in zip(played, before, strict=True)]


def columns(rows: list[np.ndarray]) -> np.ndarray:  # N times [T, …] -> [T, N, …]
    return np.stack(rows, 1)


def close(ours: Tensor, reference: np.ndarray) -> None:
    torch.testing.assert_close(ours.detach().double(), torch.from_numpy(np.asarray(reference)), **TIGHT)


KINDS = pytest.mark.parametrize("kind", [{}, {"memory": "none"}, {"asymmetric": True}], ids=str)


@KINDS
@pytest.mark.parametrize("sequence", [None, 4])
def test_log_probabilities_values_and_gae_are_those_of_the_reference(
    kind: dict[str, Any], sequence: int | None
) -> None:
    """F11: the last return is reward + V(s_T). For any resets, truncations and masks; targets as the returns so far."""
    loop = make_loop(PPOConfig(gamma=0.9, gae_lambda=0.8, sequence=sequence), **kind)
    play_first(loop)
    mean, deviation = loop.value_norm.mean.double().item(), loop.value_norm.deviation.double().item()
    rollout, played, before = play_second(loop)
    buffer, judgements = loop.buffer, judged(loop, played, before)

    assert buffer.steps.truncated.any(0).tolist() == [True, False, True] and buffer.steps.terminated.any(0)[1]
    close(buffer.steps.log_prob, columns([one.log_probs for one in judgements]))
    close(buffer.steps.values, columns([one.values for one in judgements]))
    raw = [
        reference.advantages(
            game.rewards,
            mean + deviation * its.values,
            np.where(game.terminated, 0.0, mean + deviation * its.final_values),
            game.terminated | game.truncated,
            gamma=0.9,
            lam=0.8,
        )
        for game, its in zip(played, judgements, strict=True)
    ]
    table, free = columns(raw), ~buffer.steps.masks.forced.numpy()
    expected = (table - table[free].mean()) / table[free].std()
    returns = table + mean + deviation * columns([one.values for one in judgements])
    if sequence is not None:  # three sequences of four steps for each environment
        expected, returns = (np.concatenate(np.split(part, TICKS // sequence), 1) for part in (expected, returns))
    close(rollout.advantages, expected)
    close(loop.value_norm.inverse(rollout.targets), returns)


@KINDS
@pytest.mark.parametrize("sequence", [None, 3, 1])
def test_the_ratio_is_1_before_any_update(kind: dict[str, Any], sequence: int | None) -> None:
    """F3: the buffer holds the normalised observation that the policy acted upon, and its recurrent state."""
    loop = make_loop(PPOConfig(sequence=sequence), **kind)
    rollout, _, _ = play_twice(loop)

    assert rollout.steps.log_prob.shape == (sequence or TICKS, ENVS * TICKS // (sequence or TICKS))
    for minibatch in rollout.minibatches(1, 2, loop.generator):
        assert ppo_terms(loop.policy, minibatch, CONFIG).ratio_error < 1e-5
    assert (rollout.steps.log_prob < -0.1).any(), "there was something to choose"


def reference_terms(rollout: Rollout, now: list[ReferenceEvaluation]) -> dict[str, float]:
    """Return the PPO terms by definition, for a policy that has changed since the rollout."""
    free = ~rollout.steps.masks.forced.numpy()
    log_ratio = columns([one.log_probs for one in now]) - rollout.steps.log_prob.double().numpy()
    ratio, gain = np.exp(log_ratio), rollout.advantages.double().numpy()
    surrogate = -np.minimum(ratio * gain, np.clip(ratio, 1 - CLIP, 1 + CLIP) * gain)
    old, target = rollout.steps.values.double().numpy(), rollout.targets.double().numpy()
    value = columns([one.values for one in now])
    limited = old + np.clip(value - old, -CONFIG.value_clip, CONFIG.value_clip)
    error = 0.5 * np.maximum((value - target) ** 2, (limited - target) ** 2)
    entropy = columns([one.entropies for one in now])[free]
    choices = columns([one.choices for one in now])[free]
    terms = {
        "policy": surrogate[free].mean(),
        "value": error.mean(),
        "entropy": entropy.sum(-1).mean(),
        "kl": (ratio - 1.0 - np.log(ratio))[free].mean(),
        "kl_k1": -log_ratio[free].mean(),
        "ratio_low": ratio.min(),  # that of a forced action is 1
        "ratio_high": ratio.max(),
        "ratio_error": np.abs(ratio - 1.0)[free].max(),
        "clip_fraction": (np.abs(ratio - 1.0) > CLIP)[free].mean(),
        "head_entropy": entropy.sum(0) / choices.sum(0),
        "head_choice_share": choices.mean(0),
    }
    return terms | {"total": terms["policy"] + 0.5 * terms["value"] - 0.1 * terms["entropy"]}


@KINDS
def test_the_loss_and_its_gradient_are_those_of_the_reference(kind: dict[str, Any]) -> None:
    """F12: the clips of ratio and value, which is off by default, have ranges of their own.

    The policy has moved far enough for both; the gradient is checked by finite differences.
    """
    assert PPOConfig().value_clip is None
    loop = make_loop(**kind)
    rollout, played, before = play_twice(loop)
    parameters = dict(loop.policy.named_parameters())
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.add_(0.3 * torch.randn_like(parameter))

    def expected() -> dict[str, float]:
        return reference_terms(rollout, judged(loop, played, before))

    terms = ppo_terms(loop.policy, rollout, CONFIG)
    loss = total(terms)
    loss.backward()
    theirs = expected()

    for name in theirs.keys() - {"total"}:
        assert getattr(terms, name).tolist() == pytest.approx(theirs[name], rel=1e-4, abs=1e-6), name
    assert loss.item() == pytest.approx(theirs["total"], rel=1e-4)
    assert theirs["clip_fraction"] > 0.0
    policy = loop.policy.double()
    for name in (
        "encoder.weight",
        "heads.tables.column.layers.0.weight",
        "heads.tables.row.layers.2.weight",
        "value.0.weight",
    ):
        weight, at = parameters[name], (1, 0)
        ours = weight.grad[at].item()
        with torch.no_grad():
            weight[at] += 1e-6
            above = expected()["total"]
            weight[at] -= 2e-6
            below = expected()["total"]
            weight[at] += 1e-6
        assert ours == pytest.approx((above - below) / 2e-6, rel=1e-3, abs=1e-6), name
    assert policy is loop.policy


def test_what_the_critic_alone_sees_is_normalised_by_all_that_it_saw() -> None:
    loop = make_loop(asymmetric=True)
    norm, raw = loop.privileged_norm, []
    loop.reset()
    for _ in range(TICKS):
        raw.append(loop.pool.privileged.clone())
        loop.step()
        assert norm.count == 0, "within a rollout nothing changes"
    loop.finish()

    assert norm.count == TICKS * ENVS
    torch.testing.assert_close(norm.mean, torch.stack(raw).mean((0, 1)))
    torch.testing.assert_close(norm.var, torch.stack(raw).flatten(0, 1).var(0, correction=0))


def test_rewards_are_divided_by_the_deviation_of_their_discounted_sum_so_far() -> None:
    """Episodes continue from one rollout in the next, and so do their sums; no mean is subtracted."""
    ours, by_hand, seen = make_loop(), make_loop(), []
    ours.reward_norm = RunningMeanStd(())
    for number in range(3):
        for loop in (ours, by_hand):
            play(loop)
        rewards = 2.0 + 30.0 * torch.rand(TICKS, ENVS, generator=torch.Generator().manual_seed(number))
        ended = ours.buffer.steps.terminated | ours.buffer.steps.truncated
        seen.append((rewards.double().numpy(), ended.numpy().copy()))
        expected = reference.reward_deviations(seen, CONFIG.gamma)[-1]
        ours.buffer.steps.rewards.copy_(rewards)
        by_hand.buffer.steps.rewards.copy_(rewards / expected)
        (rollout, summary), (theirs, divided) = ours.finish(), by_hand.finish()

        assert summary.metrics["reward_deviation"] == pytest.approx(expected, rel=1e-5)
        torch.testing.assert_close(rollout.advantages, theirs.advantages, **TIGHT)
        targets = (loop.value_norm.inverse(made.targets) for loop, made in ((ours, rollout), (by_hand, theirs)))
        torch.testing.assert_close(*targets, **TIGHT)
        assert torch.equal(summary.returns, rewards.sum(0)), "as they were paid"
        # In the units of the return.
        for name in ("values", "value_targets"):
            torch.testing.assert_close(getattr(summary, name), getattr(divided, name) * expected, rtol=1e-4, atol=1e-3)
        spread = divided.metrics["advantage_spread"] * expected
        assert summary.metrics["advantage_spread"] == pytest.approx(spread, rel=1e-4)
    assert not seen[0][1][-1].all(), "an episode goes on"
