from collections.abc import Callable

import pytest
import torch

from esper_lightning.ppo.collector import RolloutCollector
from esper_lightning.ppo.rollout_buffer import Rollout
from esper_lightning.runtime.nested import iter_tensors


@pytest.fixture(scope="module")
def loop(
    make_loop: Callable[..., RolloutCollector], play_rollout: Callable[[RolloutCollector], None]
) -> RolloutCollector:
    made = make_loop(n_envs=5)
    play_rollout(made)
    return made


@pytest.fixture(scope="module")
def rollout(loop: RolloutCollector) -> Rollout:
    return loop.finish()[0]


@pytest.mark.parametrize("parts", [1, 2, 3, 5])
def test_the_minibatches_of_an_epoch_hold_every_environment_once(rollout: Rollout, parts: int) -> None:
    marked = rollout._replace(steps=rollout.steps._replace(log_prob=torch.arange(5.0).expand(6, 5)))
    minibatches = list(marked.minibatches(epochs=3, parts=parts, generator=torch.Generator().manual_seed(0)))

    assert len(minibatches) == 3 * parts
    assert all(minibatch.steps.log_prob.shape[0] == 6 for minibatch in minibatches), "sequences stay whole"
    groups_met = [[int(i) for i in minibatch.steps.log_prob[0]] for minibatch in minibatches]
    met = [groups_met[i : i + parts] for i in range(0, 3 * parts, parts)]
    for groups in met:
        assert len(groups) == parts
        assert max(map(len, groups)) - min(map(len, groups)) <= 1
        assert sorted(env for group in groups for env in group) == [0, 1, 2, 3, 4]
    assert met[0] != met[1] or met[1] != met[2], "every epoch has its own order"


def test_the_sequences_of_some_environments_are_those_columns_of_everything(rollout: Rollout) -> None:
    some = rollout._replace(
        state=type(rollout.state)(torch.arange(5.0)[:, None], 10 + torch.arange(5.0)[:, None])
    ).select_envs(torch.tensor([3, 0]))

    for ours, theirs in zip(iter_tensors(some[:3]), iter_tensors(rollout[:3]), strict=True):
        assert torch.equal(ours, theirs[:, [3, 0]])
    # The recurrent state has no time axis.
    assert (some.state.hidden.flatten().tolist(), some.state.cell.flatten().tolist()) == ([3.0, 0.0], [13.0, 10.0])


def test_a_rollout_in_flight_of_an_earlier_version_with_one_more_head_is_refused(loop: RolloutCollector) -> None:
    saved = loop.buffer.state_dict()
    saved["ticks"].append(saved["ticks"][-1])

    with pytest.raises(ValueError, match="its rollout in flight is of an earlier version"):
        loop.buffer.load_state_dict(saved)
