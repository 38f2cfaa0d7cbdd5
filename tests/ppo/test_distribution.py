"""Factored action distributions, compared with enumeration of all possible actions."""

import math
from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor

from esper_lightning.envs import HEADS, Action, HostPool, Masks, Op
from esper_lightning.envs.vector_env import ChoiceAction, ChoiceSpace
from esper_lightning.ppo.distribution import (
    ChoiceDistribution,
    HeadTables,
    HostDistribution,
    host_table_shapes,
    uniform_distribution,
)
from tests.conftest import FREE
from tests.decisions import CPU, WAIT, Row, act, cull, fossilize, germinate

ALL = dict(zip(HEADS, (len(Op), 3, 4, 2), strict=True))
USED_BY = {op: set(HEADS if op is Op.GERMINATE else HEADS[: 1 + (op is not Op.WAIT)]) for op in Op}


def random_masks(rows: int, seed: int) -> Masks:
    """Return random masks in which waiting and one blueprint per slot are always possible."""
    generator = torch.Generator().manual_seed(seed)
    slot, blueprint = (torch.rand(rows, *shape, generator=generator) < 0.6 for shape in ((len(Op), 3), (3, 4)))
    slot[:, Op.WAIT] = True
    blueprint[..., 0] |= ~blueprint.any(-1)
    return Masks(slot, blueprint, torch.zeros(rows, dtype=torch.bool))


def random_logits(rows: int, seed: int, spread: float = 1.5) -> HeadTables:
    generator = torch.Generator().manual_seed(seed)
    shapes = host_table_shapes(ALL).items()
    return {head: spread * torch.randn(rows, *shape, generator=generator) for head, shape in shapes}


def possible_actions(masks: Masks, row: int) -> list[Row]:
    """Return every distinct possible action; heads that do not matter are 0."""
    actions = [WAIT]
    for op, k in masks.slot[row].nonzero().tolist():
        if op == Op.GERMINATE:
            blueprints = masks.blueprint[row, k].nonzero().flatten().tolist()
            actions += [germinate(k, b, t) for b, t in product(blueprints, range(ALL["tempo"]))]
        elif op != Op.WAIT:
            actions.append((op, k, 0, 0))
    return actions


def probabilities(logits: HeadTables, masks: Masks, row: int, actions: list[Row]) -> dict[Row, float]:
    """Return the probabilities of several actions in one environment."""
    n = len(actions)
    tables = {head: table[row].expand(n, *table.shape[1:]) for head, table in logits.items()}
    distribution = HostDistribution(tables, Masks(*(mask[row].expand(n, *mask.shape[1:]) for mask in masks)))
    return dict(zip(actions, distribution.log_prob(act(*actions)).double().exp().tolist(), strict=True))


def share(logits: Tensor, choice: int, possible: Tensor | None = None) -> float:
    """Return the softmax probability among the possible choices, computed in Python."""
    among = range(len(logits)) if possible is None else possible.nonzero().flatten().tolist()
    return math.exp(logits[choice]) / sum(math.exp(logits[other]) for other in among)


@pytest.mark.parametrize("seed", range(2))
def test_an_action_is_as_likely_as_its_choices_one_after_the_other(seed: int) -> None:
    masks, logits = random_masks(3, seed), random_logits(3, seed)

    for row in range(3):
        t, slot, blueprint = {head: table[row] for head, table in logits.items()}, masks.slot[row], masks.blueprint[row]
        found = probabilities(logits, masks, row, possible_actions(masks, row))
        assert sum(found.values()) == pytest.approx(1.0, abs=1e-5)
        for (op, k, b, m), p in found.items():
            expected = share(t["op"][0], op, slot.any(1))
            if op != Op.WAIT:
                expected *= share(t["slot"][op], k, slot[op])
            if op == Op.GERMINATE:
                expected *= share(t["blueprint"][k], b, blueprint[k]) * share(t["tempo"][k], m)
            assert p == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e30, -1e30, -1e4])
def test_whatever_the_logits_are_only_possible_actions_are_drawn(bad: float) -> None:
    masks = random_masks(64, seed=3)
    logits = {head: torch.full_like(table, bad) for head, table in random_logits(64, 3).items()}

    drawn = HostDistribution(logits, masks).sample(torch.Generator().manual_seed(0))

    for row, action in enumerate(zip(*(part.tolist() for part in drawn), strict=True)):
        assert action in possible_actions(masks, row), f"{action} in row {row}"


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


def test_heads_draw_in_turn_and_reproducibly() -> None:
    rows, masks, logits = torch.arange(50), random_masks(50, seed=3), random_logits(50, 3)
    generator, by_hand = torch.Generator().manual_seed(5), torch.Generator().manual_seed(5)

    def draw(table: Tensor, possible: Tensor) -> Tensor:
        chances = table.masked_fill(~possible, -math.inf).softmax(-1).nan_to_num(1.0)  # uniform if none is possible
        return torch.multinomial(chances, 1, generator=by_hand)[:, 0]

    action = HostDistribution(logits, masks).sample(generator)

    op = draw(logits["op"][:, 0], masks.op)
    slot = draw(logits["slot"][rows, op], masks.slot[rows, op])
    blueprint = draw(logits["blueprint"][rows, slot], masks.blueprint[rows, slot])
    tempo = draw(logits["tempo"][rows, slot], torch.ones(50, 2, dtype=torch.bool))
    grows = op == Op.GERMINATE
    expected = (op, slot * (op != Op.WAIT), blueprint * grows, tempo * grows)
    assert all(torch.equal(part, other) for part, other in zip(action, expected, strict=True))
    assert torch.equal(generator.get_state(), by_hand.get_state())


@pytest.mark.parametrize("seed", range(3))
def test_the_mode_is_possible_and_the_likeliest_choice_at_every_turn(seed: int) -> None:
    masks, logits = random_masks(8, seed), random_logits(8, seed, spread=3.0)
    mode = HostDistribution(logits, masks).mode()

    for row, action in enumerate(zip(*(head.tolist() for head in mode), strict=True)):
        t = {head: table[row] for head, table in logits.items()}
        op = int(t["op"][0].masked_fill(~masks.op[row], -math.inf).argmax())
        k = int(t["slot"][op].masked_fill(~masks.slot[row, op], -math.inf).argmax())
        b = int(t["blueprint"][k].masked_fill(~masks.blueprint[row, k], -math.inf).argmax())
        grown = germinate(k, b, int(t["tempo"][k].argmax()))
        assert action == {Op.WAIT: WAIT, Op.GERMINATE: grown}.get(Op(op), (op, k, 0, 0))
        assert action in possible_actions(masks, row)


@pytest.mark.parametrize("seed", range(2))
def test_entropy_is_that_of_each_head_averaged_over_what_may_come_before_it(seed: int) -> None:
    masks, logits = random_masks(5, seed), random_logits(5, seed)
    distribution = HostDistribution(logits, masks)
    (entropy, matters), free = distribution.entropy(), distribution.choice_probability()

    for row in range(5):
        found = probabilities(logits, masks, row, possible_actions(masks, row))
        for h, head in enumerate(distribution.heads):
            given = {"op": 0, "slot": 1}.get(head, 2)  # heads on which this one depends
            situations: dict[Row, dict[int, float]] = {}
            for action, p in found.items():
                if head in USED_BY[Op(action[0])]:
                    choices = situations.setdefault(action[:given], {})
                    choice = action[HEADS.index(head)]
                    choices[choice] = choices.get(choice, 0.0) + p
            total = sum(sum(choices.values()) for choices in situations.values())
            several = [choices for choices in situations.values() if len(choices) > 1]
            assert matters[row, h].item() == pytest.approx(total, abs=1e-5), head
            assert free[row, h].item() == pytest.approx(sum(sum(c.values()) for c in several), abs=1e-5), head
            mean = sum(
                -p * math.log(p / sum(choices.values())) / math.log(len(choices))
                for choices in several
                for p in choices.values()
            )
            assert not situations or entropy[row, h].item() == pytest.approx(mean / total, abs=1e-4), head


def test_where_only_waiting_is_possible_there_is_nothing_to_decide_and_nothing_to_learn() -> None:
    masks = random_masks(2, seed=0)
    masks.slot[:, 1:] = False
    logits = {head: table.requires_grad_() for head, table in random_logits(2, seed=0).items()}
    distribution = HostDistribution(logits, masks)

    action = distribution.sample(torch.Generator().manual_seed(0))
    entropy, relevance = distribution.entropy()

    assert masks.forced.all() and not distribution.choice_probability().any()
    assert all(not head.any() for head in action) and distribution.log_prob(action).tolist() == [0.0, 0.0]
    (distribution.log_prob(action).sum() + (entropy * relevance).sum()).backward()
    assert all(not table.grad.any() for table in logits.values()), "not even NaN"


@pytest.mark.parametrize("row", [WAIT, germinate(0), cull(0), fossilize(0)])
def test_only_heads_that_matter_get_a_gradient(make_pool: Callable[..., HostPool], row: Row) -> None:
    """F23: the log-probability of an op reaches only the heads that have an effect on it."""
    pool = make_pool(1, **FREE)
    everything = pool.masks._replace(slot=torch.ones_like(pool.masks.slot))
    distribution = uniform_distribution(pool.space.sizes, everything)
    tables = {head: table.requires_grad_() for head, table in distribution.log_probs.items()}
    HostDistribution(tables, everything).log_prob(act(row)).sum().backward()

    assert [head for head in HEADS if tables[head].grad.any()] == [h for h in HEADS if h in USED_BY[Op(row[0])]]


SPACES = {
    "one head": ChoiceSpace({"action": 5}),
    "independent": ChoiceSpace({"a": 3, "b": 4}),
    "masked": ChoiceSpace({"a": 3, "b": 4, "c": 2}, masked=True),
}


@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)
def test_choices_of_any_space_agree_with_enumeration(space: ChoiceSpace) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = {head: 2.0 * torch.randn(6, 1, size, generator=generator) for head, size in space.sizes.items()}
    possible = torch.rand(6, space.mask_size, generator=generator) < 0.6
    for mask in space.split_mask(possible).values() if space.masked else ():
        mask[..., 0] = True
    drawn = ChoiceDistribution(logits, space.full_masks(6, CPU)._replace(possible=possible), space)
    every = list(product(*map(range, space.sizes.values())))
    chances = torch.stack([drawn.log_prob(ChoiceAction(torch.tensor([row] * 6))).double().exp() for row in every])
    entropy, relevance = drawn.entropy()

    torch.testing.assert_close(chances.sum(0), torch.ones(6).double(), rtol=0, atol=1e-5)
    assert relevance.eq(1.0).all()
    for n, mode in enumerate(drawn.mode().indices.tolist()):
        for i, (head, choice) in enumerate(zip(space.sizes, mode, strict=True)):
            table, count = drawn.log_probs[head][n, 0].double().exp(), int(drawn.masks[head][n, 0].sum())
            even = -sum(p * math.log(p) for p in table.tolist() if p > 0) / math.log(count) if count > 1 else 0.0
            assert choice == table.argmax()
            assert entropy[n, i].item() == pytest.approx(even, abs=1e-4)
            assert drawn.choice_probability()[n, i].item() == float(count > 1)


def test_steps_are_forced_only_where_every_head_is() -> None:
    space = SPACES["masked"]
    possible = torch.ones(3, space.mask_size, dtype=torch.bool)
    for n, free in enumerate(("none", "b", "all")):
        for head, mask in space.split_mask(possible[n]).items():
            if free != "all" and head != free:
                mask[..., 1:] = False

    assert space.forced(possible).tolist() == [True, False, False]
    assert ChoiceSpace({"a": 1}).full_masks(2, CPU).forced.tolist() == [True, True]
