"""Check of a counterfactual pass over a grown host against plain passes."""

from copy import deepcopy

import torch
from torch import Tensor, nn

from esper_lightning.growth.counterfactual import forward_variants
from esper_lightning.growth.lifecycle import slots_of


def check_leave_one_out(network: nn.Module, x: Tensor) -> None:
    """Check every variant; every slot must hold a blended seed, and all seeds differ."""
    network = network.double().eval()
    x = x.double() if x.is_floating_point() else x
    names = list(slots_of(network))
    variants = [frozenset(names), *(frozenset(names) - {name} for name in names), frozenset()]
    with torch.inference_mode():
        outputs, places = forward_variants(network, variants, x)
        groups = outputs.unflatten(0, (len(variants), -1))
        assert sorted(places) == list(range(len(variants)))
        for variant, place in zip(variants, places, strict=True):
            plain = deepcopy(network)
            for name, slot in slots_of(plain).items():
                if name not in variant:
                    slot.empty()
            torch.testing.assert_close(groups[place], plain(x), rtol=1e-10, atol=1e-10)
            assert place == places[0] or not torch.allclose(groups[place], groups[places[0]])
