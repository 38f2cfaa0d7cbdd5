"""Many combinations of active seeds in one pass, compared with a separate pass for each."""

from collections.abc import Sequence
from itertools import combinations

import pytest
import torch
from torch import Tensor, nn

from esper_lightning.growth.blend import BlendStyle
from esper_lightning.growth.counterfactual import (
    SeedVariant,
    all_variants,
    forward_variants,
    fossilized_only,
    leave_one_out,
)
from esper_lightning.growth.lifecycle import slots_of
from esper_lightning.growth.stages import Stage
from esper_lightning.hosts import CNN
from esper_lightning.tasks import Digits
from tests.growth.grown import STYLES, grow, slot_named, small_batch, small_cnn
from tests.growth.seeded_cnn import PLACES, grown_cnn, plain_pass


def images() -> Tensor:
    return small_batch(samples=6)[0].double()


def family(places: Sequence[str]) -> list[frozenset[str]]:
    """Return every combination of slots, from none to all."""
    return [frozenset(chosen) for k in range(len(places) + 1) for chosen in combinations(places, k)]


def check_against_plain_passes(network: nn.Module, variants: list[frozenset[str]], groups: int) -> None:
    outputs, places = forward_variants(network, variants, images())
    by_group = outputs.unflatten(0, (groups, -1))
    assert len(by_group[0]) == len(images())
    assert sorted(set(places)) == list(range(groups))
    for variant, place in zip(variants, places, strict=True):
        torch.testing.assert_close(by_group[place], plain_pass(network, variant, images()), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("seeds", [0, 1, 2, 3])
def test_all_variants_equal_one_plain_pass_each(seeds: int) -> None:
    check_against_plain_passes(grown_cnn(seeds), family(PLACES), groups=2**seeds)


@pytest.mark.parametrize(("seeds", "groups"), [(1, 2), (2, 3), (3, 4)])
def test_leaving_out_one_seed_at_a_time_costs_one_group_for_each_blended_seed(seeds: int, groups: int) -> None:
    check_against_plain_passes(grown_cnn(seeds), leave_one_out(PLACES), groups)
    check_against_plain_passes(grown_cnn(seeds), leave_one_out(PLACES)[::-1], groups)


def test_combinations_that_are_named_twice_are_run_once() -> None:
    check_against_plain_passes(grown_cnn(3), [frozenset(PLACES), frozenset(), frozenset(PLACES), frozenset()], groups=2)


def test_each_variant_has_its_own_output() -> None:
    outputs, _ = forward_variants(grown_cnn(3), family(PLACES), images())
    groups = outputs.unflatten(0, (8, -1))
    assert all(not torch.allclose(groups[i], groups[j]) for i, j in combinations(range(8), 2))


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("stage", [Stage.GERMINATED, Stage.TRAINING], ids=lambda stage: stage.name)
def test_a_seed_that_is_not_blended_takes_part_at_full_alpha_where_it_is_named(stage: Stage, style: BlendStyle) -> None:
    network, blended = small_cnn(PLACES), small_cnn(PLACES)
    grow(slot_named(network, PLACES[1]), stage, style=style)
    grow(slot_named(blended, PLACES[1]), Stage.FOSSILIZED, style=style)

    outputs, places = forward_variants(network.double().eval(), [frozenset(), frozenset(PLACES[1:])], images())

    without, full = (outputs.unflatten(0, (2, -1))[place] for place in places)
    torch.testing.assert_close(without, small_cnn(PLACES).double().eval()(images()))
    torch.testing.assert_close(full, blended.double().eval()(images()))


def test_an_observer_is_told_the_factor_of_the_batch() -> None:
    network, told = grown_cnn(3), []
    network.convs[0].register_forward_hook(lambda *_: told.append("first layer"))
    network.head.register_forward_hook(lambda *_: told.append("head"))
    forward_variants(network, family(PLACES), images(), on_split=told.append)
    assert told == [1, "first layer", 2, 4, 8, "head"]

    told.clear()
    forward_variants(network, [frozenset(PLACES)], images(), on_split=told.append)
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
    assert not torch.equal(correct[0], correct[2])  # a seed with positive alpha has an effect


def test_a_network_is_as_it_was_after_a_counterfactual_pass() -> None:
    network = grown_cnn(3)
    before = network(images())
    forward_variants(network, family(PLACES), images())
    assert all(slot.override is None for slot in slots_of(network).values())
    assert torch.equal(network(images()), before)


def test_a_network_is_as_it_was_after_a_pass_that_failed() -> None:
    network = grown_cnn(3)
    before = network(images())
    with pytest.raises(RuntimeError, match="channels"):
        forward_variants(network, family(PLACES), images().expand(-1, 3, -1, -1))
    assert all(slot.override is None for slot in slots_of(network).values())
    handle = network.head.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):  # after every slot has split the batch
        forward_variants(network, family(PLACES), images())
    handle.remove()
    assert all(slot.override is None for slot in slots_of(network).values())
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
    assert all_variants(["a", "b", "c"]) == [frozenset(), a, b, c, a | b, a | c, b | c, a | b | c]
    assert all_variants([]) == [frozenset()]


def test_what_is_committed_is_what_is_fossilized() -> None:
    network = small_cnn(PLACES)
    assert fossilized_only(network) == frozenset()
    for place, stage in zip(PLACES, [Stage.FOSSILIZED, Stage.PROBATIONARY, Stage.FOSSILIZED], strict=True):
        grow(slot_named(network, place), stage)
    assert fossilized_only(network) == {"block1", "block3.pool"}


def rows_of(network: CNN, variants: list[SeedVariant]) -> list[int]:
    """Return the number of rows that each convolution and the head process."""
    rows: list[int] = []
    for layer in (*network.convs, network.head):
        layer.register_forward_hook(lambda _, inputs, __: rows.append(len(inputs[0])))
    forward_variants(network, variants, images())
    return rows


def test_each_family_shares_all_work_up_to_its_first_difference() -> None:
    assert rows_of(grown_cnn(3), all_variants(PLACES)) == [6, 2 * 6, 4 * 6, 8 * 6]
    assert rows_of(grown_cnn(3), leave_one_out(PLACES)) == [6, 2 * 6, 3 * 6, 4 * 6]
    assert rows_of(grown_cnn(3), [frozenset(PLACES), frozenset(PLACES[:2])]) == [6, 6, 6, 2 * 6]
    assert rows_of(grown_cnn(1), all_variants(PLACES)) == [6, 2 * 6, 2 * 6, 2 * 6]  # empty slots split nothing


def test_variants_share_the_rows_before_they_differ() -> None:
    """S7: four distinct variants cost one pass at the first layer and four only at the last."""
    places = ["block1", "block2.pool", "block3.pool"]
    network = small_cnn(places).eval()
    for place in places:
        grow(slot_named(network, place), Stage.PROBATIONARY)
    rows: list[int] = []

    def count(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        rows.append(len(inputs[0]))

    for layer in (*network.convs, network.head):
        layer.register_forward_pre_hook(count)
    images = small_batch(samples=10)[0]
    everything = frozenset(places)
    with torch.inference_mode():
        forward_variants(network, [everything, *(everything - {place} for place in places)], images)

    assert rows == [10, 20, 30, 40]  # separate passes: 40 at each
