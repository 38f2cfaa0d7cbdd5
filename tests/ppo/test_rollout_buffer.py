"""Storage of a rollout: minibatches of whole environments, or of shorter sequences with their recurrent states."""

import pytest
import torch

from esper_lightning.ppo.collector import RolloutCollector
from esper_lightning.ppo.losses import PPOConfig
from tests.cue import CueMemory
from tests.ppo.loops import cue_loop, play
from tests.runs import differences


@pytest.mark.parametrize("parts", [1, 2, 3, 5])
def test_the_minibatches_of_an_epoch_hold_every_environment_once(parts: int) -> None:
    play(loop := cue_loop(CueMemory(5, 6)))
    rollout = loop.finish()[0]
    marked = rollout._replace(steps=rollout.steps._replace(log_prob=torch.arange(5.0).expand(6, 5)))
    minibatches = list(marked.minibatches(epochs=3, groups=parts, generator=torch.Generator().manual_seed(0)))

    assert len(minibatches) == 3 * parts
    assert all(minibatch.steps.log_prob.shape[0] == 6 for minibatch in minibatches), "sequences stay whole"
    groups_met = [[int(i) for i in minibatch.steps.log_prob[0]] for minibatch in minibatches]
    met = [groups_met[i : i + parts] for i in range(0, 3 * parts, parts)]
    for groups in met:
        assert len(groups) == parts
        assert max(map(len, groups)) - min(map(len, groups)) <= 1
        assert sorted(env for group in groups for env in group) == [0, 1, 2, 3, 4]
    assert met[0] != met[1] or met[1] != met[2], "every epoch has its own order"


# Sequences

TICKS, ENVS = 12, 3


def memory_loop(sequence: int | None) -> RolloutCollector:
    return cue_loop(CueMemory(ENVS, TICKS, delay=5), PPOConfig(sequence=sequence))


def test_the_gradient_ends_where_a_sequence_begins() -> None:
    def reach(sequence: int | None) -> torch.Tensor:
        loop = memory_loop(sequence)
        play(loop)
        rollout, _ = loop.finish()
        features = rollout.steps.observation.features.requires_grad_()
        values = loop.policy(rollout.steps.observation, rollout.state, rollout.steps.masks, rollout.steps.starts)[1]
        values[-1, -1].backward()  # the last step of the last environment
        return features.grad[:, -1].abs().sum(-1) > 0

    assert reach(None).tolist() == [False] * 7 + [True] * 5, "back to where its game began"
    assert reach(3).tolist() == [True] * 3


@pytest.mark.parametrize("ticks", [0, 3, 4, 9, 12])
def test_a_rollout_that_is_saved_at_any_tick_continues_with_the_same_sequences(ticks: int) -> None:
    loop, other = memory_loop(4), memory_loop(4)
    play(loop, ticks) if ticks else loop.reset()
    other.reset()
    for _ in range(ticks):
        other.pool.step(loop.pool.space.zeros(ENVS, loop.pool.device))  # brings its environments to the same step
    saved = loop.state_dict()
    assert {"final_values", "sequence_states"} <= {*saved, *saved["buffer"]}

    other.load_state_dict(saved)

    assert differences(other.state_dict(), saved) == []
    if ticks < TICKS:
        other.pool.observation.features.copy_(loop.pool.observation.features)
        assert torch.equal(loop.step().action.indices, other.step().action.indices)


def test_environments_that_go_on_are_reset_once() -> None:
    loop = memory_loop(None)
    play(loop)
    at = loop.pool.step_counts.copy()
    remembered = loop.state.hidden.clone()
    loop.finish()

    loop.reset()

    assert (loop.pool.step_counts == at).all() and at.any(), "in the middle of a game"
    assert torch.equal(loop.buffer.state.hidden, remembered)
    assert loop.episode == 2 and not loop.starts.any()
