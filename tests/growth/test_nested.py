"""Selection and replacement of a tensor in tuples, lists and mappings, and slots attached to it."""

import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import spectral_norm, weight_norm

from esper_lightning.growth.attach import attach_slots
from esper_lightning.growth.stages import Stage
from esper_lightning.runtime.nested import copy_module, iter_tensors
from tests.growth.grown import generator_of, grow

WIDTH = 6


class Encoded(NamedTuple):
    features: Tensor
    mask: Tensor


class ModelOutput(OrderedDict):
    """Mapping whose keys are also attributes, like the outputs of many transformers."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)


class TakesApart(nn.Module):
    """Encoder with an output of several parts, which is stored for inspection, and a layer that reads it."""

    def __init__(self, pack: Callable[[Tensor, Tensor], Any], read: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.encoder = _Encoder(pack)
        self.read = read
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:  # [B, 5] -> [B, 3]
        self.seen = self.encoder(x)
        return self.head(self.read(self.seen))


class _Encoder(nn.Module):
    def __init__(self, pack: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(5, WIDTH)
        self.pack = pack

    def forward(self, x: Tensor) -> Any:
        self.made = self.pack(torch.tanh(self.layer(x)), torch.arange(len(x)))
        return self.made


CONTAINERS: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], Tensor]]] = {
    "tuple": (lambda h, ids: (h, ids), lambda out: out[0]),
    "dict": (lambda h, ids: {"ids": ids, "h": h}, lambda out: out["h"]),
    "attributes": (lambda h, ids: ModelOutput(ids=ids, h=h), lambda out: out.h),
    "nested": (lambda h, ids: (ids, {"a": [ids, Encoded(h, ids)]}), lambda out: out[1]["a"][1][0]),
}


@pytest.mark.parametrize(("pack", "read"), CONTAINERS.values(), ids=list(CONTAINERS))
def test_a_seed_grows_behind_a_part_of_an_output(
    pack: Callable[[Tensor, Tensor], Any], read: Callable[[Any], Tensor]
) -> None:
    network, x = TakesApart(pack, read), torch.randn(4, 5, generator=generator_of())
    plain = network(x)
    slot = attach_slots(network, ["encoder"], x)["encoder"]
    assert (slot.layout, slot.width) == ("vector", WIDTH)
    assert torch.equal(network(x), plain)
    grow(slot, Stage.FOSSILIZED, "lora")

    outputs = network(x)

    made, seen = network.encoder.made, network.seen
    assert torch.equal(read(seen), slot.seed(read(made)))
    assert not torch.allclose(outputs, plain)
    assert type(seen) is type(made)
    others, seen_others = ([id(x) for x in iter_tensors(output) if x is not read(output)] for output in (made, seen))
    assert others and seen_others == others, "all other tensors are the same objects"


def test_a_seed_grows_on_the_output_of_an_lstm_and_not_on_its_states() -> None:
    network, x = nn.Sequential(nn.LSTM(5, WIDTH, batch_first=True)), torch.randn(4, 7, 5, generator=generator_of())
    outputs, states = network(x)
    slot = attach_slots(network, ["0"], x)["0"]
    assert (slot.layout, slot.width) == ("sequence", WIDTH)
    grow(slot, Stage.FOSSILIZED, "lora")
    grown, grown_states = network(x)
    torch.testing.assert_close(grown, slot.seed(outputs))
    assert not torch.allclose(grown, outputs)
    assert all(map(torch.equal, grown_states, states))


@pytest.mark.parametrize("norm", [weight_norm, spectral_norm])
def test_a_network_with_a_computed_weight_or_a_stored_activation_is_copied(norm: Callable[..., nn.Module]) -> None:
    class Keeps(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.last = [super().forward(x)]
            return self.last[0]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch has newer forms of these norms, and people have these
        network = nn.Sequential(norm(nn.Linear(3, 3)), Keeps(3, 3)).eval()
    x = torch.randn(2, 3)
    expected = network(x)

    copied = copy_module(network)

    assert torch.equal(copied(x), expected)
    copied(x).sum().backward()
    assert all(p.grad is not None for p in copied.parameters()) and all(p.grad is None for p in network.parameters())


def test_a_module_that_holds_a_lock_is_refused_in_one_line() -> None:
    network = nn.Linear(2, 2)
    network.lock = threading.Lock()  # type: ignore[assignment]

    with pytest.raises(ValueError, match=r"Linear cannot be copied: cannot pickle '_thread\.lock' object"):
        copy_module(network)
