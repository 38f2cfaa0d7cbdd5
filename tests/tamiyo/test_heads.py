"""The factored distribution against brute force over all legal actions."""

import math
from itertools import product

import pytest
import torch
from torch import Tensor

from esper_lightning.envs import HEADS, Action, Masks, Op
from esper_lightning.tamiyo.heads import FactoredDistribution, Heads, Logits, normalised_entropy

SLOTS, BLUEPRINTS, TEMPOS = 3, 4, 2


def random_masks(rows: int, seed: int) -> Masks:
    """Waiting is always possible, and something grows in every slot; all else by chance."""
    generator = torch.Generator().manual_seed(seed)
    slot = torch.rand(rows, len(Op), SLOTS, generator=generator) < 0.5
    slot[:, Op.WAIT] = True
    blueprint = torch.rand(rows, SLOTS, BLUEPRINTS, generator=generator) < 0.6
    blueprint[..., 0] |= ~blueprint.any(-1)
    return Masks(slot, blueprint)


def random_logits(rows: int, seed: int, spread: float = 1.5) -> Logits:
    generator = torch.Generator().manual_seed(seed)

    def numbers(*shape: int) -> Tensor:
        return spread * torch.randn(rows, *shape, generator=generator)

    ops = len(Op)
    return Logits(numbers(ops), numbers(ops, SLOTS), numbers(SLOTS, BLUEPRINTS), numbers(SLOTS, TEMPOS))


def legal_actions(masks: Masks, row: int) -> list[tuple[int, int, int, int]]:
    """Every different decision; heads that do not matter are 0."""
    actions = [(int(Op.WAIT), 0, 0, 0)]
    for op, k in product((Op.CULL, Op.FOSSILIZE), range(SLOTS)):
        if masks.slot[row, op, k]:
            actions.append((int(op), k, 0, 0))
    for k, p, m in product(range(SLOTS), range(BLUEPRINTS), range(TEMPOS)):
        if masks.slot[row, Op.GERMINATE, k] and masks.blueprint[row, k, p]:
            actions.append((int(Op.GERMINATE), k, p, m))
    return actions


def log_probs(distribution: FactoredDistribution, row: int, actions: list[tuple[int, int, int, int]]) -> Tensor:
    """Of several actions in one environment."""
    rows = distribution.log_probs.op.shape[0]
    return torch.stack([distribution.log_prob(Action(*torch.tensor(a)[:, None].expand(4, rows)))[row] for a in actions])


@pytest.mark.parametrize("seed", range(4))
def test_the_probabilities_of_all_legal_actions_sum_to_1(seed: int) -> None:
    masks = random_masks(5, seed)
    distribution = FactoredDistribution(random_logits(5, seed), masks)

    for row in range(5):
        total = log_probs(distribution, row, legal_actions(masks, row)).double().exp().sum().item()
        assert total == pytest.approx(1.0, abs=1e-5)


def test_an_impossible_action_has_probability_0_exactly() -> None:
    masks = random_masks(4, seed=1)
    # Logits that would love what is impossible.
    logits = Logits(*(50.0 * part for part in random_logits(4, seed=1)))
    distribution = FactoredDistribution(logits, masks)

    for row in range(4):
        legal = set(legal_actions(masks, row))
        germinations = product([int(Op.GERMINATE)], range(SLOTS), range(BLUEPRINTS), range(TEMPOS))
        rest = product([int(Op.CULL), int(Op.FOSSILIZE)], range(SLOTS), [0], [0])
        impossible = [action for action in (*germinations, *rest) if action not in legal]
        assert impossible
        assert not log_probs(distribution, row, impossible).exp().any()


def test_actions_are_drawn_as_often_as_they_are_likely() -> None:
    masks, draws = random_masks(1, seed=2), 20_000
    masks.slot[0, Op.GERMINATE] = torch.tensor([True, False, True])
    many = Masks(*(mask.expand(draws, *mask.shape[1:]) for mask in masks))
    logits = Logits(*(part.expand(draws, *part.shape[1:]) for part in random_logits(1, seed=2)))

    drawn = torch.stack(FactoredDistribution(logits, many).sample(torch.Generator().manual_seed(0)), 1).tolist()

    legal = legal_actions(masks, 0)
    one = FactoredDistribution(random_logits(1, seed=2), masks)
    probabilities = log_probs(one, 0, legal).double().exp()
    assert {tuple(action) for action in drawn} <= set(legal)
    for action, p in zip(legal, probabilities.tolist(), strict=True):
        deviation = math.sqrt(p * (1 - p) / draws)
        assert abs(drawn.count(list(action)) / draws - p) <= 5 * deviation, action


def test_draws_are_reproducible_and_keep_the_shape() -> None:
    logits = Logits(*(part.view(2, 6, *part.shape[1:]) for part in random_logits(12, seed=0)))
    masks = Masks(*(mask.view(2, 6, *mask.shape[1:]) for mask in random_masks(12, seed=0)))
    distribution = FactoredDistribution(logits, masks)

    one, same, other = (distribution.sample(torch.Generator().manual_seed(seed)) for seed in (3, 3, 4))

    assert all(head.shape == (2, 6) for head in one)
    assert all(torch.equal(a, b) for a, b in zip(one, same, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("seed", range(4))
def test_the_mode_is_legal_and_the_likeliest_choice_at_every_turn(seed: int) -> None:
    masks = random_masks(8, seed)
    logits = random_logits(8, seed, spread=3.0)
    mode = FactoredDistribution(logits, masks).mode()

    for row, action in enumerate(zip(*(head.tolist() for head in mode), strict=True)):
        assert action in legal_actions(masks, row)
        op, slot, blueprint, tempo = action
        possible = [float(logits.op[row, o]) if masks.slot[row, o].any() else -math.inf for o in Op]
        assert op == possible.index(max(possible))
        if op != Op.WAIT:
            among = logits.slot[row, op][masks.slot[row, op]]
            assert logits.slot[row, op, slot] == among.max()
        if op == Op.GERMINATE:
            among = logits.blueprint[row, slot][masks.blueprint[row, slot]]
            assert logits.blueprint[row, slot, blueprint] == among.max()
            assert logits.tempo[row, slot, tempo] == logits.tempo[row, slot].max()


Probabilities = dict[tuple[int, ...], float]
"""Of every legal action (op, slot, blueprint, tempo) in one environment."""


def likelihood(of: Probabilities, prefix: tuple[int, ...]) -> float:
    """That an action begins with `prefix`."""
    return sum(p for action, p in of.items() if action[: len(prefix)] == prefix)


def evenness(of: Probabilities, prefix: tuple[int, ...], head: str) -> float:
    """Entropy of a head's choices after `prefix`, over the greatest that so many choices can have."""
    choices: dict[int, float] = {}
    for action, p in of.items():
        if action[: len(prefix)] == prefix:
            choice = action[HEADS.index(head)]
            choices[choice] = choices.get(choice, 0.0) + p / likelihood(of, prefix)
    if len(choices) == 1:
        return 0.0
    return -sum(p * math.log(p) for p in choices.values()) / math.log(len(choices))


@pytest.mark.parametrize("seed", range(6))
def test_entropy_is_that_of_each_head_averaged_over_what_may_come_before_it(seed: int) -> None:
    masks = random_masks(5, seed)
    distribution = FactoredDistribution(random_logits(5, seed), masks)
    entropy, share = distribution.entropy()

    for row in range(5):
        actions = legal_actions(masks, row)
        of: Probabilities = dict(
            zip(actions, log_probs(distribution, row, actions).double().exp().tolist(), strict=True)
        )
        before = {
            "op": [()],
            "slot": [(op,) for op in {action[0] for action in actions} - {Op.WAIT}],
            "blueprint": list({action[:2] for action in actions if action[0] == Op.GERMINATE}),
        }
        before["tempo"] = before["blueprint"]
        for h, head in enumerate(HEADS):
            matters = sum(likelihood(of, prefix) for prefix in before[head])
            assert share[row, h].item() == pytest.approx(matters, abs=1e-5)
            if before[head]:
                mean = sum(likelihood(of, prefix) * evenness(of, prefix, head) for prefix in before[head]) / matters
                assert entropy[row, h].item() == pytest.approx(mean, abs=1e-4)


def test_entropy_is_0_with_one_choice_and_1_where_all_are_alike() -> None:
    one_choice = torch.tensor([False, True, False])
    assert normalised_entropy(torch.tensor([-1e4, 0.0, -1e4]), one_choice).item() == 0.0
    for n in (2, 3, 7):
        alike = torch.full((n,), 1 / n).log()
        assert normalised_entropy(alike, torch.ones(n, dtype=torch.bool)).item() == pytest.approx(1.0)
    assert normalised_entropy(torch.full((3,), 1 / 3).log(), torch.zeros(3, dtype=torch.bool)).item() == 0.0


def test_where_only_waiting_is_possible_there_is_nothing_to_decide() -> None:
    masks = random_masks(2, seed=0)
    masks.slot[:, 1:] = False
    logits = Logits(*(part.requires_grad_() for part in random_logits(2, seed=0)))
    distribution = FactoredDistribution(logits, masks)

    action = distribution.sample(torch.Generator().manual_seed(0))
    entropy, share = distribution.entropy()

    assert masks.forced.all()
    assert all(not head.any() for head in action)
    assert distribution.log_prob(action).tolist() == [0.0, 0.0]
    assert not (entropy * share).any()
    # And no gradient, not even one that is not a number.
    (distribution.log_prob(action).sum() + (entropy * share).sum()).backward()
    assert all(not part.grad.any() for part in logits)


def test_untrained_heads_find_every_choice_about_as_likely() -> None:
    torch.manual_seed(0)
    heads = Heads(16, SLOTS, BLUEPRINTS, TEMPOS)
    logits = heads(torch.randn(9, 16))

    assert [tuple(part.shape) for part in logits] == [(9, 4), (9, 4, SLOTS), (9, SLOTS, BLUEPRINTS), (9, SLOTS, TEMPOS)]
    assert all(part.abs().max() < 0.1 for part in logits)
    # But the choices of a head depend on their context from the start.
    assert not torch.equal(logits.blueprint[:, 0], logits.blueprint[:, 1])


def test_logits_in_half_precision_make_a_sound_distribution() -> None:
    masks = random_masks(3, seed=5)
    half = Logits(*(part.half() for part in random_logits(3, seed=5)))
    distribution = FactoredDistribution(half, masks)

    for row in range(3):
        assert log_probs(distribution, row, legal_actions(masks, row)).exp().sum().item() == pytest.approx(1, abs=1e-5)
