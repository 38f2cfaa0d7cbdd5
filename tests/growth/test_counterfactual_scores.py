"""Scores of combinations of seeds and contributions of seeds, compared with hand-computed sums."""

from collections.abc import Sequence
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper_lightning.growth.alpha import DEFAULT_RAMP
from esper_lightning.growth.blend import BlendStyle
from esper_lightning.growth.counterfactual import SeedVariant, all_variants, contributions, measure_variants, potentials
from esper_lightning.growth.stages import Stage
from tests.growth.grown import STYLES, grow, loss_of, slot_named, small_batch, small_cnn
from tests.growth.seeded_cnn import PLACES, grown_cnn, plain_pass


def log_likelihood(outputs: Tensor, digits: Tensor) -> Tensor:  # [B, 10], [B] -> [B]
    return F.log_softmax(outputs, 1).gather(1, digits[:, None])[:, 0]


def right(outputs: Tensor, digits: Tensor) -> Tensor:  # [B, 10], [B] -> [B]
    return (outputs.argmax(1) == digits).double()


def unequal_batches(sizes: Sequence[int] = (5, 3, 1, 16)) -> list[tuple[Tensor, Tensor]]:
    batches = [small_batch(size, seed) for seed, size in enumerate(sizes)]
    return [(x.double(), digits) for x, digits in batches]


def by_hand(network: nn.Module, variant: SeedVariant) -> float:
    """Compute the mean log-likelihood sample by sample."""
    sums = [
        log_likelihood(plain_pass(network, variant, x[None]), digit[None]).item()
        for batch in unequal_batches()
        for x, digit in zip(*batch, strict=True)
    ]
    return sum(sums) / len(sums)


def test_combinations_are_measured_over_batches_of_any_size() -> None:
    network = grown_cnn(3)
    variants = [*all_variants(PLACES), frozenset(PLACES[:1]), frozenset()]
    measured = measure_variants(network, variants, unequal_batches(), score=log_likelihood)
    expected = [by_hand(network, variant) for variant in variants]
    torch.testing.assert_close(measured, torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-12)


def test_a_contribution_is_the_score_with_all_seeds_minus_that_without_one_times_100() -> None:
    network = grown_cnn(3)
    everything = frozenset(PLACES)
    measured = contributions(network, unequal_batches(), log_likelihood)
    assert list(measured) == PLACES
    for place in PLACES:
        expected = 100.0 * (by_hand(network, everything) - by_hand(network, everything - {place}))
        assert measured[place] == pytest.approx(expected, rel=1e-9)
        assert abs(expected) > 1e-3


def test_only_blended_seeds_are_measured() -> None:
    network = grown_cnn(2)
    assert list(contributions(network, unequal_batches(), right)) == PLACES[:2]
    network = small_cnn(PLACES)
    grow(slot_named(network, "block1"), Stage.TRAINING)
    assert contributions(network, unequal_batches(), right) == {}


def test_a_potential_is_what_a_seed_would_add_at_full_alpha_to_the_blended_ones() -> None:
    network = grown_cnn(1)
    for place in PLACES[1:]:
        grow(slot_named(network.float(), place), Stage.TRAINING, seed=len(place))
    full = deepcopy(network.double().eval())
    for place in PLACES[1:]:
        for stage in (Stage.BLENDING, Stage.PROBATIONARY, Stage.FOSSILIZED):
            slot_named(full, place).move_to(stage)

    measured = potentials(network, unequal_batches(), log_likelihood)

    assert list(measured) == PLACES[1:]
    for place in PLACES[1:]:
        expected = 100.0 * (by_hand(full, frozenset({PLACES[0], place})) - by_hand(full, frozenset(PLACES[:1])))
        assert measured[place] == pytest.approx(expected, rel=1e-5)
    assert potentials(grown_cnn(3), unequal_batches(), log_likelihood) == {}


def test_an_iterator_that_is_used_up_is_refused() -> None:
    network, batches = grown_cnn(3), iter(unequal_batches())
    contributions(network, batches, right)
    with pytest.raises(ValueError, match="there are no batches to measure on; an iterator may be used up"):
        contributions(network, batches, right)


def test_measuring_leaves_modes_statistics_and_random_state_alone() -> None:
    network = grown_cnn(3).train()
    network.norms[1].eval()
    modes = [module.training for module in network.modules()]
    state, random_state = deepcopy(network.state_dict()), torch.get_rng_state()

    measured = contributions(network, unequal_batches(), log_likelihood)

    assert [module.training for module in network.modules()] == modes
    assert all(torch.equal(network.state_dict()[key], value) for key, value in state.items())
    assert torch.equal(torch.get_rng_state(), random_state)
    assert measured == contributions(network.eval(), unequal_batches(), log_likelihood)


def test_modes_come_back_when_a_score_fails() -> None:
    network = grown_cnn(3).train()
    with pytest.raises(ZeroDivisionError):
        contributions(network, unequal_batches(), lambda *_: 1 / 0)
    assert all(module.training for module in network.modules())


def test_training_goes_on_after_a_measurement() -> None:
    network = grown_cnn(3).float().train()
    batches = [(x.float(), digits) for x, digits in unequal_batches()]
    contributions(network, batches, right)
    assert all(parameter.grad is None for parameter in network.parameters())
    loss_of(network).backward()
    assert all(parameter.grad is not None for parameter in network.parameters())


@pytest.mark.parametrize("style", STYLES)
def test_a_seed_at_alpha_0_contributes_exactly_nothing_in_every_style(style: BlendStyle) -> None:
    network = small_cnn(PLACES)
    for place in PLACES:
        grow(slot_named(network, place), Stage.BLENDING, "conv_light", DEFAULT_RAMP, seed=len(place), style=style)
    slot = slot_named(network, "block2.pool")
    slot.alpha.zero_()
    batches = [small_batch(16, seed) for seed in range(4)]
    assert contributions(network, batches, right)["block2.pool"] == 0.0
    others = contributions(network, batches, log_likelihood)
    assert abs(others["block1"]) > 1e-3
    assert abs(others["block3.pool"]) > 1e-3
    x = torch.randn(4, slot.width, 4, 4)
    assert torch.equal(slot.blend_output(x), x)
