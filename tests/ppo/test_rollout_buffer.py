from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from esper_lightning.envs import Masks, Op
from esper_lightning.envs.spaces.masks import op_frequency
from esper_lightning.ppo.collector import RolloutCollector
from esper_lightning.ppo.rollout_buffer import Experience, Rollout, RolloutBuffer


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


def empty_buffer(loop: RolloutCollector) -> RolloutBuffer:
    return RolloutBuffer(loop.pool, loop.policy)


def frequency(buffer: RolloutBuffer) -> dict[str, float]:
    ticks = slice(buffer.length)
    return op_frequency(buffer.action.op[ticks], Masks(*(part[ticks] for part in buffer.masks)))


def tensors(buffer: RolloutBuffer) -> list[Tensor]:
    """Return all tensors stored so far."""
    b, n = buffer, buffer.length
    stored = (*b.observation, *b.masks, *b.action, b.log_prob, b.values, b.rewards, b.terminated, b.truncated, b.starts)
    return [t[:n] for t in stored] + list(b.state)


def step_of(source: RolloutBuffer, t: int) -> Experience:
    """Return one stored step."""

    def row(field: Any) -> Any:
        return field[t] if isinstance(field, Tensor) else type(field)(*(part[t] for part in field))

    stored = set(Experience._fields) - {"state", "privileged"}
    return Experience(**{name: row(getattr(source, name)) for name in stored}, state=source.state)


def refill(buffer: RolloutBuffer, source: RolloutBuffer, ticks: int) -> None:
    """Store the first `ticks` steps of `source` again."""
    buffer.clear(source.state)
    for t in range(ticks):
        buffer.add(step_of(source, t))


@pytest.mark.parametrize("ticks", [0, 1, 4, 6])
def test_a_buffer_that_is_saved_in_mid_rollout_is_the_same_when_loaded(loop: RolloutCollector, ticks: int) -> None:
    buffer, other = empty_buffer(loop), empty_buffer(loop)
    refill(buffer, loop.buffer, ticks)
    refill(other, loop.buffer, 3)  # it held other data before

    state = buffer.state_dict()
    other.load_state_dict(state)

    assert other.length == ticks
    assert all(torch.equal(a, b) for a, b in zip(tensors(buffer), tensors(other), strict=True))


def test_a_saved_buffer_does_not_change_when_the_rollout_goes_on(loop: RolloutCollector) -> None:
    buffer = empty_buffer(loop)
    refill(buffer, loop.buffer, 2)
    state = buffer.state_dict()
    before = [t.clone() for t in state["ticks"] + state["state"]]

    refill(buffer, loop.buffer, 6)
    buffer.rewards.fill_(9.0)
    buffer.state.hidden.fill_(9.0)

    assert all(torch.equal(a, b) for a, b in zip(before, state["ticks"] + state["state"], strict=True))


def test_a_full_rollout_buffer_asserts(loop: RolloutCollector) -> None:
    buffer, full = empty_buffer(loop), loop.buffer
    refill(buffer, full, full.ticks)

    with pytest.raises(AssertionError, match="the rollout is full"):
        buffer.add(step_of(full, 0))


@pytest.mark.parametrize("parts", [1, 2, 3, 5])
def test_the_minibatches_of_an_epoch_hold_every_environment_once(rollout: Rollout, parts: int) -> None:
    marked = rollout._replace(log_prob=torch.arange(5.0).expand(6, 5))
    minibatches = list(marked.minibatches(epochs=3, parts=parts, generator=torch.Generator().manual_seed(0)))

    assert len(minibatches) == 3 * parts
    assert all(minibatch.log_prob.shape[0] == 6 for minibatch in minibatches), "sequences stay whole"
    groups_met = [[int(i) for i in minibatch.log_prob[0]] for minibatch in minibatches]
    met = [groups_met[i : i + parts] for i in range(0, 3 * parts, parts)]
    for groups in met:
        assert len(groups) == parts
        assert max(map(len, groups)) - min(map(len, groups)) <= 1
        assert sorted(env for group in groups for env in group) == [0, 1, 2, 3, 4]
    assert met[0] != met[1] or met[1] != met[2], "every epoch has its own order"


def test_minibatches_are_reproducible(rollout: Rollout) -> None:
    def order(seed: int) -> list[Tensor]:
        return [m.log_prob for m in rollout.minibatches(2, 2, torch.Generator().manual_seed(seed))]

    assert all(torch.equal(a, b) for a, b in zip(order(1), order(1), strict=True))


def test_the_sequences_of_some_environments_are_those_columns_of_everything(rollout: Rollout) -> None:
    some = rollout._replace(
        state=type(rollout.state)(torch.arange(5.0)[:, None], 10 + torch.arange(5.0)[:, None])
    ).select_envs(torch.tensor([3, 0]))

    assert torch.equal(some.observation.features, rollout.observation.features[:, [3, 0]])
    assert torch.equal(some.observation.blueprints, rollout.observation.blueprints[:, [3, 0]])
    for ours, theirs in zip((*some.masks, *some.action), (*rollout.masks, *rollout.action), strict=True):
        assert torch.equal(ours, theirs[:, [3, 0]])
    for name in ("log_prob", "values", "starts", "advantages", "targets"):
        assert torch.equal(getattr(some, name), getattr(rollout, name)[:, [3, 0]])
    # The recurrent state has no time axis.
    assert (some.state.hidden.flatten().tolist(), some.state.cell.flatten().tolist()) == ([3.0, 0.0], [13.0, 10.0])


def test_op_frequencies_are_shares_of_the_free_decisions(loop: RolloutCollector) -> None:
    buffer = empty_buffer(loop)
    refill(buffer, loop.buffer, 4)
    buffer.action.op.fill_(Op.CULL)
    buffer.action.op[0] = torch.tensor([Op.WAIT, Op.GERMINATE, Op.GERMINATE, Op.FOSSILIZE, Op.WAIT])
    buffer.masks.slot.fill_(True)
    buffer.masks.slot[1:, :, 1:] = False  # from the second step on only WAIT is possible
    buffer.masks.slot[0, 4, 1:] = False

    assert frequency(buffer) == {"WAIT": 0.25, "GERMINATE": 0.5, "CULL": 0.0, "FOSSILIZE": 0.25}
    buffer.clear(buffer.state)
    assert set(frequency(buffer).values()) == {0.0}


def test_steps_after_an_end_are_no_decisions_and_are_saved_as_what_they_are(loop: RolloutCollector) -> None:
    buffer, other = empty_buffer(loop), empty_buffer(loop)
    refill(buffer, loop.buffer, 3)
    buffer.action.op.fill_(Op.GERMINATE)
    buffer.masks.slot.fill_(True)
    buffer.masks.ended[2, 3:] = True  # two of the environments have ended
    buffer.masks.slot[2, 3:, 1:] = False
    buffer.action.op[2, 3:] = Op.WAIT
    other.load_state_dict(buffer.state_dict())

    assert frequency(buffer)["WAIT"] == 0.0
    assert torch.equal(other.masks.ended[:3], buffer.masks.ended[:3])
    assert other.masks.ended.nonzero().tolist() == [[2, 3], [2, 4]]
