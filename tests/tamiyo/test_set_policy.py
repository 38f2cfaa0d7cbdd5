"""The policy over sets: its weights, and its choices when slots and blueprints are permuted, added or removed."""

import pytest
import torch
from torch import Tensor

from esper_lightning.envs import ActionSpace, Masks, Op
from esper_lightning.envs.spaces.rows import RowSizes
from esper_lightning.envs.vector_env import VectorObservation
from esper_lightning.ppo.running_norm import RowNorm, RunningMeanStd
from esper_lightning.tamiyo.heads import HostDistribution, table_shapes
from esper_lightning.tamiyo.policy import Policy, PolicyConfig, PolicyShape
from esper_lightning.tamiyo.set_policy import SetPolicy, make_policy

OPS, TARGETS, SPEEDS, CURVES = len(Op), 2, 3, 2
ENVS, TICKS, WIDTH = 3, 4, 16
ROWS = RowSizes(host=5, slot=7, blueprint=4)


def space_of(slots: int, blueprints: int) -> ActionSpace:
    return ActionSpace(*([str(i) for i in range(n)] for n in (OPS, slots, blueprints, 2, 2, TARGETS, SPEEDS, CURVES)))


def policy_for(slots: int, blueprints: int, width: int = WIDTH) -> Policy:
    torch.manual_seed(0)
    shape = PolicyShape(
        ROWS.host, space_of(slots, blueprints), slot_features=ROWS.slot, blueprint_features=ROWS.blueprint
    )
    made = make_policy(shape, PolicyConfig(width=width))
    with torch.no_grad():
        for parameter in made.parameters():  # arbitrary weights: at first all choices are about equally likely
            parameter.add_(0.3 * torch.randn_like(parameter))
    return made


def parts(slots: int, blueprints: int) -> tuple[Tensor, Tensor, Tensor]:
    """Features of a host [T, N, host], its slots [T, N, K, slot] and blueprints [T, N, K, B, blueprint]; some are
    absent."""
    generator = torch.Generator().manual_seed(1)
    host = torch.randn(TICKS, ENVS, ROWS.host, generator=generator)
    slot = torch.randn(TICKS, ENVS, slots, ROWS.slot, generator=generator)
    blueprint = torch.randn(TICKS, ENVS, slots, blueprints, ROWS.blueprint, generator=generator)
    for rows in (slot, blueprint):
        rows[..., 0] = torch.rand(rows.shape[:-1], generator=generator) < 0.7
        rows *= rows[..., :1]
    return host, slot, blueprint


def join(host: Tensor, slot: Tensor, blueprint: Tensor) -> Tensor:
    """Return the rows [T, N, K, R] with these parts."""
    return torch.cat([host.unsqueeze(-2).expand(*slot.shape[:-1], -1), slot, blueprint.flatten(-2)], -1)


def masks_of(slot: Tensor, blueprint: Tensor) -> Masks:
    """Return masks that leave out what is absent."""
    slots = slot.shape[-2]
    slot_mask = (slot[..., 0] > 0).unsqueeze(-2).repeat(1, 1, OPS, 1)
    slot_mask[..., Op.WAIT, :] = True
    shapes = (slots, TARGETS), (OPS, slots, SPEEDS), (SPEEDS, CURVES)
    return Masks(
        slot_mask,
        blueprint[..., 0] > 0,
        *(torch.ones(TICKS, ENVS, *shape, dtype=torch.bool) for shape in shapes),
        ended=torch.zeros(TICKS, ENVS, dtype=torch.bool),
    )


def decide(policy: Policy, host: Tensor, slot: Tensor, blueprint: Tensor) -> tuple[HostDistribution, Tensor]:
    """Return distribution and values of a policy whose masks leave out what is absent."""
    rows, masks = join(host, slot, blueprint), masks_of(slot, blueprint)
    starts = torch.zeros(TICKS, ENVS, dtype=torch.bool)
    with torch.no_grad():
        distribution, values, _ = policy(VectorObservation(rows), policy.initial_state(ENVS), masks, starts)
    return distribution, values


def test_the_weights_depend_on_neither_slots_nor_blueprints() -> None:
    few, many = policy_for(2, 3), policy_for(12, 8)

    assert {name: p.shape for name, p in few.named_parameters()} == {n: p.shape for n, p in many.named_parameters()}
    few.load_state_dict(many.state_dict())
    distribution, values = decide(few, *parts(12, 8))
    expected = table_shapes(space_of(12, 8).sizes)
    assert {head: tuple(table.shape[-2:]) for head, table in distribution.log_probs.items()} == expected
    torch.testing.assert_close(values, decide(many, *parts(12, 8))[1])


def test_permuting_slots_and_blueprints_permutes_the_choices() -> None:
    policy, (host, slot, blueprint) = policy_for(5, 4), parts(5, 4)
    slots, blueprints = torch.tensor([3, 0, 4, 2, 1]), torch.tensor([2, 0, 3, 1])

    before, values = decide(policy, host, slot, blueprint)
    after, permuted_values = decide(policy, host, slot[..., slots, :], blueprint[..., slots, :, :][..., blueprints, :])

    expected = {
        "op": before.log_probs["op"],
        "slot": before.log_probs["slot"][..., slots],
        "blueprint": before.log_probs["blueprint"][..., slots, :][..., blueprints],
        "speed": before.log_probs["speed"].unflatten(-2, (OPS, 5))[..., slots, :].flatten(-3, -2),
        "curve": before.log_probs["curve"],
    } | {head: before.log_probs[head][..., slots, :] for head in ("style", "tempo", "target")}
    assert expected.keys() == after.log_probs.keys()
    for head, table in expected.items():
        torch.testing.assert_close(after.log_probs[head], table, rtol=0, atol=2e-6, msg=head)
        assert head in ("op", "curve") or not torch.allclose(before.log_probs[head], table), "and they do differ"
    torch.testing.assert_close(permuted_values, values, rtol=0, atol=1e-6)


def test_slots_and_blueprints_that_a_host_lacks_change_nothing() -> None:
    policy, (host, slot, blueprint) = policy_for(3, 2), parts(3, 2)
    padded_slot = torch.nn.functional.pad(slot, (0, 0, 0, 2))
    padded_blueprint = torch.nn.functional.pad(blueprint, (0, 0, 0, 3, 0, 2))

    before, values = decide(policy, host, slot, blueprint)
    after, padded_values = decide(policy, host, padded_slot, padded_blueprint)

    torch.testing.assert_close(padded_values, values, rtol=0, atol=1e-6)
    torch.testing.assert_close(after.log_probs["op"], before.log_probs["op"], rtol=0, atol=1e-6)
    possible = before.mask_tables["blueprint"]
    kept = after.log_probs["blueprint"][..., :3, :2]
    torch.testing.assert_close(kept[possible], before.log_probs["blueprint"][possible], rtol=0, atol=1e-6)


def test_a_step_is_the_same_alone_and_in_a_sequence() -> None:
    policy, (host, slot, blueprint) = policy_for(3, 2), parts(3, 2)
    assert isinstance(policy, SetPolicy)
    rows = join(host, slot, blueprint)
    starts = torch.zeros(TICKS, ENVS, dtype=torch.bool)
    starts[2, 1] = True

    with torch.no_grad():
        whole, last = policy.encode(VectorObservation(rows), policy.initial_state(ENVS), starts)
        state = policy.initial_state(ENVS)
        for t in range(TICKS):
            step, state = policy._encode_step(VectorObservation(rows[t]), state, starts[t])
            for part, of_sequence in zip(step, whole, strict=True):
                torch.testing.assert_close(part, of_sequence[t], rtol=0, atol=1e-6)

    torch.testing.assert_close(tuple(state), tuple(last), rtol=0, atol=1e-6)


def test_the_decision_is_the_most_likely_action_though_most_slots_are_left_out_of_it() -> None:
    policy, (host, slot, blueprint) = policy_for(5, 4), parts(5, 4)
    rows, masks = join(host, slot, blueprint), masks_of(slot, blueprint)
    rng = torch.Generator().manual_seed(2)
    for part in (masks.target, masks.speed, masks.curve):
        part.copy_(torch.rand(part.shape, generator=rng) < 0.6)
    state, starts, ops = policy.initial_state(ENVS), torch.zeros(ENVS, dtype=torch.bool), set()

    with torch.no_grad():
        distribution, _, _ = policy(VectorObservation(rows), state, masks, torch.zeros(TICKS, ENVS, dtype=torch.bool))
        for t in range(TICKS):
            of_step = Masks(*(part[t] for part in masks))
            action, state = policy.decide(VectorObservation(rows[t]), state, of_step, starts=starts)
            for choice, expected in zip(action, distribution.mode(), strict=True):
                assert torch.equal(choice, expected[t])
            ops |= set(action.op.tolist())

    assert len(ops) > 1, "heads of several ops matter"


def test_rows_are_normalised_by_the_statistics_of_the_present_ones_of_all_slots() -> None:
    host, slot, blueprint = parts(5, 4)
    rows = join(host, slot, blueprint)
    norm, references = RowNorm(ROWS), []
    for part in (host, slot[slot[..., 0] > 0][:, 1:], blueprint[blueprint[..., 0] > 0][:, 1:]):
        references.append(RunningMeanStd(part.shape[-1:]))
        references[-1].update(part)

    norm.update(rows)
    normalised_host, normalised_slot, normalised_blueprint = ROWS.split(norm(rows))

    torch.testing.assert_close(normalised_host, references[0](host))
    for normalised, raw, reference in (
        (normalised_slot, slot, references[1]),
        (normalised_blueprint, blueprint, references[2]),
    ):
        present = raw[..., 0] > 0
        assert torch.equal(normalised[..., 0], raw[..., 0]) and not normalised[~present].any()
        torch.testing.assert_close(normalised[present][:, 1:], reference(raw[present][:, 1:]))


@pytest.mark.parametrize("width", [16, 17])
def test_all_choices_are_about_equally_likely_at_first(width: int) -> None:
    torch.manual_seed(0)
    shape = PolicyShape(ROWS.host, space_of(5, 4), slot_features=ROWS.slot, blueprint_features=ROWS.blueprint)
    distribution, _ = decide(make_policy(shape, PolicyConfig(width=width)), *parts(5, 4))

    entropy, _ = distribution.entropy()
    free = distribution.choice_probability() > 0.99
    assert free.any() and (entropy[free] > 0.97).all()


def observe(slots: int, blueprints: int, generator: torch.Generator) -> tuple[VectorObservation, Masks, Tensor, Tensor]:
    """Return 64 hosts on which only GERMINATE is possible, and the best slot [N] and blueprint in each slot [N, K]:
    those with the largest second feature."""
    n = 64
    host = torch.randn(1, n, ROWS.host, generator=generator)
    slot = torch.randn(1, n, slots, ROWS.slot, generator=generator)
    blueprint = torch.randn(1, n, slots, blueprints, ROWS.blueprint, generator=generator)
    slot[..., 0] = blueprint[..., 0] = 1.0
    rows = join(host, slot, blueprint)
    possible = torch.zeros(1, n, OPS, slots, dtype=torch.bool)
    possible[:, :, Op.GERMINATE] = True
    shapes = (slots, blueprints), (slots, TARGETS), (OPS, slots, SPEEDS), (SPEEDS, CURVES)
    others = [torch.ones(1, n, *shape, dtype=torch.bool) for shape in shapes]
    masks = Masks(possible, *others, ended=torch.zeros(1, n, dtype=torch.bool))
    return VectorObservation(rows), masks, slot[0, ..., 1].argmax(-1), blueprint[0, ..., 1].argmax(-1)


@pytest.mark.slow
def test_what_is_learned_with_few_slots_and_blueprints_holds_with_more() -> None:
    """The best choices are learned from rewards alone, with 3 slots and 4 blueprints, and made with 7 and 9."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    shape = PolicyShape(ROWS.host, space_of(3, 4), slot_features=ROWS.slot, blueprint_features=ROWS.blueprint)
    policy = make_policy(shape, PolicyConfig(width=32, memory="none"))
    optimizer = torch.optim.Adam(policy.parameters(), 3e-3)
    starts = torch.ones(1, 64, dtype=torch.bool)

    def rewards(slots: int, blueprints: int, greedy: bool) -> tuple[Tensor, Tensor]:
        observation, masks, best_slot, best_blueprint = observe(slots, blueprints, generator)
        distribution, _, _ = policy(observation, policy.initial_state(64), masks, starts)
        action = distribution.mode() if greedy else distribution.sample(generator)
        slot, blueprint = action.slot[0], action.blueprint[0]
        found = best_blueprint.gather(1, slot.unsqueeze(1)).squeeze(1) == blueprint
        return (slot == best_slot).float() + found.float(), distribution.log_prob(action)[0]

    for _ in range(400):
        reward, log_prob = rewards(3, 4, greedy=False)
        optimizer.zero_grad()
        (-(reward - reward.mean()) * log_prob).mean().backward()
        optimizer.step()

    with torch.no_grad():
        learned, elsewhere = (
            torch.cat([rewards(*sizes, greedy=True)[0] for _ in range(8)]).mean() for sizes in ((3, 4), (7, 9))
        )
    assert learned > 1.8 and elsewhere > 1.6, "at random the mean reward is .58 and .25"
