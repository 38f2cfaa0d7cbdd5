import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from esper_lightning.envs import Action, Observation, StepResult
from esper_lightning.rollout import EVALUATION, TRAINING, RolloutLoop, episode_seeds
from esper_lightning.tamiyo.policy import RecurrentState

MakeLoop = Callable[..., RolloutLoop]
Play = Callable[[RolloutLoop], None]


def test_seeds_of_training_and_of_evaluation_have_nothing_in_common() -> None:
    drawn = {
        purpose: {s for episode in range(20) for s in episode_seeds(3, purpose, episode, 50)}
        for purpose in (TRAINING, EVALUATION)
    }

    assert all(len(seeds) == 20 * 50 for seeds in drawn.values()), "no host is met twice"
    assert {seed % 2 for seed in drawn[TRAINING]} == {0}
    assert {seed % 2 for seed in drawn[EVALUATION]} == {1}
    for seed in drawn[TRAINING] | drawn[EVALUATION]:
        torch.Generator().manual_seed(seed)  # every one of them is a seed that torch accepts


def test_seeds_are_reproducible_and_differ_by_run_episode_and_host() -> None:
    seeds = episode_seeds(run_seed=0, purpose=TRAINING, episode=4, n_envs=8)

    assert seeds == episode_seeds(0, TRAINING, 4, 8)
    assert not set(seeds) & set(episode_seeds(1, TRAINING, 4, 8))
    assert not set(seeds) & set(episode_seeds(0, TRAINING, 5, 8))
    assert episode_seeds(0, TRAINING, 4, 3) == seeds[:3], "a host does not depend on how many others there are"


def test_the_buffer_holds_exactly_what_the_policy_saw_and_did(
    make_loop: MakeLoop, play_rollout: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = make_loop(2)
    play_rollout(loop)
    loop.finish_rollout()  # from now on observations are normalised by real statistics
    seen: list[list[Tensor]] = []
    done: list[list[Tensor]] = []
    decide, act = loop.policy.step, loop.pool.step

    def watched_step(observation: Observation, state: RecurrentState, masks: Any, starts: Tensor) -> Any:
        result = decide(observation, state, masks, starts)
        seen.append([part.clone() for part in (*observation, *masks, starts, result[1])])
        return result

    def watched_act(action: Action) -> StepResult:
        result = act(action)
        done.append([*action, result.reward, result.truncated])
        return result

    monkeypatch.setattr(loop.policy, "step", watched_step)
    monkeypatch.setattr(loop.pool, "step", watched_act)
    play_rollout(loop)

    buffer = loop.buffer
    for t in range(6):
        stored = (*buffer.observation, *buffer.masks, buffer.starts, buffer.values)
        assert all(torch.equal(ours[t], theirs) for ours, theirs in zip(stored, seen[t], strict=True))
        stored = (*buffer.action, buffer.rewards, buffer.truncated)
        assert all(torch.equal(ours[t], theirs) for ours, theirs in zip(stored, done[t], strict=True))
    assert buffer.observation.features.abs().max() > 1.5, "normalised: raw features are not that large"
    assert buffer.starts.tolist() == [[True] * 2] + [[False] * 2] * 5
    assert buffer.truncated.tolist() == [[False] * 2] * 5 + [[True] * 2]


def test_normalisers_change_at_the_end_of_a_rollout_and_never_within(make_loop: MakeLoop, play_rollout: Play) -> None:
    loop = make_loop(2)
    play_rollout(loop)
    loop.finish_rollout()

    def statistics() -> list[Tensor]:
        norms = (*loop.observation_norm.state_dict().values(), *loop.value_norm.state_dict().values())
        return [value.clone() for value in norms]

    before, raw = statistics(), []
    loop.begin_rollout()
    for _ in range(6):
        raw.append(loop.pool.observation.features.clone())
        loop.tick()
        assert all(torch.equal(a, b) for a, b in zip(before, statistics(), strict=True))

    stored = loop.buffer.observation.features.clone()
    rollout, _ = loop.finish_rollout()
    assert loop.observation_norm.count == loop.value_norm.count == 2 * 12
    assert torch.equal(rollout.observation.features, stored), "what was seen stays as it was seen"
    # The statistics take in raw features, also those of the rollout before.
    assert not torch.equal(loop.observation_norm.mean, before[0])
    torch.testing.assert_close(
        loop.observation_norm.mean, (before[0] + torch.stack(raw).mean((0, 1))) / 2, rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("ticks", [0, 2, 5, 6])
def test_a_rollout_that_is_saved_at_any_tick_continues_bit_for_bit(
    make_loop: MakeLoop, play_rollout: Play, ticks: int
) -> None:
    loop, other = make_loop(2), make_loop(2)
    other.run_seed = 8
    play_rollout(other)  # it was in the middle of something else
    loop.begin_rollout()
    for _ in range(ticks):
        loop.tick()

    torch.save({"loop": loop.state_dict(), "pool": loop.pool.state_dict()}, file := io.BytesIO())
    saved = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    other.load_state_dict(saved["loop"])
    other.pool.load_state_dict(saved["pool"])

    assert (other.episode, other.ticks, other.buffer.length) == (1, ticks, ticks)
    for _ in range(6 - ticks):
        ours, theirs = loop.tick(), other.tick()
        assert torch.equal(ours.reward, theirs.reward)
    (a, summary), (b, resumed) = loop.finish_rollout(), other.finish_rollout()
    for ours, theirs in zip(a, b, strict=True):
        pairs = [(ours, theirs)] if isinstance(ours, Tensor) else zip(ours, theirs, strict=True)
        assert all(torch.equal(*pair) for pair in pairs)
    assert torch.equal(summary.returns, resumed.returns)
    assert torch.equal(loop.observation_norm.mean, other.observation_norm.mean)
    assert torch.equal(loop.generator.get_state(), other.generator.get_state())


def test_a_run_is_reproducible_and_every_rollout_meets_other_hosts(make_loop: MakeLoop, play_rollout: Play) -> None:
    one, same = make_loop(2), make_loop(2)
    met = []
    for _ in range(2):
        for loop in (one, same):
            play_rollout(loop)
        assert torch.equal(one.buffer.rewards, same.buffer.rewards)
        met.append([env.seed for env in one.pool.envs])

    assert not set(met[0]) & set(met[1])
    assert one.ticks == 12 and one.episode == 2


def test_an_unfinished_rollout_is_our_own_mistake(make_loop: MakeLoop) -> None:
    loop = make_loop(1)
    loop.begin_rollout()
    loop.tick()

    with pytest.raises(AssertionError, match="not finished"):
        loop.finish_rollout()


def test_the_summary_is_of_undiscounted_rewards(make_loop: MakeLoop, play_rollout: Play) -> None:
    loop = make_loop(2, gamma=0.5)
    play_rollout(loop)
    end = loop.last.metrics.objective
    _, summary = loop.finish_rollout()
    loop.pool.reset([env.seed for env in loop.pool.envs])
    begin = torch.tensor([env.objective for env in loop.pool.envs])

    torch.testing.assert_close(summary.returns, end - begin, rtol=0, atol=1e-5)
