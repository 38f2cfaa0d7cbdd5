"""Many on/off combinations of seeds in one pass, against one plain pass for each."""

from collections.abc import Sequence
from copy import deepcopy
from itertools import combinations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision import models

from esper_lightning.growth.alpha import FULL, Ramp
from esper_lightning.growth.attach import attach_slots
from esper_lightning.growth.blend import Style
from esper_lightning.growth.counterfactual import (
    Variant,
    committed_only,
    contributions,
    forward_variants,
    full_family,
    leave_one_out,
    measure_variants,
)
from esper_lightning.growth.network import slots_of
from esper_lightning.growth.stages import Stage
from esper_lightning.hosts import CNN
from esper_lightning.tasks import Digits
from tests.growth.grown import STYLES, LastState, grow, loss_of, seeded, slot_named, small_batch, small_cnn, stir

PLACES = ["block1", "block2.pool", "block3.pool"]

HALF = Ramp(start=0.0, target=0.5, ticks=1, curve="linear")

BLENDED = [Stage.BLENDING, Stage.PROBATIONARY, Stage.FOSSILIZED]


def grown_cnn(seeds: int) -> CNN:
    """Three slots, the first `seeds` of them with blended seeds, in float64 and evaluation mode."""
    network = small_cnn(PLACES)
    loss_of(network)  # moves BatchNorm's statistics
    for place, stage in zip(PLACES[:seeds], BLENDED, strict=False):
        grow(slot_named(network, place), stage, "conv_light", HALF, seed=len(place))
    return network.double().eval()


def images() -> Tensor:
    return small_batch(samples=6)[0].double()


def family(places: Sequence[str]) -> list[frozenset[str]]:
    """Every combination of places, from none to all."""
    return [frozenset(chosen) for k in range(len(places) + 1) for chosen in combinations(places, k)]


def plain_pass(network: nn.Module, active: frozenset[str], x: Tensor) -> Tensor:
    """The outputs of a network that has only the active seeds: the others are taken out."""
    network = deepcopy(network)
    for name, slot in slots_of(network).items():
        if name not in active:
            slot.empty()
    return network(x)


def check_against_plain_passes(network: nn.Module, variants: list[frozenset[str]], groups: int) -> None:
    outputs, places = forward_variants(network, variants, images())
    by_group = outputs.unflatten(0, (groups, -1))
    assert len(by_group[0]) == len(images())
    assert sorted(set(places)) == list(range(groups))
    for variant, place in zip(variants, places, strict=True):
        torch.testing.assert_close(by_group[place], plain_pass(network, variant, images()), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("seeds", [0, 1, 2, 3])
def test_the_whole_family_equals_one_plain_pass_for_each_member(seeds: int) -> None:
    check_against_plain_passes(grown_cnn(seeds), family(PLACES), groups=2**seeds)


@pytest.mark.parametrize(("seeds", "groups"), [(1, 2), (2, 3), (3, 4)])
def test_leaving_out_one_seed_at_a_time_costs_one_group_for_each_blended_seed(seeds: int, groups: int) -> None:
    check_against_plain_passes(grown_cnn(seeds), leave_one_out(PLACES), groups)
    check_against_plain_passes(grown_cnn(seeds), leave_one_out(PLACES)[::-1], groups)


def test_combinations_that_are_named_twice_are_run_once() -> None:
    check_against_plain_passes(grown_cnn(3), [frozenset(PLACES), frozenset(), frozenset(PLACES), frozenset()], groups=2)


def test_every_member_of_the_family_says_something_else() -> None:
    outputs, _ = forward_variants(grown_cnn(3), family(PLACES), images())
    groups = outputs.unflatten(0, (8, -1))
    assert all(not torch.allclose(groups[i], groups[j]) for i, j in combinations(range(8), 2))


@pytest.mark.parametrize("stage", [Stage.GERMINATED, Stage.TRAINING], ids=lambda stage: stage.name)
def test_a_seed_that_is_not_blended_never_takes_part(stage: Stage) -> None:
    network = small_cnn(PLACES).double().eval()
    grow(slot_named(network.float(), PLACES[0]), stage)
    outputs, places = forward_variants(network.double(), [frozenset(), frozenset(PLACES)], images())
    assert places == [0, 0]
    torch.testing.assert_close(outputs, small_cnn(PLACES).double().eval()(images()))


def test_a_watcher_is_told_how_much_longer_the_batch_becomes() -> None:
    network, told = grown_cnn(3), []
    network.convs[0].register_forward_hook(lambda *_: told.append("first layer"))
    network.head.register_forward_hook(lambda *_: told.append("head"))
    forward_variants(network, family(PLACES), images(), watch=told.append)
    assert told == [1, "first layer", 2, 4, 8, "head"]

    told.clear()
    forward_variants(network, [frozenset(PLACES)], images(), watch=told.append)
    assert told == [1, "first layer", "head"], "where nothing splits the batch it stays as it is"


def test_work_before_the_first_difference_is_done_once() -> None:
    network, rows = grown_cnn(3), []
    for convolution in network.convs:
        convolution.register_forward_hook(lambda _, inputs, __: rows.append(len(inputs[0])))
    forward_variants(network, family(PLACES), images())
    assert rows == [6, 2 * 6, 4 * 6]


def test_a_seed_at_alpha_0_contributes_exactly_nothing() -> None:
    network = grown_cnn(3)
    slot = slot_named(network, "block2.pool")
    slot.alpha.zero_()
    everything = frozenset(PLACES)
    batch, digits = small_batch(samples=64)
    variants = [everything, everything - {"block2.pool"}, everything - {"block3.pool"}]
    outputs, places = forward_variants(network, variants, batch.double())
    assert len(set(places)) == 3
    correct = Digits().measure(outputs, digits.repeat(3)).correct.view(3, -1)[places]
    assert correct[0].mean() - correct[1].mean() == 0.0
    assert torch.equal(correct[0], correct[1])
    assert not torch.equal(correct[0], correct[2])  # a seed with alpha does matter


def test_a_network_is_as_it_was_after_a_counterfactual_pass() -> None:
    network = grown_cnn(3)
    before = network(images())
    forward_variants(network, family(PLACES), images())
    assert all(slot.branch is None for slot in slots_of(network).values())
    assert torch.equal(network(images()), before)


def test_a_network_is_as_it_was_after_a_pass_that_failed() -> None:
    network = grown_cnn(3)
    before = network(images())
    with pytest.raises(RuntimeError, match="channels"):
        forward_variants(network, family(PLACES), images().expand(-1, 3, -1, -1))
    assert all(slot.branch is None for slot in slots_of(network).values())
    handle = network.head.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):  # after every slot has split the batch
        forward_variants(network, family(PLACES), images())
    handle.remove()
    assert all(slot.branch is None for slot in slots_of(network).values())
    assert torch.equal(network(images()), before)


def test_a_network_without_slots_has_one_group() -> None:
    network = small_cnn([]).double().eval()
    outputs, places = forward_variants(network, [frozenset(), frozenset({"block1"})], images())
    assert places == [0, 0]
    assert torch.equal(outputs, network(images()))


def test_families_by_hand() -> None:
    a, b, c = (frozenset({name}) for name in "abc")
    assert leave_one_out(["a", "b", "c"]) == [a | b | c, b | c, a | c, a | b]
    assert leave_one_out(["a"]) == [a, frozenset()]
    assert leave_one_out([]) == [frozenset()]
    assert full_family(["a", "b", "c"]) == [frozenset(), a, b, c, a | b, a | c, b | c, a | b | c]
    assert full_family([]) == [frozenset()]


def test_what_is_committed_is_what_is_fossilized() -> None:
    network = small_cnn(PLACES)
    assert committed_only(network) == frozenset()
    for place, stage in zip(PLACES, [Stage.FOSSILIZED, Stage.PROBATIONARY, Stage.FOSSILIZED], strict=True):
        grow(slot_named(network, place), stage)
    assert committed_only(network) == {"block1", "block3.pool"}


def rows_of(network: CNN, variants: list[Variant]) -> list[int]:
    """How many rows each convolution and the head work on."""
    rows: list[int] = []
    for layer in (*network.convs, network.head):
        layer.register_forward_hook(lambda _, inputs, __: rows.append(len(inputs[0])))
    forward_variants(network, variants, images())
    return rows


def test_each_family_shares_all_work_up_to_its_first_difference() -> None:
    assert rows_of(grown_cnn(3), full_family(PLACES)) == [6, 2 * 6, 4 * 6, 8 * 6]
    assert rows_of(grown_cnn(3), leave_one_out(PLACES)) == [6, 2 * 6, 3 * 6, 4 * 6]
    assert rows_of(grown_cnn(3), [frozenset(PLACES), frozenset(PLACES[:2])]) == [6, 6, 6, 2 * 6]
    assert rows_of(grown_cnn(1), full_family(PLACES)) == [6, 2 * 6, 2 * 6, 2 * 6]  # empty slots split nothing


def attached(network: nn.Module, places: list[str], *example: Tensor, channels_last: Sequence[str] = ()) -> nn.Module:
    """Blended seeds at `places`, each with half of its say, in float64 and evaluation mode."""
    kinds = {"image": "conv_small", "sequence": "lora", "vector": "mlp_small"}
    for number, slot in enumerate(attach_slots(network, places, example, channels_last=channels_last).values()):
        grow(slot, BLENDED[number % 3], kinds[slot.layout], HALF, seed=number)
    return network.double().eval()


def check_family(network: nn.Module, *inputs: Tensor) -> None:
    """Every combination, in one pass and in a pass of its own."""
    variants = full_family(list(slots_of(network)))
    outputs, places = forward_variants(network, variants, *inputs)
    groups = outputs.unflatten(0, (max(places) + 1, -1))
    answers = []
    for variant, place in zip(variants, places, strict=True):
        alone = deepcopy(network)
        for name, slot in slots_of(alone).items():
            if name not in variant:
                slot.empty()
        answers.append(alone(*inputs))
        torch.testing.assert_close(groups[place], answers[-1], rtol=1e-9, atol=1e-12)
    assert all(not torch.allclose(one, other) for one, other in combinations(answers, 2))


@pytest.mark.parametrize(
    ("places", "trunk"),
    [
        (["layer2.0.conv1"], [False]),
        (["layer1.0.conv1", "layer2.0.downsample"], [False, False]),
        (["layer1", "layer2.0.conv1", "layer3", "fc"], [True, False, True, True]),
        (["layer1.0.bn1", "layer1", "layer4.1.conv2"], [False, True, False]),
    ],
    ids=str,
)
def test_seeds_in_the_branches_of_a_resnet_equal_one_plain_pass_for_each_combination(
    places: list[str], trunk: list[bool]
) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = models.ResNet(models.resnet.BasicBlock, [2, 1, 1, 2], num_classes=3)
    x = torch.randn(3, 3, 32, 32, generator=seeded())
    attached(network, places, x)
    assert [slot.trunk for slot in slots_of(network).values()] == trunk
    check_family(network, x.double())


@pytest.mark.parametrize(
    ("places", "channels_last", "trunk"),
    [
        (["features.1.0.attn"], 1, [False]),
        (["features.0", "features.3.0.mlp", "norm", "flatten"], 3, [True, False, True, True]),
    ],
    ids=["one", "four"],
)
def test_seeds_on_channels_that_come_last_equal_one_plain_pass_for_each_combination(
    places: list[str], channels_last: int, trunk: list[bool]
) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = models.SwinTransformer([2, 2], 8, [1, 1], [1, 2], [2, 2], num_classes=3)
    stir(network, scale=0.05)
    x = torch.randn(3, 3, 16, 24, generator=seeded())
    attached(network, places, x, channels_last=places[:channels_last])
    assert [slot.trunk for slot in slots_of(network).values()] == trunk
    check_family(network, x.double())


class Twice(nn.Module):
    """One layer that the data meets two times, and one behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.behind, self.head = nn.Linear(5, 5), nn.Linear(5, 7), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:  # [B, 5] -> [B, 3]
        return self.head(torch.tanh(self.behind(torch.tanh(self.shared(torch.tanh(self.shared(x)))))))


@pytest.mark.parametrize("places", [["shared"], ["behind", "shared"]], ids=" ".join)
def test_a_seed_that_the_data_meets_twice_is_on_or_off_both_times(places: list[str]) -> None:
    x = torch.randn(4, 5, generator=seeded())
    check_family(attached(Twice(), places, x), x.double())


class TwoInputs(nn.Module):
    """An image and a vector, each read by its own layer, then together."""

    def __init__(self) -> None:
        super().__init__()
        self.see, self.read = nn.Conv2d(2, 4, 3), nn.Linear(5, 4)
        self.both, self.head = nn.Linear(8, 6), nn.Linear(6, 3)

    def forward(self, image: Tensor, vector: Tensor) -> Tensor:  # [B, 2, H, W], [B, 5] -> [B, 3]
        seen, read = torch.relu(self.see(image)).mean((2, 3)), torch.tanh(self.read(vector))
        return self.head(torch.tanh(self.both(torch.cat([seen, read], 1))))


@pytest.mark.parametrize("places", [["see"], ["read", "both"], ["both"], ["see", "read", "both"]], ids=" ".join)
def test_a_network_of_several_inputs_has_all_of_them_repeated(places: list[str]) -> None:
    image, vector = torch.randn(4, 2, 6, 6, generator=seeded()), torch.randn(4, 5, generator=seeded(1))
    network = attached(TwoInputs(), places, image, vector)
    assert {name: slot.trunk for name, slot in slots_of(network).items()} == {name: name == "both" for name in places}
    check_family(network, image.double(), vector.double())


def log_likelihood(outputs: Tensor, digits: Tensor) -> Tensor:  # [B, 10], [B] -> [B]
    return F.log_softmax(outputs, 1).gather(1, digits[:, None])[:, 0]


def right(outputs: Tensor, digits: Tensor) -> Tensor:  # [B, 10], [B] -> [B]
    return (outputs.argmax(1) == digits).double()


def unequal_batches(sizes: Sequence[int] = (5, 3, 1, 16)) -> list[tuple[Tensor, Tensor]]:
    batches = [small_batch(size, seed) for seed, size in enumerate(sizes)]
    return [(x.double(), digits) for x, digits in batches]


def by_hand(network: nn.Module, variant: Variant) -> float:
    """Mean log-likelihood, sample by sample."""
    sums = [
        log_likelihood(plain_pass(network, variant, x[None]), digit[None]).item()
        for batch in unequal_batches()
        for x, digit in zip(*batch, strict=True)
    ]
    return sum(sums) / len(sums)


def test_combinations_are_measured_over_batches_of_any_size() -> None:
    network = grown_cnn(3)
    variants = [*full_family(PLACES), frozenset(PLACES[:1]), frozenset()]
    measured = measure_variants(network, variants, unequal_batches(), log_likelihood)
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
def test_a_seed_at_alpha_0_contributes_exactly_nothing_in_every_style(style: Style) -> None:
    network = small_cnn(PLACES)
    for place in PLACES:
        grow(slot_named(network, place), Stage.BLENDING, "conv_light", FULL, seed=len(place), style=style)
    slot = slot_named(network, "block2.pool")
    slot.alpha.zero_()
    batches = [small_batch(16, seed) for seed in range(4)]
    assert contributions(network, batches, right)["block2.pool"] == 0.0
    others = contributions(network, batches, log_likelihood)
    assert abs(others["block1"]) > 1e-3
    assert abs(others["block3.pool"]) > 1e-3
    x = torch.randn(4, slot.width, 4, 4)
    assert torch.equal(slot.express(x), x)


class Remembers(nn.Module):
    """An LSTM of which the last state is read."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.lstm, self.head = LastState(6, layers), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:  # [B, T, 5] -> [B, 3]
        return self.head(self.lstm(x)[1][0])


@pytest.mark.parametrize("layers", [1, 2])
def test_a_seed_on_the_state_of_an_lstm_equals_one_plain_pass_for_each_combination(layers: int) -> None:
    x = torch.randn(4, 7, 5, generator=seeded())
    check_family(attached(Remembers(layers), ["lstm[1][0]"], x), x.double())


class TwoAnswers(nn.Module):
    """The second answer goes around everything that comes after the stem."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.late, self.head, self.other = (nn.Linear(5, 5) for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # [B, 5] -> [B, 5], [B, 5]
        x = self.stem(x)
        return self.head(torch.tanh(self.late(x))), self.other(x)


def test_every_output_has_a_row_for_every_combination() -> None:
    x = torch.randn(4, 5, generator=seeded())
    network = attached(TwoAnswers(), ["late"], x)
    (first, second), places = forward_variants(network, full_family(["late"]), x.double())
    assert places == [1, 0]
    assert len(first) == len(second) == 8
