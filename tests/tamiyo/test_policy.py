import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from esper_lightning.envs import ActionSpace, Masks, Observation, Op
from esper_lightning.tamiyo.policy import Policy, PolicyConfig, PolicyShape, RecurrentState, use_ieee_float32

TICKS, ENVS, FEATURES, WIDTH = 7, 3, 11, 16
OPS, SLOTS, BLUEPRINTS, TARGETS, SPEEDS, CURVES = len(Op), 2, 3, 2, 3, 2
SPACE = ActionSpace(*([str(i) for i in range(n)] for n in (OPS, SLOTS, BLUEPRINTS, 2, 2, TARGETS, SPEEDS, CURVES)))
SHAPE = PolicyShape(FEATURES, SPACE, categorical_fields=SLOTS, categories=BLUEPRINTS + 1)


@pytest.fixture(scope="module")
def policy() -> Policy:
    torch.manual_seed(0)
    made = Policy(SHAPE, PolicyConfig(width=WIDTH))
    with torch.no_grad():
        for parameter in made.parameters():  # arbitrary weights instead of the initial ones
            parameter.add_(0.2 * torch.randn_like(parameter))
    return made


def sequence(seed: int) -> tuple[Observation, Masks, RecurrentState]:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(TICKS, ENVS, FEATURES, generator=generator)
    seeds = torch.randint(BLUEPRINTS + 1, (TICKS, ENVS, SLOTS), generator=generator)
    slot = torch.rand(TICKS, ENVS, OPS, SLOTS, generator=generator) < 0.5
    slot[:, :, Op.WAIT] = True
    shapes = (SLOTS, BLUEPRINTS), (SLOTS, TARGETS), (OPS, SLOTS, SPEEDS), (SPEEDS, CURVES)
    others = [torch.ones(TICKS, ENVS, *shape, dtype=torch.bool) for shape in shapes]
    masks = Masks(slot, *others, ended=torch.zeros(TICKS, ENVS, dtype=torch.bool))
    state = RecurrentState(*torch.randn(2, ENVS, WIDTH, generator=generator).unbind())
    return Observation(features, seeds), masks, state


def in_single_steps(
    policy: Policy, observation: Observation, masks: Masks, state: RecurrentState, starts: Tensor
) -> tuple[Tensor, Tensor, RecurrentState]:
    """Return log-probabilities of the ops [T, N, ops], values [T, N] and the last state, computed tick by tick."""
    ops, values = [], []
    for t in range(TICKS):
        now = Observation(*(part[t] for part in observation)), state, Masks(*(part[t] for part in masks))
        distribution, value, state = policy.step(*now, starts=starts[t])
        ops.append(distribution.log_probs["op"])
        values.append(value)
    return torch.stack(ops), torch.stack(values), state


def test_a_policy_of_hosts_keeps_to_its_floors(policy: Policy) -> None:
    floored = Policy(SHAPE, PolicyConfig(width=WIDTH, probability_floors={"op": 0.1, "tempo": 0.4}))
    floored.load_state_dict(policy.state_dict())
    with torch.no_grad():
        floored.heads.tables["op"].output.bias[Op.WAIT] = 50.0
        floored.heads.tables["tempo"].output.bias[0] = 50.0
    observation, masks, state = sequence(0)

    with torch.no_grad():
        distribution, _, _ = floored(observation, state, masks, torch.zeros(TICKS, ENVS, dtype=torch.bool))

    possible = masks.op.unsqueeze(-2)
    assert possible[..., 1:].any() and torch.allclose(
        distribution.log_probs["op"].exp()[..., 1:], 0.1 * possible[..., 1:].float()
    )
    torch.testing.assert_close(distribution.log_probs["tempo"][..., 1].exp(), torch.full((TICKS, ENVS, SLOTS), 0.4))


@given(seed=st.integers(0, 1000), resets=st.sampled_from([0.0, 0.15, 0.5, 1.0]))
def test_a_whole_sequence_is_as_many_single_steps(policy: Policy, seed: int, resets: float) -> None:
    observation, masks, state = sequence(seed)
    starts = torch.rand(TICKS, ENVS, generator=torch.Generator().manual_seed(seed)) < resets

    with torch.no_grad():
        distribution, values, last = policy(observation, state, masks, starts)
        ops, stepwise, last_stepwise = in_single_steps(policy, observation, masks, state, starts)

    torch.testing.assert_close(distribution.log_probs["op"], ops, rtol=0, atol=1e-5)
    torch.testing.assert_close(values, stepwise, rtol=0, atol=1e-5)
    torch.testing.assert_close(tuple(last), tuple(last_stepwise), rtol=0, atol=1e-5)


def test_a_reset_forgets_the_past_of_its_environment_and_of_no_other(policy: Policy) -> None:
    observation, masks, state = sequence(1)
    starts = torch.zeros(TICKS, ENVS, dtype=torch.bool)
    starts[4, 1] = True
    another_past = Observation(observation.features.clone(), observation.blueprints)
    another_past.features[:4] += 1.0

    with torch.no_grad():
        values, other = (policy(seen, state, masks, starts)[1] for seen in (observation, another_past))

    assert torch.equal(values[4:, 1], other[4:, 1])
    for env in (0, 2):
        assert (values[4:, env] != other[4:, env]).all(), "without a reset the past is remembered"


def test_a_reset_begins_with_the_initial_state(policy: Policy) -> None:
    observation, masks, state = sequence(2)
    starts = torch.zeros(TICKS, ENVS, dtype=torch.bool)
    starts[0] = True

    with torch.no_grad():
        reset = policy(observation, state, masks, starts)[1]
        fresh = policy(observation, policy.initial_state(ENVS), masks, starts & False)[1]

    assert torch.equal(reset, fresh)


def test_the_initial_state_is_empty_and_its_parts_are_apart(policy: Policy) -> None:
    state = policy.initial_state(4)

    assert state.hidden.shape == state.cell.shape == (4, WIDTH)
    assert not state.hidden.any() and not state.cell.any()
    state.hidden.fill_(1.0)
    assert not state.cell.any()


def test_a_pass_changes_neither_the_state_it_was_given_nor_the_policy(policy: Policy) -> None:
    observation, masks, state = sequence(3)
    before = [part.clone() for part in state] + [p.clone() for p in policy.parameters()]
    starts = torch.ones(TICKS, ENVS, dtype=torch.bool)

    first = policy(observation, state, masks, starts)[1]
    second = policy(observation, state, masks, starts)[1]

    assert torch.equal(first, second)
    assert all(torch.equal(a, b) for a, b in zip(before, [*state, *policy.parameters()], strict=True))


def test_environments_do_not_see_each_other(policy: Policy) -> None:
    observation, masks, state = sequence(4)
    starts = torch.zeros(TICKS, ENVS, dtype=torch.bool)
    starts[3, 0] = True  # a neighbour's reset splits the sequence and has no other effect
    middle = slice(1, 2)

    with torch.no_grad():
        among = policy(observation, state, masks, starts)[1][:, middle]
        alone = policy(
            Observation(*(part[:, middle] for part in observation)),
            RecurrentState(*(part[middle] for part in state)),
            Masks(*(part[:, middle] for part in masks)),
            starts[:, middle],
        )[1]

    torch.testing.assert_close(among, alone, rtol=0, atol=1e-5)


def test_which_blueprint_grows_is_seen(policy: Policy) -> None:
    observation, masks, state = sequence(5)
    starts = torch.zeros(TICKS, ENVS, dtype=torch.bool)
    values = []
    for number in range(BLUEPRINTS + 1):
        grown = Observation(observation.features, torch.full_like(observation.blueprints, number))
        with torch.no_grad():
            values.append(policy(grown, state, masks, starts)[1][0, 0].item())

    assert len(set(values)) == BLUEPRINTS + 1


def test_a_new_policy_prefers_nothing_and_gives_every_weight_a_gradient() -> None:
    torch.manual_seed(1)
    fresh = Policy(SHAPE, PolicyConfig(width=WIDTH))
    observation, masks, _ = sequence(6)
    everything = masks._replace(slot=torch.ones_like(masks.slot))
    starts = torch.zeros(TICKS, ENVS, dtype=torch.bool)
    distribution, values, _ = fresh(observation, fresh.initial_state(ENVS), everything, starts)
    entropy, _ = distribution.entropy()
    assert entropy.min() > 0.99

    action = distribution.sample(torch.Generator().manual_seed(0))
    (distribution.log_prob(action).sum() + values.square().sum()).backward()
    assert all(p.grad.any() for p in fresh.parameters())


def test_a_new_memory_lets_go_slowly() -> None:
    """Without input only the biases of the gates act: that of the forget gate starts at 1, all others at 0."""
    fresh = Policy(SHAPE, PolicyConfig(width=WIDTH))
    observation, masks, state = sequence(7)
    for weight in (fresh.lstm.weight_ih_l0, fresh.lstm.weight_hh_l0):
        nn.init.zeros_(weight)
    never = torch.zeros(TICKS, ENVS, dtype=torch.bool)
    with torch.no_grad():
        _, _, after = fresh(observation, state, masks, never)

    kept = torch.tensor(1.0).sigmoid() ** TICKS
    torch.testing.assert_close(after.cell, kept * state.cell)
    torch.testing.assert_close(after.hidden, 0.5 * torch.tanh(after.cell))


@pytest.mark.parametrize(("width", "embedding"), [(1, 4), (0, 4), (16, 0)])
def test_a_policy_of_width_zero_is_refused(width: int, embedding: int) -> None:
    with pytest.raises(ValueError, match="width must be at least 2 and blueprint_embedding at least 1"):
        PolicyConfig(width=width, blueprint_embedding=embedding)


def test_the_policy_of_a_run_is_not_rounded_to_tf32() -> None:
    unchanged = torch.backends.cudnn.allow_tf32
    try:
        torch.backends.cudnn.allow_tf32 = True
        use_ieee_float32()
        assert not torch.backends.cudnn.allow_tf32
        assert torch.backends.cudnn.rnn.fp32_precision != "tf32"
    finally:
        torch.backends.cudnn.allow_tf32 = unchanged
