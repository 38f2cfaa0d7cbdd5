"""Many combinations of active seeds in one pass, compared with a separate pass for each; what the seeds are worth."""

import math
from collections.abc import Callable
from copy import deepcopy
from itertools import combinations, permutations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision import models

from esper_lightning.growth.attach import attach_slots
from esper_lightning.growth.blend import Ramp
from esper_lightning.growth.counterfactual import (
    SeedVariant,
    all_variants,
    contributions,
    forward_variants,
    leave_one_out,
    measure_variants,
    shapley_values,
)
from esper_lightning.growth.lifecycle import slots_of
from esper_lightning.growth.stages import Stage
from esper_lightning.hosts import CNN
from tests.growth.grown import generator_of, grow, loss_of, slot_named, small_batch, small_cnn
from tests.growth.mixing import MIXING

PLACES = ["block1", "block2.pool", "block3.pool"]

BLENDED = [Stage.BLENDING, Stage.PROBATIONARY, Stage.FOSSILIZED]

ALL = frozenset(PLACES)

PLAYERS = ["a", "b", "c", "d"]


def images() -> Tensor:
    return small_batch(samples=6)[0].double()


def grown_cnn(seeds: int = 3) -> CNN:
    """Return a CNN of three slots, the first `seeds` with blended seeds, in float64 and evaluation mode."""
    network = small_cnn(PLACES)
    loss_of(network)  # moves BatchNorm's statistics
    for place, stage in zip(PLACES[:seeds], BLENDED, strict=False):
        grow(slot_named(network, place), stage, "conv_light", Ramp(2), seed=len(place))
    return network.double().eval()


def plain_pass(network: nn.Module, active: SeedVariant, *inputs: Tensor) -> Tensor:
    """Return the outputs of a copy of the network without the inactive seeds."""
    network = deepcopy(network)
    for name, slot in slots_of(network).items():
        if name not in active:
            slot.empty()
    return network(*inputs)


def check_against_plain_passes(network: nn.Module, variants: list[SeedVariant], groups: int, *inputs: Tensor) -> None:
    outputs, group_of = forward_variants(network, variants, *inputs)
    by_group = outputs.unflatten(0, (groups, -1))
    assert sorted(set(group_of)) == list(range(groups))
    for variant, group in zip(variants, group_of, strict=True):
        torch.testing.assert_close(by_group[group], plain_pass(network, variant, *inputs), rtol=1e-9, atol=1e-12)
    assert all(not torch.allclose(one, other) for one, other in combinations(by_group, 2))


@pytest.mark.parametrize("seeds", [0, 1, 2, 3])
def test_one_pass_equals_a_plain_pass_for_each_combination(seeds: int) -> None:
    network = grown_cnn(seeds)
    check_against_plain_passes(network, all_variants(PLACES), 2**seeds, images())
    check_against_plain_passes(network, leave_one_out(PLACES), seeds + 1, images())
    check_against_plain_passes(network, [ALL, frozenset(), ALL], min(2, seeds + 1), images())


def attached(network: nn.Module, places: list[str], *example: Tensor) -> nn.Module:
    """Return the network with blended seeds at `places`, in float64 and evaluation mode."""
    kinds = {"image": "conv_small", "sequence": "lora", "vector": "mlp_small"}
    for number, slot in enumerate(attach_slots(network, places, example).values()):
        grow(slot, BLENDED[number % 3], kinds[slot.layout], Ramp(2), seed=number)
    return network.double().eval()


def resnet() -> nn.Module:
    return models.ResNet(models.resnet.BasicBlock, [2, 1, 1, 2], num_classes=3)


class Twice(nn.Module):
    """Network that applies one layer twice, and then another."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.behind, self.head = nn.Linear(5, 5), nn.Linear(5, 7), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:  # [B, 5] -> [B, 3]
        return self.head(torch.tanh(self.behind(torch.tanh(self.shared(torch.tanh(self.shared(x)))))))


class TwoInputs(nn.Module):
    """Network of an image and a vector, each processed by its own layer and then combined."""

    def __init__(self) -> None:
        super().__init__()
        self.see, self.read = nn.Conv2d(2, 4, 3), nn.Linear(5, 4)
        self.both, self.head = nn.Linear(8, 6), nn.Linear(6, 3)

    def forward(self, image: Tensor, vector: Tensor) -> Tensor:  # [B, 2, H, W], [B, 5] -> [B, 3]
        seen, read = torch.relu(self.see(image)).mean((2, 3)), torch.tanh(self.read(vector))
        return self.head(torch.tanh(self.both(torch.cat([seen, read], 1))))


VECTORS, PICTURES = (torch.Size([4, 5]),), (torch.Size([3, 3, 32, 32]),)
BOTH = (torch.Size([4, 2, 6, 6]), torch.Size([4, 5]))


@pytest.mark.parametrize(
    ("make", "shapes", "places", "single"),
    [
        (resnet, PICTURES, ["layer1", "layer2.0.conv1", "layer3", "fc"], [True, False, True, True]),
        (Twice, VECTORS, ["shared", "behind"], [False, True]),
        (TwoInputs, BOTH, ["see", "read", "both"], [False, False, True]),
    ],
)
def test_branches_shared_layers_and_several_inputs_equal_one_plain_pass_for_each_combination(
    make: type[nn.Module], shapes: tuple[torch.Size, ...], places: list[str], single: list[bool]
) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = make()
    inputs = [torch.randn(shape, generator=generator_of(i)) for i, shape in enumerate(shapes)]
    attached(network, places, *inputs)
    assert [slot.on_single_path for slot in slots_of(network).values()] == single
    variants = all_variants(list(slots_of(network)))
    check_against_plain_passes(network, variants, len(variants), *(x.double() for x in inputs))


@pytest.mark.parametrize(
    ("seeds", "variants", "rows"),
    [
        (3, all_variants(PLACES), [1, 2, 4, 8]),
        (3, leave_one_out(PLACES), [1, 2, 3, 4]),  # separate passes: 4 at each
        (3, [ALL, frozenset(PLACES[:2])], [1, 1, 1, 2]),
        (3, [ALL], [1, 1, 1, 1]),
        (1, all_variants(PLACES), [1, 2, 2, 2]),  # empty slots split nothing
    ],
)
def test_variants_share_the_rows_before_they_differ(seeds: int, variants: list[SeedVariant], rows: list[int]) -> None:
    """S7: distinct variants cost one pass at the first layer, and more only behind the slot where they differ."""
    network, seen = grown_cnn(seeds), []
    for layer in (*network.convs, network.head):
        layer.register_forward_hook(lambda _, inputs, __: seen.append(len(inputs[0]) // 6))
    forward_variants(network, variants, images())
    assert seen == rows


@pytest.mark.parametrize("behind", MIXING.values(), ids=MIXING)
def test_rows_that_see_each_other_take_a_pass_for_each_combination(behind: Callable[[], nn.Module]) -> None:
    """With the same random numbers: both from one batch, and as scores over several."""
    torch.manual_seed(0)
    x, labels = torch.randn(24, 5), torch.randint(3, (24,))
    network = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), behind(), nn.Linear(16, 3))
    attached(network, ["0", "1"], x).float()
    variants, batches = all_variants(["0", "1"]), [(x[:16], labels[:16]), (x[16:], labels[16:])]

    def passes(variant: SeedVariant, *parts: Tensor) -> Tensor:
        torch.manual_seed(1)
        return torch.cat([plain_pass(network, variant, part) for part in parts])

    torch.manual_seed(1)
    outputs, group_of = forward_variants(network, variants, x)
    torch.manual_seed(1)
    means = measure_variants(network, variants, batches, score=log_likelihood)

    for variant, group, mean in zip(variants, group_of, means, strict=True):
        torch.testing.assert_close(outputs.chunk(len(variants))[group], passes(variant, x))
        torch.testing.assert_close(mean, log_likelihood(passes(variant, x[:16], x[16:]), labels).mean())


def test_a_network_is_as_it_was_after_a_pass_and_after_one_that_failed() -> None:
    network = grown_cnn()
    before = network(images())
    forward_variants(network, all_variants(PLACES), images())
    handle = network.head.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):  # after every slot has split the batch
        forward_variants(network, all_variants(PLACES), images())
    handle.remove()
    assert all(slot.override is None for slot in slots_of(network).values())
    assert torch.equal(network(images()), before)


# Scores.


def log_likelihood(outputs: Tensor, digits: Tensor) -> Tensor:  # [B, 10], [B] -> [B]
    return F.log_softmax(outputs, 1).gather(1, digits[:, None])[:, 0]


def right(outputs: Tensor, digits: Tensor) -> Tensor:  # [B, 10], [B] -> [B]
    return (outputs.argmax(1) == digits).double()


def unequal_batches() -> list[tuple[Tensor, Tensor]]:
    batches = [small_batch(size, seed) for seed, size in enumerate((5, 3, 1, 16))]
    return [(x.double(), digits) for x, digits in batches]


def by_hand(network: nn.Module, variant: SeedVariant) -> float:
    """Compute the mean log-likelihood sample by sample."""
    sums = [
        log_likelihood(plain_pass(network, variant, x[None]), digit[None]).item()
        for batch in unequal_batches()
        for x, digit in zip(*batch, strict=True)
    ]
    return sum(sums) / len(sums)


def test_scores_are_means_over_batches_of_any_size_and_give_contributions_and_shapley_values() -> None:
    network = grown_cnn()
    worth = {variant: by_hand(network, variant) for variant in all_variants(PLACES)}
    measured = measure_variants(network, list(worth), unequal_batches(), score=log_likelihood)
    torch.testing.assert_close(measured.tolist(), list(worth.values()), rtol=1e-9, atol=1e-12)
    points = contributions(network, unequal_batches(), log_likelihood)
    assert points == pytest.approx({place: 100.0 * (worth[ALL] - worth[ALL - {place}]) for place in PLACES}, rel=1e-9)
    assert min(map(abs, points.values())) > 1e-3
    gain = worth[ALL] - worth[frozenset()]
    assert sum(shapley_values(worth, PLACES).values()) == pytest.approx(gain, abs=1e-9)


def test_only_blended_seeds_contribute() -> None:
    network = grown_cnn(1).float()
    for place in PLACES[1:]:
        grow(slot_named(network, place), Stage.TRAINING, seed=len(place))
    assert list(contributions(network.double(), unequal_batches(), right)) == PLACES[:1]
    assert contributions(small_cnn(PLACES), [], right) == {}


def test_measuring_leaves_modes_statistics_and_random_state_alone() -> None:
    network = grown_cnn().train()
    network.norms[1].eval()
    modes = [module.training for module in network.modules()]
    state, random_state = deepcopy(network.state_dict()), torch.get_rng_state()
    measured = contributions(network, unequal_batches(), log_likelihood)
    with pytest.raises(ZeroDivisionError):
        contributions(network, unequal_batches(), lambda *_: 1 / 0)
    assert [module.training for module in network.modules()] == modes
    assert all(torch.equal(network.state_dict()[key], value) for key, value in state.items())
    assert torch.equal(torch.get_rng_state(), random_state)
    assert measured == contributions(network.eval(), unequal_batches(), log_likelihood)


def test_batches_that_are_used_up_and_scores_that_are_means_are_refused() -> None:
    network, batches = grown_cnn(), iter(unequal_batches())
    contributions(network, batches, right)
    with pytest.raises(ValueError, match="there are no batches to measure on; an iterator may be used up"):
        contributions(network, batches, right)
    with pytest.raises(ValueError, match=r"a score is a number per sample, \[5\], and no mean; got \[\]"):
        contributions(network, unequal_batches(), lambda outputs, digits: right(outputs, digits).mean())


@pytest.mark.parametrize("count", range(5))
def test_shapley_values_are_the_mean_over_all_orders_of_joining_and_sum_to_the_whole_gain(count: int) -> None:
    players = PLAYERS[:count]
    worth = dict(zip(all_variants(players), torch.randn(2**count, generator=generator_of(count)).tolist(), strict=True))
    totals = dict.fromkeys(players, 0.0)
    for order in permutations(players):
        for i, player in enumerate(order):
            totals[player] += worth[frozenset(order[: i + 1])] - worth[frozenset(order[:i])]
    values = shapley_values(worth, players)
    expected = {player: total / math.factorial(count) for player, total in totals.items()}
    assert values == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert sum(values.values()) == pytest.approx(worth[frozenset(players)] - worth[frozenset()], abs=1e-9)
