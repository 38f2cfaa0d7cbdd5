"""Actions of any environment, with one head or several, compared with torch's distributions and with enumeration."""

from itertools import product

import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical

from esper_lightning.envs.spaces.choices import ChoiceAction, ChoiceMasks, ChoiceSpace
from esper_lightning.tamiyo.heads import ChoiceDistribution, Heads

CPU = torch.device("cpu")
SPACES = {
    "one head": ChoiceSpace({"action": 5}),
    "one head, masked": ChoiceSpace({"action": 5}, masked=True),
    "independent": ChoiceSpace({"a": 3, "b": 4}),
    "conditioned": ChoiceSpace({"a": 3, "b": 4, "c": 2}, {"b": "a", "c": "b"}),
    "conditioned, masked": ChoiceSpace({"a": 3, "b": 4, "c": 2}, {"b": "a", "c": "b"}, masked=True),
}
each_space = pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)


def distribution(space: ChoiceSpace, n: int = 6, seed: int = 0) -> tuple[ChoiceDistribution, ChoiceMasks]:
    generator = torch.Generator().manual_seed(seed)
    logits = {head: 2.0 * torch.randn(n, *shape, generator=generator) for head, shape in space.mask_shapes.items()}
    possible = torch.rand(n, space.mask_size, generator=generator) < 0.6
    if space.masked:
        for mask in space.split_mask(possible).values():
            mask[..., 0] = True  # at least one choice is always possible
    masks = space.full_masks(n, CPU)._replace(possible=possible)
    return ChoiceDistribution(logits, masks, space), masks


def every_action(space: ChoiceSpace, n: int) -> list[ChoiceAction]:
    return [ChoiceAction(torch.tensor([row] * n)) for row in product(*map(range, space.sizes.values()))]


@each_space
def test_probabilities_of_all_decisions_add_up_to_one(space: ChoiceSpace) -> None:
    drawn, _ = distribution(space)

    total = sum(drawn.log_prob(action).double().exp() for action in every_action(space, 6))

    torch.testing.assert_close(total, torch.ones(6).double(), rtol=0, atol=1e-5)


@each_space
def test_entropy_is_the_joint_one_in_units_of_even_choices(space: ChoiceSpace) -> None:
    """Head by head, compared with torch's Categorical over an enumeration of all actions."""
    drawn, masks = distribution(space)
    entropy, share = drawn.entropy()
    assert torch.equal(share, torch.ones(6, len(space.sizes)))

    for n in range(6):
        likely = {}
        for i, head in enumerate(space.sizes):
            rows = likely.get(space.parents.get(head), torch.ones(1))
            after, expected, free = torch.zeros(space.sizes[head]), 0.0, 0.0
            for row, probability in enumerate(rows):
                table = drawn.log_probs[head][n, row].exp()
                there = space.split_mask(masks.possible)[head][n, row].sum() if space.masked else len(table)
                if there > 1:
                    free += probability
                    expected += probability * Categorical(table).entropy() / torch.as_tensor(float(there)).log()
                after += probability * table
            likely[head] = after
            torch.testing.assert_close(entropy[n, i], torch.as_tensor(expected), rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(drawn.choice_probability()[n, i], torch.as_tensor(free), rtol=1e-4, atol=1e-5)


@each_space
def test_draws_come_as_often_as_they_are_likely_and_never_where_masked(space: ChoiceSpace) -> None:
    drawn, masks = distribution(space, n=1)
    many = ChoiceDistribution(
        {head: table.log().expand(4000, -1, -1) for head, table in probabilities(drawn).items()},
        ChoiceMasks(*(part.expand(4000, *part.shape[1:]) for part in masks)),
        space,
    )

    action = many.sample(torch.Generator().manual_seed(0))

    for candidate in every_action(space, 1):
        share = (action.indices == candidate.indices).all(-1).float().mean()
        expected = drawn.log_prob(candidate).exp()
        assert share == 0 if expected == 0 else abs(share - expected) < 0.04


def probabilities(drawn: ChoiceDistribution) -> dict[str, Tensor]:
    return {head: table.exp() for head, table in drawn.log_probs.items()}


@each_space
def test_the_mode_is_the_likeliest_at_every_turn(space: ChoiceSpace) -> None:
    drawn, _ = distribution(space)
    numbers = drawn.mode().indices

    for n in range(6):
        chosen: dict[str, int] = {}
        for i, head in enumerate(space.sizes):
            row = chosen.get(space.parents.get(head), 0)
            chosen[head] = int(drawn.log_probs[head][n, row].argmax())
            assert numbers[n, i] == chosen[head]


def test_steps_are_forced_only_where_every_head_is() -> None:
    space = SPACES["conditioned, masked"]
    possible = torch.ones(3, space.mask_size, dtype=torch.bool)
    for n, free in enumerate(("none", "b", "all")):
        for head, mask in space.split_mask(possible[n]).items():
            if free != "all" and head != free:
                mask[..., 1:] = False

    assert space.forced(possible).tolist() == [True, False, False]
    assert ChoiceSpace({"a": 1}).full_masks(2, CPU).forced.tolist() == [True, True]


def test_every_weight_of_the_heads_learns_and_a_new_policy_prefers_nothing() -> None:
    torch.manual_seed(0)
    space = SPACES["conditioned"]
    heads = Heads(8, space)
    drawn = heads.distribution(torch.randn(64, 8), space.full_masks(64, CPU))

    assert drawn.entropy()[0].min() > 0.99
    drawn.log_prob(drawn.sample(torch.Generator().manual_seed(0))).sum().backward()
    assert all(weight.grad.any() for weight in heads.parameters())


@pytest.mark.parametrize(
    ("sizes", "given", "message"),
    [
        ({}, {}, "at least one choice"),
        ({"a": 0}, {}, "at least one choice"),
        ({"a": 2, "b": 2}, {"a": "b"}, "'a' cannot depend on 'b'"),
        ({"a": 2}, {"a": "a"}, "'a' cannot depend on 'a'"),
        ({"a": 2}, {"c": "a"}, "'c' cannot depend on 'a'"),
    ],
)
def test_an_impossible_order_of_heads_is_refused(sizes: dict[str, int], given: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ChoiceSpace(sizes, given)
