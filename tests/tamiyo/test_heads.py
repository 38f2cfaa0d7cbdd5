"""Factored action distribution, compared with brute force over all legal actions."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from esper_lightning.envs import HEADS, Action, ActionConfig, Masks, Op
from esper_lightning.tamiyo.heads import Heads, HostDistribution, normalised_entropy
from tests.decisions import WAIT, Row, act, advance, cull, decide, fossilize, germinate, set_alpha
from tests.tamiyo.enumeration import (
    ALL,
    DEFAULT,
    SLOTS,
    SPEEDS,
    STYLES,
    TEMPOS,
    Sizes,
    every_action,
    legal_actions,
    log_probs,
    probabilities,
    random_logits,
    random_masks,
    true,
)

SOME = {
    "all heads": ALL,
    "as by default": DEFAULT,
    "ramps of one curve": ALL | {"curve": 1, "style": 1},
    "slow culls alone": ALL | {"op": 5, "target": 1},
}
CALLED_FOR: dict[str, set[Op]] = {
    "op": set(Op),
    "slot": set(Op) - {Op.WAIT},
    "blueprint": {Op.GERMINATE},
    "style": {Op.GERMINATE},
    "tempo": {Op.GERMINATE},
    "target": {Op.SET_ALPHA},
    "speed": {Op.CULL, Op.SET_ALPHA},
    "curve": {Op.CULL, Op.SET_ALPHA},
}

several = pytest.mark.parametrize("sizes", SOME.values(), ids=list(SOME))


@several
@pytest.mark.parametrize("seed", range(3))
def test_the_probabilities_of_all_legal_actions_sum_to_1(sizes: Sizes, seed: int) -> None:
    masks, logits = random_masks(5, seed, sizes), random_logits(5, seed, sizes)

    for row in range(5):
        assert sum(probabilities(logits, masks, row, sizes).values()) == pytest.approx(1.0, abs=1e-5)


def softmax_share(logits: Tensor, possible: list[int], choice: int) -> float:
    """Return the softmax probability among the possible choices, computed in Python."""
    return math.exp(logits[choice]) / sum(math.exp(logits[other]) for other in possible)


@pytest.mark.parametrize("seed", range(3))
def test_a_decision_is_as_likely_as_its_choices_one_after_the_other(seed: int) -> None:
    masks, logits = random_masks(3, seed), random_logits(3, seed)

    for row in range(3):
        t = {head: table[row].double() for head, table in logits.items()}
        slot, blueprint, target, speed, curve, _ = (mask[row] for mask in masks)
        for action, p in probabilities(logits, masks, row).items():
            op, k, b, s, m, a, v, c = action
            expected = softmax_share(t["op"][0], true(slot.any(1)), op)
            if op != Op.WAIT:
                expected *= softmax_share(t["slot"][op], true(slot[op]), k)
            if op == Op.GERMINATE:
                expected *= softmax_share(t["blueprint"][k], true(blueprint[k]), b)
                expected *= softmax_share(t["style"][k], list(range(STYLES)), s) * softmax_share(
                    t["tempo"][k], list(range(TEMPOS)), m
                )
            if op == Op.SET_ALPHA:
                expected *= softmax_share(t["target"][k], true(target[k]), a)
            if op in (Op.CULL, Op.SET_ALPHA):
                expected *= softmax_share(t["speed"][op * SLOTS + k], true(speed[op, k]), v)
                expected *= softmax_share(t["curve"][v], true(curve[v]), c)
            assert p == pytest.approx(expected, rel=1e-4)


def test_an_impossible_action_has_probability_0_exactly() -> None:
    masks = random_masks(3, seed=1)
    # Logits that strongly prefer impossible choices.
    logits = random_logits(3, seed=1, spread=50.0)

    def said(row: Row) -> Row:
        chosen = dict(zip(HEADS, row, strict=True))
        return tuple(chosen[head] if row[0] in CALLED_FOR[head] else 0 for head in HEADS)

    ops = set()
    for row in range(3):
        possible = set(legal_actions(masks, row))
        impossible = [action for action in every_action(ALL) if said(action) not in possible]
        assert not log_probs(logits, masks, row, impossible).exp().any()
        ops |= {action[0] for action in impossible}
    assert ops == set(Op) - {Op.WAIT}


@several
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e30, -1e30, -1e4])
def test_whatever_the_logits_are_only_possible_actions_are_drawn(sizes: Sizes, bad: float) -> None:
    masks, logits = random_masks(64, seed=3, sizes=sizes), random_logits(64, seed=3, sizes=sizes)
    logits = {head: torch.full_like(table, bad) for head, table in logits.items()}

    drawn = HostDistribution(logits, masks).sample(torch.Generator().manual_seed(0))

    for row, action in enumerate(zip(*(part.tolist() for part in drawn), strict=True)):
        assert action in set(legal_actions(masks, row, sizes)), f"{action} in row {row}"


def test_a_row_of_nan_does_not_change_what_is_drawn_in_the_others() -> None:
    masks, logits = random_masks(8, seed=4), random_logits(8, seed=4)
    broken = {head: table.clone() for head, table in logits.items()}
    for table in broken.values():
        table[5] = math.nan

    clean, drawn = (
        torch.stack(HostDistribution(tables, masks).sample(torch.Generator().manual_seed(1)), -1)
        for tables in (logits, broken)
    )

    others = [0, 1, 2, 3, 4, 6, 7]
    assert torch.equal(drawn[others], clean[others])
    assert HostDistribution(broken, masks).log_prob(Action(*drawn.unbind(-1)))[5].isnan(), "nothing is learned from it"


def test_actions_are_drawn_as_often_as_they_are_likely() -> None:
    masks, logits, draws = random_masks(1, seed=2), random_logits(1, seed=2, spread=0.7), 40_000
    masks.slot[0] = torch.tensor([[True] * 3, [True, False, True], *[[False, True, True]] * 4])
    many = Masks(*(mask.expand(draws, *mask.shape[1:]) for mask in masks))
    tables = {head: table.expand(draws, *table.shape[1:]) for head, table in logits.items()}

    drawn = torch.stack(HostDistribution(tables, many).sample(torch.Generator().manual_seed(0)), 1).tolist()

    expected = probabilities(logits, masks, 0)
    counts = dict.fromkeys(expected, 0)
    for action in drawn:
        counts[tuple(action)] += 1  # raises if the action is not legal
    for action, p in expected.items():
        assert abs(counts[action] / draws - p) <= 5 * math.sqrt(p * (1 - p) / draws), action


def test_draws_are_reproducible_and_keep_the_shape() -> None:
    logits = {head: table.view(2, 6, *table.shape[1:]) for head, table in random_logits(12, seed=0).items()}
    masks = Masks(*(mask.view(2, 6, *mask.shape[1:]) for mask in random_masks(12, seed=0)))
    distribution = HostDistribution(logits, masks)

    one, same, other = (distribution.sample(torch.Generator().manual_seed(seed)) for seed in (3, 3, 4))

    assert all(head.shape == (2, 6) for head in one)
    assert all(torch.equal(a, b) for a, b in zip(one, same, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_by_default_the_four_heads_draw_in_turn_and_the_others_draw_nothing() -> None:
    rows = torch.arange(50)
    masks, logits = random_masks(50, seed=3, sizes=DEFAULT), random_logits(50, seed=3, sizes=DEFAULT)
    generator, by_hand = torch.Generator().manual_seed(5), torch.Generator().manual_seed(5)

    def draw(table: Tensor, possible: Tensor) -> Tensor:
        chances = table.masked_fill(~possible, -math.inf).softmax(-1).nan_to_num(1.0)  # uniform if none is possible
        return torch.multinomial(chances, 1, generator=by_hand)[:, 0]

    action = HostDistribution(logits, masks).sample(generator)

    op = draw(logits["op"][:, 0], masks.op)
    slot = draw(logits["slot"][rows, op], masks.slot[rows, op])
    blueprint = draw(logits["blueprint"][rows, slot], masks.blueprint[rows, slot])
    tempo = draw(logits["tempo"][rows, slot], torch.ones(50, TEMPOS, dtype=torch.bool))
    grows = op == Op.GERMINATE
    assert torch.equal(action.op, op)
    assert torch.equal(action.slot, slot * (op != Op.WAIT))
    assert torch.equal(action.blueprint, blueprint * grows) and torch.equal(action.tempo, tempo * grows)
    assert not any(getattr(action, head).any() for head in ("style", "target", "speed", "curve"))
    assert torch.equal(generator.get_state(), by_hand.get_state())


@pytest.mark.parametrize("seed", range(4))
def test_the_mode_is_legal_and_the_likeliest_choice_at_every_turn(seed: int) -> None:
    masks = random_masks(8, seed)
    logits = random_logits(8, seed, spread=3.0)
    mode = HostDistribution(logits, masks).mode()

    def best(table: Tensor, possible: Tensor | None = None) -> int:
        return max(true(possible) if possible is not None else range(len(table)), key=lambda i: table[i].item())

    for row, action in enumerate(zip(*(head.tolist() for head in mode), strict=True)):
        t = {head: table[row] for head, table in logits.items()}
        slot, blueprint, target, speed, curve, _ = (mask[row] for mask in masks)
        op = best(t["op"][0], slot.any(1))
        k = best(t["slot"][op], slot[op])
        change = {}
        if op in (Op.CULL, Op.SET_ALPHA):
            change["speed"] = best(t["speed"][op * SLOTS + k], speed[op, k])
            change["curve"] = best(t["curve"][change["speed"]], curve[change["speed"]])
        expected = {
            Op.WAIT: WAIT,
            Op.GERMINATE: germinate(k, best(t["blueprint"][k], blueprint[k]), best(t["tempo"][k]), best(t["style"][k])),
            Op.CULL: decide(Op.CULL, slot=k, **change),
            Op.FOSSILIZE: fossilize(k),
            Op.ADVANCE: advance(k),
            Op.SET_ALPHA: decide(Op.SET_ALPHA, slot=k, target=best(t["target"][k], target[k]), **change),
        }
        assert action == expected[Op(op)]
        assert action in legal_actions(masks, row)


GIVEN: dict[str, tuple[str, ...]] = dict.fromkeys(HEADS, ("op", "slot")) | {
    "op": (),
    "slot": ("op",),
    "curve": ("op", "slot", "speed"),
}
"""Heads on which each head's choice may depend."""


def conditional(of: dict[Row, float], head: str) -> list[tuple[float, dict[int, float]]]:
    """Return a head's distribution in each situation that uses it, with the probability of the situation."""
    situations: dict[tuple[int, ...], dict[int, float]] = {}
    for row, p in of.items():
        action = dict(zip(HEADS, row, strict=True))
        if action["op"] in CALLED_FOR[head]:
            choices = situations.setdefault(tuple(action[name] for name in GIVEN[head]), {})
            choices[action[head]] = choices.get(action[head], 0.0) + p
    totals = [sum(choices.values()) for choices in situations.values()]
    return [
        (total, {choice: p / total for choice, p in choices.items()})
        for total, choices in zip(totals, situations.values(), strict=True)
    ]


def relative_entropy(choices: dict[int, float]) -> float:
    """Return the entropy relative to that of a uniform distribution over as many choices."""
    if len(choices) == 1:
        return 0.0
    return -sum(p * math.log(p) for p in choices.values()) / math.log(len(choices))


@several
@pytest.mark.parametrize("seed", range(3))
def test_entropy_is_that_of_each_head_averaged_over_what_may_come_before_it(sizes: Sizes, seed: int) -> None:
    masks, logits = random_masks(5, seed, sizes), random_logits(5, seed, sizes)
    distribution = HostDistribution(logits, masks)
    entropy, share = distribution.entropy()
    free_share = distribution.choice_probability()

    assert distribution.heads == tuple(head for head in HEADS if head in logits)
    for row in range(5):
        of = probabilities(logits, masks, row, sizes)
        for h, head in enumerate(distribution.heads):
            situations = conditional(of, head)
            free = sum(total for total, choices in situations if len(choices) > 1)
            assert free_share[row, h].item() == pytest.approx(free, abs=1e-5), head
            if head == "curve":  # a change at once has no curve
                situations = [(total, choices) for total, choices in situations if len(choices) > 1]
            matters = sum(total for total, _ in situations)
            assert share[row, h].item() == pytest.approx(matters, abs=1e-5), head
            if situations:
                mean = sum(total * relative_entropy(choices) for total, choices in situations) / matters
                assert entropy[row, h].item() == pytest.approx(mean, abs=1e-4), head


def test_curves_without_speeds_are_no_trouble() -> None:
    actions = ActionConfig(set_alpha=True, speeds=[0], curves=["linear", "cosine"])
    sizes = actions.make_space(["block1", "block2"], ["norm", "conv_light"]).sizes
    logits = random_logits(2, seed=0, sizes=sizes)

    distribution = HostDistribution(logits, random_masks(2, seed=0, sizes=sizes))
    entropy, _ = distribution.entropy()

    assert "curve" not in distribution.heads
    assert entropy.isfinite().all()


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
    logits = {head: table.requires_grad_() for head, table in random_logits(2, seed=0).items()}
    distribution = HostDistribution(logits, masks)

    action = distribution.sample(torch.Generator().manual_seed(0))
    entropy, share = distribution.entropy()

    assert masks.forced.all()
    assert not distribution.choice_probability().any()
    assert all(not head.any() for head in action)
    assert distribution.log_prob(action).tolist() == [0.0, 0.0]
    assert not (entropy * share).any()
    # There is no gradient either, not even NaN.
    (distribution.log_prob(action).sum() + (entropy * share).sum()).backward()
    assert all(not table.grad.any() for table in logits.values())


@pytest.mark.parametrize("change", [cull(1), set_alpha(1, target=2)], ids=["cull", "set alpha"])
def test_a_change_at_once_has_one_curve_and_learns_nothing_of_it(change: Row) -> None:
    masks = random_masks(1, seed=4)
    masks.slot[:] = True
    masks.target[:] = True
    masks.speed[:] = torch.arange(SPEEDS) == 0  # a change at once or none at all
    straight = random_logits(1, seed=4)
    bent = straight | {"curve": straight["curve"] + torch.tensor([-20.0, 20.0])}
    straight["curve"].requires_grad_()

    ours, theirs = HostDistribution(straight, masks), HostDistribution(bent, masks)

    assert torch.equal(ours.log_prob(act(change)), theirs.log_prob(act(change)))
    assert all(torch.equal(a, b) for a, b in zip(ours.entropy(), theirs.entropy(), strict=True))
    assert ours.entropy()[0][0, HEADS.index("curve")] == 0
    entropy, matters = ours.entropy()
    (ours.log_prob(act(change)).sum() + (entropy * matters).sum()).backward()
    assert not straight["curve"].grad.any()


FLOOR = {"op": 0.05, "slot": 0.1, "blueprint": 0.2, "curve": 0.3}


@pytest.mark.parametrize("seed", range(3))
def test_no_possible_choice_is_less_likely_than_the_floor_of_its_head(seed: int) -> None:
    """The tables compared with their definition; the logits are so far apart that without floors p goes down to 0."""
    masks, logits = random_masks(4, seed), random_logits(4, seed, spread=30.0)
    without, floored = HostDistribution(logits, masks), HostDistribution(logits, masks, FLOOR)

    for head, mask in floored.mask_tables.items():
        before, after = without.log_probs[head].exp().double(), floored.log_probs[head].exp().double()
        floor, count = FLOOR.get(head, 0.0), mask.sum(-1, keepdim=True)
        expected = torch.where(mask & (count > 1), floor + (1 - count * floor) * before, before)
        torch.testing.assert_close(after, expected, rtol=1e-5, atol=1e-7)
        assert (after[mask & (count > 1)] >= floor * (1 - 1e-6)).all()
        assert not floored.log_probs[head][mask & (count == 1)].any(), "the only choice stays certain"
        assert not after[~mask & (count > 0)].any()
    assert all(torch.equal(a, b) for a, b in zip(without.mode(), floored.mode(), strict=True))


@pytest.mark.parametrize(
    ("floors", "message"),
    [
        ({"op": 0.25}, r"op has 4 choices, so its floor must lie in \(0, 0\.25\), got 0\.25"),
        ({"op": 0.0}, r"op has 4 choices, so its floor must lie in"),
        ({"style": 0.1}, r"there is no head 'style' with a choice; there are op, slot, blueprint, tempo"),
    ],
)
def test_a_floor_that_no_distribution_can_have_is_refused(floors: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=f"policy.probability_floors: {message}"):
        Heads(16, SimpleNamespace(sizes=DEFAULT), floors)


def parameters_by_head(sizes: Sizes) -> dict[str, int]:
    heads = Heads(16, SimpleNamespace(sizes=sizes))
    return {head: sum(p.numel() for p in table.parameters()) for head, table in heads.tables.items()}


@pytest.mark.parametrize("head", ["style", "target", "speed", "curve"])
def test_a_head_with_one_choice_is_not_there(head: str) -> None:
    whole, without = parameters_by_head(ALL), parameters_by_head(ALL | {head: 1})

    assert set(whole) == set(HEADS)
    assert set(without) == set(HEADS) - {head}
    if head != "speed":  # the other heads are unchanged; a curve depends on the speed
        assert without == {name: number for name, number in whole.items() if name != head}


def test_the_default_policy_has_four_heads() -> None:
    space = ActionConfig().make_space(["block1", "block2"], ["norm", "conv_light"])

    assert list(parameters_by_head(space.sizes)) == ["op", "slot", "blueprint", "tempo"]
    # Slot, blueprint and tempo always have a head, even with a single choice.
    one = ActionConfig(tempos={"FAST": 2}).make_space(["block1"], ["norm"])
    assert list(parameters_by_head(one.sizes)) == ["op", "slot", "blueprint", "tempo"]


@several
def test_untrained_heads_find_every_choice_about_as_likely(sizes: Sizes) -> None:
    torch.manual_seed(0)
    logits = Heads(16, SimpleNamespace(sizes=sizes))(torch.randn(9, 16))
    contexts = {"op": 1, "slot": sizes["op"], "speed": sizes["op"] * SLOTS, "curve": SPEEDS}

    for head, table in logits.items():
        assert table.shape == (9, contexts.get(head, SLOTS), sizes[head])
        assert table.abs().max() < 0.1
        # But the choices of a head depend on their context from the start.
        assert head == "op" or not torch.equal(table[:, 0], table[:, 1])


def test_logits_in_half_precision_make_a_sound_distribution() -> None:
    masks = random_masks(3, seed=5)
    half = {head: table.half() for head, table in random_logits(3, seed=5).items()}

    for row in range(3):
        assert sum(probabilities(half, masks, row).values()) == pytest.approx(1.0, abs=1e-5)
        assert isinstance(HostDistribution(half, masks).mode(), Action)
