import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from esper_lightning.envs import Op
from esper_lightning.ppo.collector import RolloutCollector
from esper_lightning.ppo.losses import (
    PPOConfig,
    PPOTerms,
    clipped_surrogate,
    kl_estimate,
    ppo_terms,
    update_metrics,
    value_loss,
)
from esper_lightning.ppo.policy import Policy
from esper_lightning.ppo.rollout_buffer import Rollout


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "learns"),
    [
        (1.0, 2.0, -2.0, True),
        (1.1, 2.0, -2.2, True),
        (1.5, 2.0, -2.4, False),  # already much likelier: no reward for more
        (0.5, 2.0, -1.0, True),  # a good action that became unlikely: come back
        (0.5, -2.0, 1.6, False),  # already much less likely: no reward for more
        (1.5, -2.0, 3.0, True),  # a bad action that became likely: come back
    ],
)
def test_the_surrogate_is_pessimistic(ratio: float, advantage: float, loss: float, learns: bool) -> None:
    r = torch.tensor(ratio, requires_grad=True)

    value = clipped_surrogate(r, torch.tensor(advantage))
    value.backward()

    assert value.item() == pytest.approx(loss)
    assert r.grad.item() == pytest.approx(-advantage if learns else 0.0)


@pytest.mark.parametrize(
    ("value", "old", "target", "clip", "loss"),
    [
        (3.0, 0.0, 1.0, None, 2.0),
        (3.0, 0.0, 1.0, 10.0, 2.0),  # within the clip: as without
        (1.0, 0.0, 1.0, 0.5, 0.125),  # right, but moved too far: judged where the clip ends, at 0.5
        (-1.0, 0.0, 1.0, 0.5, 2.0),  # wrong way: the worse of the two errors
    ],
)
def test_the_value_loss_is_half_the_squared_error_and_clipped_on_request(
    value: float, old: float, target: float, clip: float | None, loss: float
) -> None:
    assert value_loss(*torch.tensor([value, old, target]), clip=clip).item() == pytest.approx(loss)


def test_the_kl_estimate_is_right_on_average() -> None:
    generator = torch.Generator().manual_seed(0)
    old = torch.randn(6, generator=generator, dtype=torch.float64).softmax(0)
    new = torch.randn(6, generator=generator, dtype=torch.float64).softmax(0)

    average = (old * kl_estimate((new / old).log())).sum()

    expected = torch.distributions.kl_divergence(
        torch.distributions.Categorical(old), torch.distributions.Categorical(new)
    )
    torch.testing.assert_close(average, expected)


@pytest.fixture(scope="module")
def loop(
    make_loop: Callable[..., RolloutCollector], play_rollout: Callable[[RolloutCollector], None]
) -> RolloutCollector:
    made = make_loop(n_envs=3)
    play_rollout(made)
    return made


@pytest.fixture(scope="module")
def rollout(loop: RolloutCollector) -> Rollout:
    generator = torch.Generator().manual_seed(3)
    advantages = torch.randn(loop.buffer.ticks, 3, generator=generator)
    return loop.finish()[0]._replace(advantages=advantages)


def with_steps(rollout: Rollout, **changes: Any) -> Rollout:
    return rollout._replace(steps=rollout.steps._replace(**changes))


def forced_everywhere(rollout: Rollout, env: int) -> Rollout:
    """Return the same rollout with all actions of environment `env` forced."""
    slot = rollout.steps.masks.slot.clone()
    slot[:, env, 1:] = False
    action = type(rollout.steps.action)(*(head.clone() for head in rollout.steps.action))
    for head in action:
        head[:, env] = 0
    log_prob = rollout.steps.log_prob.clone()
    log_prob[:, env] = 0.0
    masks = rollout.steps.masks._replace(slot=slot)
    return with_steps(rollout, masks=masks, action=action, log_prob=log_prob)


def policy_gradient(policy: Policy, loss: Tensor) -> list[Tensor]:
    parameters = list(policy.parameters())
    return list(torch.autograd.grad(loss, parameters, retain_graph=True, materialize_grads=True))


def test_forced_steps_carry_no_policy_gradient_and_no_entropy(loop: RolloutCollector, rollout: Rollout) -> None:
    config, policy = PPOConfig(), loop.policy
    forced = forced_everywhere(rollout, env=1)
    others = rollout.select_envs(torch.tensor([0, 2]))

    ours, theirs = ppo_terms(policy, forced, config), ppo_terms(policy, others, config)

    for name in ("policy", "entropy"):
        torch.testing.assert_close(getattr(ours, name), getattr(theirs, name))
        a, b = (policy_gradient(policy, getattr(terms, name)) for terms in (ours, theirs))
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-7)
        assert any(g.any() for g in a)
    torch.testing.assert_close(ours.head_entropy, theirs.head_entropy)


@pytest.mark.parametrize(
    ("op", "reached"),
    [
        (Op.WAIT, {"op"}),
        (Op.CULL, {"op", "slot"}),
        (Op.FOSSILIZE, {"op", "slot"}),
        (Op.GERMINATE, {"op", "slot", "blueprint", "tempo"}),
    ],
)
def test_a_decision_teaches_only_the_heads_that_mattered_for_it(
    loop: RolloutCollector, rollout: Rollout, op: Op, reached: set[str]
) -> None:
    everything = rollout.steps.masks._replace(slot=torch.ones_like(rollout.steps.masks.slot))
    action = rollout.steps.action._replace(op=torch.full_like(rollout.steps.action.op, op))
    with torch.no_grad():
        steps = rollout.steps
        distribution, *_ = loop.policy(steps.observation, rollout.state, everything, steps.starts)
        log_prob = distribution.log_prob(action)
    taken = with_steps(rollout, masks=everything, action=action, log_prob=log_prob)

    loop.policy.zero_grad()
    ppo_terms(loop.policy, taken, PPOConfig()).policy.backward()

    taught = {
        head
        for head in loop.policy.heads.tables
        if any(p.grad is not None and p.grad.any() for p in loop.policy.heads.tables[head].parameters())
    }
    assert taught == reached


def test_ppo_terms_measure_how_far_the_policy_has_moved(loop: RolloutCollector, rollout: Rollout) -> None:
    still = ppo_terms(loop.policy, rollout, PPOConfig())
    assert still.ratio_error < 1e-5 and still.kl < 1e-9 and still.clip_fraction == 0

    likelier = with_steps(rollout, log_prob=rollout.steps.log_prob - math.log(1.5))
    moved = ppo_terms(loop.policy, likelier, PPOConfig())
    assert moved.ratio_error.item() == pytest.approx(0.5, rel=1e-4)
    assert moved.ratio_low.item() == pytest.approx(1.5, rel=1e-4) == moved.ratio_high.item()
    assert moved.kl.item() == pytest.approx(0.5 - math.log(1.5), rel=1e-4)
    assert moved.kl_k1.item() == pytest.approx(-math.log(1.5), rel=1e-4)
    assert moved.clip_fraction == 1

    forced = forced_everywhere(rollout, env=1)
    forced.steps.log_prob[:, 1] -= math.log(1.5)  # what an action that was forced does, says nothing of the policy
    moved = ppo_terms(loop.policy, forced, PPOConfig())
    assert moved.clip_fraction == 0 and abs(moved.kl_k1) < 1e-6 and moved.kl < 1e-9


def test_the_metrics_of_an_update_leave_out_skipped_minibatches_and_heads_without_a_choice() -> None:
    def terms(number: float) -> PPOTerms:
        made = PPOTerms(*[torch.tensor(number)] * len(PPOTerms._fields))
        shares = {"head_entropy": torch.tensor([0.5, 0.0]), "head_choice_share": torch.tensor([0.9, 0.0])}
        return made._replace(**shares)

    every, norms = [terms(1.0), terms(math.nan), terms(3.0)], [torch.tensor(2.0), torch.tensor(math.nan)]

    metrics = update_metrics(every, norms, {"op": 4, "tempo": 1}, finite=[True, False])

    assert (metrics["loss.policy"], metrics["kl"], metrics["ratio_high"], metrics["grad_norm"]) == (2.0, 3.0, 3.0, 2.0)
    assert (metrics["minibatches"], metrics["skipped"]) == (1.0, 1.0)
    assert metrics["entropy.op"] == 0.5 and metrics["choice_share.op"] == pytest.approx(0.9)
    assert not any(name.endswith(".tempo") for name in metrics)
