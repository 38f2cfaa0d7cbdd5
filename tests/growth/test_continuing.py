"""Resumed growth, and growth together with other parts of a training loop."""

import io
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from esper_lightning.growth.attach import attach_slots
from esper_lightning.growth.counterfactual import contributions, leave_one_out, measure_variants
from esper_lightning.growth.export import load, save
from esper_lightning.growth.gates import LifecycleConfig
from esper_lightning.growth.growing_network import GrowingNetwork
from esper_lightning.growth.param_groups import group_names
from esper_lightning.growth.slot import SeedSlot
from esper_lightning.hosts import CNN
from tests.growth.grown import generator_of, small_batch, small_cnn, story

SLOT_NAMES = ["block1.pool", "block2.pool", "block3.pool"]

BLUEPRINTS, STYLES = ("conv_light", "norm", "conv_small"), ("gate", "add", "multiply")

QUICK = LifecycleConfig(training_ticks=1, auto_cull=False)

optimizers = pytest.mark.parametrize(
    "make",
    [lambda host: SGD(host.parameters(), lr=0.05, momentum=0.9), lambda host: AdamW(host.parameters(), lr=0.01)],
    ids=["sgd", "adamw"],
)
Make = Callable[[nn.Module], Optimizer]


def made(make: Make, seed: int = 0) -> GrowingNetwork:
    host = small_cnn(SLOT_NAMES, seed=seed, isolate=False)
    return GrowingNetwork(host, make(host), horizon=20, lifecycle=QUICK, generator=generator_of(seed))


def train_epochs(growing: GrowingNetwork, epochs: int, seed: int = 0) -> None:
    """Train for `epochs` epochs of one batch each."""
    for epoch in range(epochs):
        images, digits = small_batch(seed=100 * seed + epoch)
        growing.optimizer.zero_grad()
        F.cross_entropy(growing.module(images), digits).backward()
        growing.optimizer.step()
        growing.end_epoch(dict.fromkeys(SLOT_NAMES, 2.0))


def grown(make: Make) -> GrowingNetwork:
    """Return a network with seeds in all slots, germinated last to first, so that groups and slots differ in order."""
    growing = made(make)
    for place, blueprint, style in zip(SLOT_NAMES[::-1], BLUEPRINTS, STYLES, strict=True):
        growing.germinate(place, blueprint, ticks=3, style=style)
        train_epochs(growing, 2)
    return growing


def weights(growing: GrowingNetwork) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in growing.module.state_dict().items()}


@optimizers
def test_growth_that_was_stopped_ends_as_growth_that_was_not(make: Make) -> None:
    growing = grown(make)
    file = io.BytesIO()
    torch.save(growing.state_dict(), file)
    file.seek(0)
    train_epochs(growing, 3, seed=1)
    resumed = made(make, seed=5)
    resumed.germinate(SLOT_NAMES[0], "bottleneck")  # removed by load_state_dict

    resumed.load_state_dict(torch.load(file, weights_only=True))
    assert group_names(resumed.optimizer) == group_names(growing.optimizer)
    train_epochs(resumed, 3, seed=1)

    assert story(resumed.module) == story(growing.module)
    assert resumed.measurements == growing.measurements
    theirs = weights(growing)
    assert all(torch.equal(value, theirs[name]) for name, value in weights(resumed).items())
    for one, other in zip(resumed.optimizer.param_groups, growing.optimizer.param_groups, strict=True):
        for mine, other_parameter in zip(one["params"], other["params"], strict=True):
            ours, state = resumed.optimizer.state[mine], growing.optimizer.state[other_parameter]
            assert ours.keys() == state.keys()
            assert all(torch.equal(torch.as_tensor(ours[key]), torch.as_tensor(state[key])) for key in state)
    # And the next seed is the same.
    for each in (resumed, growing):
        each.cull(SLOT_NAMES[0])
        each.remove_seed(SLOT_NAMES[0])
        each.germinate(SLOT_NAMES[0], "conv_heavy")
    assert all(torch.equal(value, weights(growing)[name]) for name, value in weights(resumed).items())


def test_a_state_of_another_network_is_refused() -> None:
    growing = grown(lambda host: SGD(host.parameters(), lr=0.1))
    host = small_cnn(SLOT_NAMES[:2])
    other = GrowingNetwork(host, SGD(host.parameters(), lr=0.1), horizon=20)

    with pytest.raises(RuntimeError, match="Unexpected key"):
        other.load_state_dict(growing.state_dict())


@optimizers
def test_a_network_that_was_rolled_back_under_its_optimizer_goes_on_learning(make: Make, tmp_path: Path) -> None:
    growing = grown(make)
    save(growing.module, tmp_path / "grown")
    train_epochs(growing, 2, seed=2)

    load(growing.module, tmp_path / "grown")
    again = GrowingNetwork(growing.module, growing.optimizer, horizon=20, lifecycle=QUICK)
    before = {place: deepcopy(list(slot.seed.parameters())) for place, slot in again.slots.items()}
    train_epochs(again, 1, seed=3)

    held = [p for group in growing.optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in held} == {id(p) for p in growing.module.parameters()}
    assert len(held) == len({id(p) for p in held})
    assert all(again.evidence(place).in_optimizer for place in SLOT_NAMES)
    for place, old in before.items():
        assert any(not torch.equal(a, b) for a, b in zip(old, again.slots[place].seed.parameters(), strict=True)), place


def test_a_seed_whose_optimizer_was_replaced_can_still_be_culled() -> None:
    growing = grown(lambda host: SGD(host.parameters(), lr=0.1))
    growing.optimizer = AdamW(growing.module.parameters(), lr=0.01)
    doomed = set(growing.slots[SLOT_NAMES[1]].seed.parameters())

    growing.cull(SLOT_NAMES[1])

    assert not doomed & {p for group in growing.optimizer.param_groups for p in group["params"]}


def test_a_new_seed_learns_at_the_rate_that_the_host_has_by_now() -> None:
    host = small_cnn(SLOT_NAMES)
    optimizer = SGD([{"params": list(host.parameters()), "lr": 0.5}], lr=9.0)
    scheduler = LambdaLR(optimizer, lambda epoch: 0.1**epoch)
    growing = GrowingNetwork(host, optimizer, horizon=20)
    optimizer.step()
    scheduler.step()
    growing.germinate(SLOT_NAMES[0], "norm")
    chosen = GrowingNetwork(
        small := small_cnn(SLOT_NAMES), SGD(small.parameters(), lr=0.5), horizon=9, seed_options={"lr": 2.0}
    )
    chosen.germinate(SLOT_NAMES[0], "norm")

    rates = [group["lr"] for group in optimizer.param_groups]
    assert rates == pytest.approx([0.05, 0.05])
    assert [group["lr"] for group in chosen.optimizer.param_groups] == [0.5, 2.0]
    # A new scheduler continues from the state of the old one.
    following = LambdaLR(optimizer, lambda epoch: 0.1**epoch, last_epoch=scheduler.last_epoch - 1)
    optimizer.step()
    following.step()
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.005, 0.005])


def test_a_seed_that_is_told_to_fade_again_and_again_does_end() -> None:
    growing = grown(lambda host: SGD(host.parameters(), lr=0.1))
    train_epochs(growing, 6)
    place = SLOT_NAMES[-1]
    for _ in range(3):
        growing.cull(place, ticks=4)
        train_epochs(growing, 1)

    assert not growing.slots[place].occupied


@pytest.mark.parametrize(("ticks", "curve"), [(-3, "linear"), (2.5, "linear"), (1, "bogus")])
def test_a_cull_that_makes_no_sense_is_refused_and_nothing_is_culled(ticks: int, curve: str) -> None:
    growing = grown(lambda host: SGD(host.parameters(), lr=0.1))

    with pytest.raises(ValueError, match=r"whole number of ticks|unknown curve 'bogus'"):
        growing.cull(SLOT_NAMES[-1], ticks=ticks, curve=curve)
    assert growing.slots[SLOT_NAMES[-1]].occupied


def test_a_score_that_is_a_mean_is_refused() -> None:
    growing = grown(lambda host: SGD(host.parameters(), lr=0.1))
    train_epochs(growing, 6)

    with pytest.raises(ValueError, match=r"a score is a number per sample, \[16\], and no mean; got \[\]"):
        contributions(growing.module, [small_batch()], lambda out, digits: (out.argmax(1) == digits).float().mean())


class StoresTensor(nn.Module):
    """Network with two inputs and a mapping as output that stores a tensor between forward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)
        self.slot = SeedSlot("middle", "vector", 6, on_single_path=False)  # the scale bypasses it
        self.remembered: torch.Tensor | None = None

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.remembered is None:
            self.remembered = torch.ones(6) * self.first.weight.new_ones(())
        return {"logits": self.last(self.slot(torch.tanh(self.first(x))) * self.remembered) * scale}


def test_networks_of_several_inputs_and_named_outputs_are_measured_and_can_train_afterwards() -> None:
    torch.manual_seed(0)
    network = StoresTensor()
    growing = GrowingNetwork(
        network,
        SGD(network.parameters(), lr=0.1),
        horizon=9,
        lifecycle=LifecycleConfig(birth="random", training_ticks=0),
    )
    growing.germinate("middle", "mlp", ticks=1)
    x, scale, y = torch.randn(7, 4), torch.rand(7, 1), torch.randint(3, (7,))
    growing.slots["middle"].train()
    F.cross_entropy(network(x, scale)["logits"], y).backward()
    growing.end_epoch()
    network.remembered = None

    def right(outputs: dict[str, torch.Tensor], targets: torch.Tensor) -> torch.Tensor:
        return -F.cross_entropy(outputs["logits"], targets, reduction="none")

    measured = measure_variants(network, leave_one_out(["middle"]), [((x, scale), y)], score=right)

    whole = -F.cross_entropy(network(x, scale)["logits"], y)
    growing.slots["middle"].empty()
    bare = -F.cross_entropy(network(x, scale)["logits"], y)
    torch.testing.assert_close(measured, torch.stack([whole, bare]).detach())
    bare.backward()  # the tensor stored during measurement must allow autograd


def test_slots_of_its_own_and_attached_ones_are_saved_and_loaded_together(tmp_path: Path) -> None:
    def network() -> CNN:
        host = small_cnn(["block1"]).eval()
        attach_slots(host, ["norms.1"], small_batch()[0])
        return host

    host = network()
    growing = GrowingNetwork(host, SGD(host.parameters(), lr=0.1), horizon=9, lifecycle=LifecycleConfig(birth="random"))
    for slot in growing.slots:
        growing.germinate(slot, "conv_small")
    save(host, tmp_path / "grown")

    fresh = small_cnn(["block1"], seed=8).eval()
    load(fresh, tmp_path / "grown")

    assert story(fresh) == story(host)
    assert all(torch.equal(value, host.state_dict()[name]) for name, value in fresh.state_dict().items())


def test_a_network_that_is_compiled_already_gets_no_slots() -> None:
    in_place = small_cnn([])
    in_place.compile(backend="eager")
    for network in (torch.compile(small_cnn([]), backend="eager"), in_place):
        with pytest.raises(ValueError, match="attach them first, compile then"):
            attach_slots(network, ["norms.1"], small_batch()[0])
