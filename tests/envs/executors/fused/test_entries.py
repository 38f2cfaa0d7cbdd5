"""Batched evaluation of combinations of seeds for many hosts, against a separate pass for each host."""

from collections.abc import Sequence

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from esper_lightning.envs.executors.fused.hosts import BatchedHosts
from esper_lightning.growth.blend import Ramp
from esper_lightning.growth.blueprints import build_on
from esper_lightning.growth.counterfactual import SeedVariant, forward_variants
from esper_lightning.growth.slot import SeedSlot
from esper_lightning.growth.stages import Stage
from tests.growth.grown import CPU, LIFE, generator_of, grow

SLOTS = ("a", "b", "c")

SAMPLES = 2


class Chain(nn.Module):
    """Network of consecutive slots, some of them bypassed by a shortcut."""

    def __init__(self, trunks: Sequence[bool]) -> None:
        super().__init__()
        self.slots = nn.ModuleList(
            SeedSlot(name, "vector", 3, on_single_path=trunk) for name, trunk in zip(SLOTS, trunks, strict=True)
        )
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:  # [B, 3] -> [B, 2]
        for slot in self.slots:
            x = torch.tanh(slot(x)) if slot.on_single_path else x + slot(x)
        return self.head(x)


stages = st.tuples(*[st.sampled_from([Stage.DORMANT, *LIFE])] * len(SLOTS))

blueprints = st.tuples(*[st.sampled_from(["lora", "norm"])] * len(SLOTS))


@st.composite
def hosts(draw: st.DrawFn) -> tuple[list[nn.Module], list[list[SeedVariant]]]:
    """Draw hosts with the same shortcuts and any seeds and stages, and equally many combinations for each."""
    trunks, count = draw(st.tuples(*[st.booleans()] * len(SLOTS))), draw(st.integers(1, 5))
    networks, wanted = [], []
    for i in range(draw(st.integers(1, 4))):
        network = build_on(CPU, lambda: Chain(trunks), generator_of(i)).double()
        for slot, stage, blueprint in zip(network.slots, draw(stages), draw(blueprints), strict=True):
            if stage is not Stage.DORMANT:
                grow(slot, stage, blueprint, Ramp(draw(st.integers(1, 2))), i)
        networks.append(network.eval())
        wanted.append(draw(st.lists(st.frozensets(st.sampled_from(SLOTS)), min_size=count, max_size=count)))
    return networks, wanted


@given(drawn=hosts())
def test_each_host_has_as_many_entries_as_in_a_pass_of_its_own_and_they_say_the_same(
    drawn: tuple[list[nn.Module], list[list[SeedVariant]]],
) -> None:
    """Equal combinations are computed once, and hosts keep their own weights, in whatever order entries are."""
    networks, wanted = drawn
    x = torch.randn(SAMPLES, 3, generator=generator_of(), dtype=torch.float64)
    batched = BatchedHosts(networks[0])
    with torch.inference_mode():
        batched.load(networks).bind(requires_grad=False)
        ours = batched.evaluate(x, wanted).unflatten(0, (-1, SAMPLES))
        for i, (network, own, places) in enumerate(
            zip(networks, wanted, batched.entries.entry_of_variant(), strict=True)
        ):
            theirs, their_places = forward_variants(network, own, x)
            torch.testing.assert_close(ours[places], theirs.unflatten(0, (-1, SAMPLES))[their_places])
            assert batched.entries.hosts.count(i) == max(their_places) + 1
            assert sorted(set(places)) == [k for k, host in enumerate(batched.entries.hosts) if host == i]

    assert len(ours) == len(batched.entries.hosts)
