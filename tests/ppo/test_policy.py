"""The policy on sets of slots and blueprints, and on environments without slots."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from esper_lightning.envs import ActionSpace, Masks, Op
from esper_lightning.envs.observation import RowSizes
from esper_lightning.envs.vector_env import ChoiceSpace, Observation
from esper_lightning.ppo.distribution import HostDistribution
from esper_lightning.ppo.policy import Policy, PolicyConfig, PolicyShape, RecurrentState
from tests.decisions import CPU

TICKS, ENVS, WIDTH, OPS = 5, 3, 16, len(Op)
ROWS = RowSizes(host=5, slot=7, blueprint=4)
CHOICES = ChoiceSpace({"a": 3, "b": 2})


def space_of(slots: int, blueprints: int) -> ActionSpace:
    return ActionSpace(*([str(i) for i in range(n)] for n in (OPS, slots, blueprints, 2)))


def shape_of(slots: int = 3, blueprints: int = 2) -> PolicyShape:
    return PolicyShape(ROWS.host, space_of(slots, blueprints), 0, ROWS.slot, ROWS.blueprint)


def arbitrary(shape: PolicyShape, **config: Any) -> Policy:
    """Return a policy with arbitrary weights: at first all choices are about equally likely."""
    torch.manual_seed(0)
    made = Policy(shape, PolicyConfig(**{"width": WIDTH} | config))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return made


def parts_of(slots: int, blueprints: int, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Return features of hosts [T, N, host], slots [T, N, K, slot] and blueprints [T, N, K, B, blueprint]; some are
    absent."""
    generator = torch.Generator().manual_seed(seed)
    host = torch.randn(TICKS, ENVS, ROWS.host, generator=generator)
    slot = torch.randn(TICKS, ENVS, slots, ROWS.slot, generator=generator)
    blueprint = torch.randn(TICKS, ENVS, slots, blueprints, ROWS.blueprint, generator=generator)
    for rows in (slot, blueprint):
        rows[..., 0] = torch.rand(rows.shape[:-1], generator=generator) < 0.7
        rows *= rows[..., :1]
    return host, slot, blueprint


def inputs(host: Tensor, slot: Tensor, blueprint: Tensor) -> tuple[Observation, Masks]:
    """Return the observation in rows, and masks that leave out what is absent."""
    rows = torch.cat([host.unsqueeze(-2).expand(*slot.shape[:-1], -1), slot, blueprint.flatten(-2)], -1)
    possible = (slot[..., 0] > 0).unsqueeze(-2).repeat(1, 1, OPS, 1)
    possible[..., Op.WAIT, :] = True
    return Observation(rows), Masks(possible, blueprint[..., 0] > 0, torch.zeros(host.shape[:2], dtype=torch.bool))


def play(policy: Policy, host: Tensor, slot: Tensor, blueprint: Tensor) -> tuple[HostDistribution, Tensor]:
    """Return distribution and values of whole sequences without resets."""
    observation, masks = inputs(host, slot, blueprint)
    with torch.no_grad():
        distribution, values, _ = policy(observation, policy.initial_state(ENVS), masks, torch.zeros(TICKS, ENVS) > 0)
    return distribution, values


def test_permuting_slots_and_blueprints_permutes_the_choices() -> None:
    policy, (host, slot, blueprint) = arbitrary(shape_of(5, 4)), parts_of(5, 4)
    slots, blueprints = torch.tensor([3, 0, 4, 2, 1]), torch.tensor([2, 0, 3, 1])

    before, values = play(policy, host, slot, blueprint)
    after, permuted_values = play(policy, host, slot[..., slots, :], blueprint[..., slots, :, :][..., blueprints, :])

    expected = {
        "op": before.log_probs["op"],
        "slot": before.log_probs["slot"][..., slots],
        "blueprint": before.log_probs["blueprint"][..., slots, :][..., blueprints],
        "tempo": before.log_probs["tempo"][..., slots, :],
    }
    assert expected.keys() == after.log_probs.keys()
    for head, table in expected.items():
        torch.testing.assert_close(after.log_probs[head], table, rtol=0, atol=2e-6, msg=head)
        assert head == "op" or not torch.allclose(before.log_probs[head], table), "and they do differ"
    torch.testing.assert_close(permuted_values, values, rtol=0, atol=1e-6)


def test_slots_and_blueprints_that_a_host_lacks_change_nothing() -> None:
    policy, (host, slot, blueprint) = arbitrary(shape_of()), parts_of(3, 2)
    padded_slot = nn.functional.pad(slot, (0, 0, 0, 2))
    padded_blueprint = nn.functional.pad(blueprint, (0, 0, 0, 3, 0, 2))

    before, values = play(policy, host, slot, blueprint)
    after, padded_values = play(policy, host, padded_slot, padded_blueprint)

    torch.testing.assert_close(padded_values, values, rtol=0, atol=1e-6)
    torch.testing.assert_close(after.log_probs["op"], before.log_probs["op"], rtol=0, atol=1e-6)
    possible, kept = before.masks["blueprint"], after.log_probs["blueprint"][..., :3, :2]
    torch.testing.assert_close(kept[possible], before.log_probs["blueprint"][possible], rtol=0, atol=1e-6)


def test_the_decision_is_the_most_likely_action_though_most_slots_are_left_out_of_it() -> None:
    policy, ops = arbitrary(shape_of(5, 4)), set()
    observation, masks = inputs(*parts_of(5, 4, seed=4))
    state, starts = policy.initial_state(ENVS), torch.zeros(TICKS, ENVS) > 0

    with torch.no_grad():
        distribution, _, _ = policy(observation, state, masks, starts)
        for t in range(TICKS):
            hidden, state = policy.encode_step(Observation(observation.features[t]), state, starts[t])
            action = policy.heads.decide(hidden, Masks(*(part[t] for part in masks)))
            assert all(torch.equal(part, best[t]) for part, best in zip(action, distribution.mode(), strict=True))
            ops |= set(action.op.tolist())

    assert len(ops) > 1, "heads of several ops matter"


Given = tuple[Policy, Observation, Any, RecurrentState]


def without_slots(seed: int) -> Given:
    generator = torch.Generator().manual_seed(seed)
    policy = arbitrary(PolicyShape(ROWS.host, CHOICES))
    masks = CHOICES.full_masks(ENVS, CPU)
    masks = type(masks)(*(part.expand(TICKS, *part.shape) for part in masks))
    return policy, Observation(torch.randn(TICKS, ENVS, ROWS.host, generator=generator)), masks, state_of(seed)


def with_slots(seed: int) -> Given:
    observation, masks = inputs(*parts_of(3, 2, seed))
    return arbitrary(shape_of()), observation, masks, state_of(seed)


def state_of(seed: int) -> RecurrentState:
    return RecurrentState(*torch.randn(2, ENVS, WIDTH, generator=torch.Generator().manual_seed(seed)).unbind())


each_kind = pytest.mark.parametrize("given_of", [with_slots, without_slots])


@each_kind
@given(seed=st.integers(0, 1000), resets=st.sampled_from([0.0, 0.15, 1.0]))
def test_a_whole_sequence_is_as_many_single_steps(given_of: Callable[[int], Given], seed: int, resets: float) -> None:
    policy, observation, masks, state = given_of(seed)
    starts = torch.rand(TICKS, ENVS, generator=torch.Generator().manual_seed(seed)) < resets

    with torch.no_grad():
        distribution, values, last = policy(observation, state, masks, starts)
        for t in range(TICKS):
            hidden, state = policy.encode_step(Observation(observation.features[t]), state, starts[t])
            of_step = policy.distribution(hidden, type(masks)(*(part[t] for part in masks)))
            torch.testing.assert_close(policy.estimate_value(hidden), values[t], rtol=0, atol=1e-5)
            for head, table in of_step.log_probs.items():
                torch.testing.assert_close(table.exp(), distribution.log_probs[head][t].exp(), rtol=0, atol=2e-5)

    torch.testing.assert_close(tuple(last), tuple(state), rtol=0, atol=1e-5)


@each_kind
def test_a_new_policy_prefers_nothing_and_gives_every_weight_a_gradient(given_of: Callable[[int], Given]) -> None:
    trained, observation, masks, _ = given_of(6)
    torch.manual_seed(1)
    fresh = Policy(shape_of() if trained.rows else PolicyShape(ROWS.host, CHOICES), PolicyConfig(width=WIDTH))
    distribution, values, _ = fresh(observation, fresh.initial_state(ENVS), masks, torch.zeros(TICKS, ENVS) > 0)
    entropy, _ = distribution.entropy()
    assert (entropy[distribution.choice_probability() > 0.99] > 0.97).all()

    action = distribution.sample(torch.Generator().manual_seed(1))
    (distribution.log_prob(action).sum() + values.square().sum()).backward()
    # A bias that all choices of a head share cancels in the softmax: its gradient is rounding, and may be 0.
    idle = {name for name, p in fresh.named_parameters() if p.grad is None or not p.grad.any()}
    shared_biases = {name for name, p in fresh.named_parameters() if name.endswith("merit.bias") and p.grad is not None}
    assert idle - shared_biases == set()


@pytest.mark.parametrize("shape", [shape_of(), PolicyShape(5, CHOICES, 2)])
def test_sizes_are_restored_from_plain_data_also_with_the_head_of_an_earlier_version(shape: PolicyShape) -> None:
    saved = shape.state_dict()
    assert PolicyShape.from_state_dict(saved) == shape
    if shape.rows:
        assert PolicyShape.from_state_dict(saved | {"space": saved["space"] | {"style": ["linear_add"]}}) == shape
