"""Possible actions, and the heads that receive a gradient from them."""

from collections.abc import Callable
from copy import deepcopy

import pytest
import torch

from esper_lightning.envs import HEADS, HostPool, Op
from esper_lightning.tamiyo.heads import HostDistribution, uniform_logits
from esper_lightning.tamiyo.policy import Policy
from tests.conftest import FREE
from tests.decisions import WAIT, Row, act, advance, cull, fossilize, germinate, set_alpha
from tests.runs import differences

MakePool = Callable[..., HostPool]


def test_impossible_actions_are_never_drawn_and_never_carried_out(
    make_pool: MakePool, make_policy: Callable[..., Policy]
) -> None:
    """F22: sampled actions are possible; an impossible action is refused and changes no host."""
    pool = make_pool(2)
    pool.step(act(germinate(0, 1), WAIT))
    policy, generator = make_policy(pool), torch.Generator().manual_seed(0)
    distribution, _, _ = policy.step(pool.observation, policy.initial_state(2), pool.masks, starts=torch.zeros(2) > 0)
    ops = set()
    for _ in range(200):
        action = distribution.sample(generator)
        rows = zip(*(head.tolist() for head in action), strict=True)
        assert all(pool.masks.allows(i, row) for i, row in enumerate(rows))
        ops |= set(action.op.tolist())
    assert ops == {Op.WAIT, Op.GERMINATE, Op.CULL}

    before = deepcopy(pool.state_dict())
    with pytest.raises(ValueError, match=r"host 1: FOSSILIZE block2\.pool is masked"):
        pool.step(act(WAIT, fossilize(1)))
    assert differences(before, pool.state_dict()) == []


@pytest.mark.parametrize(
    ("row", "reached"),
    [
        (WAIT, ["op"]),
        (germinate(0), ["op", "slot", "blueprint", "style", "tempo"]),
        (cull(0), ["op", "slot", "speed"]),
        (cull(0, speed=1), ["op", "slot", "speed", "curve"]),
        (fossilize(0), ["op", "slot"]),
        (advance(0), ["op", "slot"]),
        (set_alpha(0, target=1), ["op", "slot", "target", "speed"]),
        (set_alpha(0, target=1, speed=2), ["op", "slot", "target", "speed", "curve"]),
    ],
)
def test_only_heads_that_matter_get_a_gradient(make_pool: MakePool, row: Row, reached: list[str]) -> None:
    """F23: the log-probability of an op reaches only the heads that have an effect on it."""
    pool = make_pool(1, **FREE)
    masks = pool.masks
    everything = masks._replace(**{name: torch.ones_like(getattr(masks, name)) for name in ("slot", "target", "speed")})
    logits = {head: table.requires_grad_() for head, table in uniform_logits(pool.space.sizes, 1).items()}
    HostDistribution(logits, everything).log_prob(act(row)).sum().backward()

    assert [head for head in HEADS if logits[head].grad.any()] == reached
