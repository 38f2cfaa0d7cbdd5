"""Contents of a rollout, its bootstrap values, and resumption from any saved step."""

import io
from collections.abc import Callable, Iterable, Iterator

import pytest
import torch
from torch import Tensor

from esper_lightning.envs import Action, Observation, StepResult
from esper_lightning.ppo.collector import RolloutCollector
from esper_lightning.ppo.losses import PPOConfig, ppo_terms
from tests.runs import differences

MakeLoop = Callable[..., RolloutCollector]
Play = Callable[[RolloutCollector], None]


def test_what_is_stored_is_what_was_seen(make_loop: MakeLoop, play_rollout: Play) -> None:
    """F3: the buffer holds the normalised observation that the policy acted upon; the first ratio is 1."""
    loop = make_loop(3)
    play_rollout(loop)
    loop.finish()  # from now on normalised and raw features differ
    loop.reset()
    for t in range(loop.buffer.ticks):
        raw = loop.pool.observation.features.clone()
        loop.step()
        assert torch.equal(loop.buffer.observation.features[t], loop.observation_norm(raw))
        assert not torch.equal(loop.buffer.observation.features[t], raw)
    rollout, _ = loop.finish()

    assert ppo_terms(loop.policy, rollout, PPOConfig()).ratio_error < 1e-5


def storage(tensors: Iterable[Tensor]) -> list[int]:
    """Return the memory addresses of tensors."""
    return [tensor.data_ptr() for tensor in tensors]


def same(ours: Iterable[Tensor], theirs: Iterable[Tensor]) -> bool:
    """Return whether these are the same tensors in the same memory."""
    return all(a is b and a.data_ptr() == b.data_ptr() for a, b in zip(ours, theirs, strict=True))


def test_what_is_filled_every_tick_is_allocated_once(
    make_loop: Callable[..., RolloutCollector], play_rollout: Callable[[RolloutCollector], None]
) -> None:
    """S4: observation, masks and the rollout's storage are the same memory, rollout after rollout."""
    loop = make_loop(2)

    def tensors() -> Iterator[Tensor]:
        yield from (*loop.pool.observation, *loop.pool.masks, loop.raw_features, loop.starts)
        buffer = loop.buffer
        yield from (*buffer.observation, *buffer.masks, *buffer.action, *buffer.state, buffer.log_prob, buffer.values)
        yield from (buffer.rewards, buffer.terminated, buffer.truncated, buffer.starts)

    before = list(tensors())
    pointers = storage(before)
    for _ in range(2):
        play_rollout(loop)
        loop.finish()
        assert same(tensors(), before)
        assert storage(before) == pointers
    assert len(set(pointers)) == len(pointers)


def test_a_rollout_resumes_at_every_tick(make_loop: MakeLoop) -> None:
    """F6: a loop that was elsewhere goes on bit for bit from what another one saved, at every tick: recurrent state,
    rollout in flight and random numbers are in it."""
    loop, resumed = make_loop(2), make_loop(2)
    resumed.run_rng_seed = 8  # other hosts than those of the saved rollout
    loop.reset()
    for tick in range(loop.pool.config.horizon):
        resumed.reset()
        resumed.step()
        resumed.step()
        torch.save([loop.state_dict(), loop.pool.state_dict()], file := io.BytesIO())
        file.seek(0)
        states = torch.load(file, map_location="cpu", weights_only=True)
        assert all(part.any() for part in states[0]["state"]) is (tick > 0), "there is a recurrent state to lose"
        for theirs, ours in zip(states[0]["state"], resumed.state, strict=True):
            assert not torch.isclose(theirs, ours).all(), "it is not there already"
        for part, state in zip((resumed, resumed.pool), states, strict=True):
            part.load_state_dict(state)
        loop.step()
        resumed.step()

        assert differences(loop.state_dict(), resumed.state_dict()) == []
        assert differences(loop.pool.state_dict(), resumed.pool.state_dict()) == []


def test_an_end_in_mid_rollout_cuts_one_environment(
    make_loop: MakeLoop, play_rollout: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F10: the end of one environment leaves the others, and its own earlier transitions, bit for bit as they were."""
    whole, cut = (make_loop(3, gamma=1.0, gae_lambda=1.0) for _ in range(2))
    real = cut.pool.step

    def ends_host_1_at_tick_2(action: Action) -> StepResult:
        return real(action)._replace(terminated=torch.tensor([False, cut.buffer.length == 2, False]))

    monkeypatch.setattr(cut.pool, "step", ends_host_1_at_tick_2)
    returns = []
    for loop in (whole, cut):
        play_rollout(loop)
        returns.append(loop.value_norm.inverse(loop.finish()[0].targets))

    for theirs, ours in zip(whole.buffer.state_dict()["ticks"], cut.buffer.state_dict()["ticks"], strict=True):
        assert torch.equal(theirs[:, [0, 2]], ours[:, [0, 2]])
        assert torch.equal(theirs[:2, 1], ours[:2, 1])
    assert cut.buffer.starts[:, 1].tolist() == [True, False, False, True, False, False]
    torch.testing.assert_close(returns[0][:, [0, 2]], returns[1][:, [0, 2]], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(returns[1][0, 1], cut.buffer.rewards[:3, 1].sum(), rtol=1e-4, atol=1e-5)


def test_the_bootstrap_is_the_value_after_the_last_action(make_loop: MakeLoop, play_rollout: Play) -> None:
    """F11: the last return is reward + V(s_T), with V found by one pass over the whole sequence and s_T behind it."""
    loop = make_loop(2, horizon_is_end=False, gamma=1.0, gae_lambda=0.0)
    with torch.no_grad():
        loop.policy.value[-1].weight.mul_(20.0)  # so that values differ between steps
    play_rollout(loop)
    buffer = loop.buffer
    after = Observation(loop.observation_norm(loop.pool.observation.features), loop.pool.observation.blueprints)
    longer = [
        type(past)(*(torch.cat([p, n[None]]) for p, n in zip(past, now, strict=True)))
        for past, now in ((buffer.observation, after), (buffer.masks, loop.pool.masks))
    ]
    starts = torch.cat([buffer.starts, torch.zeros(1, 2, dtype=torch.bool)])
    with torch.no_grad():
        _, values, _ = loop.policy(longer[0], buffer.state, longer[1], starts)
    rollout, _ = loop.finish()

    assert (values[-1] - values[-2]).abs().min() > 1e-3
    last = loop.value_norm.inverse(rollout.targets)[-1]
    torch.testing.assert_close(last, buffer.rewards[-1] + values[-1], rtol=1e-4, atol=1e-4)


def test_the_value_clip_has_its_own_range(make_loop: MakeLoop, play_rollout: Play) -> None:
    """F12: the value clip is off by default and has its own range; neither clip touches the other's loss."""
    loop = make_loop(3)
    play_rollout(loop)
    rollout, _ = loop.finish()
    with torch.no_grad():
        loop.policy.value[-1].bias.add_(1.0)  # values have moved since the rollout
        loop.policy.heads.tables["op"].output.bias.add_(torch.tensor([2.0, 0.0, 0.0, 0.0]))  # and so have the ratios

    def losses(**changes: float) -> tuple[float, float]:
        terms = ppo_terms(loop.policy, rollout, PPOConfig(**changes))
        return terms.policy.item(), terms.value.item()

    free, narrow, value_clipped = losses(), losses(clip=1e-3), losses(value_clip=1e-3)
    assert narrow[0] != free[0] and narrow[1] == free[1]
    assert value_clipped[0] == free[0] and value_clipped[1] > free[1]
