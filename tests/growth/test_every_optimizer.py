"""Every optimizer of torch trains seeds, in a new run and in a resumed one, or is refused in one line."""

from copy import deepcopy

import pytest
import torch
from torch.optim import Optimizer

from esper_lightning.growth import GrowingNetwork
from tests.growth.by_hand import EAGER, check_optimizer_matches, growing, learn
from tests.growth.grown import host_of

OPTIMIZERS: dict[str, type[Optimizer]] = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer
}

REFUSED = {
    "LBFGS": "LBFGS cannot hold parameter groups that come and go; use SGD, Adam or AdamW",
    "Muon": "Muon trains matrices alone, and seeds have other parameters; use SGD, Adam or AdamW",
    "SparseAdam": "SparseAdam takes sparse gradients alone, and those of seeds are dense; use SGD, Adam or AdamW",
}


@pytest.mark.parametrize("name", sorted(OPTIMIZERS.keys() - REFUSED.keys()))
def test_seeds_come_and_go_in_a_resumed_run_and_after_a_rollback(name: str) -> None:
    def made() -> GrowingNetwork:
        return growing(EAGER, lambda host: OPTIMIZERS[name](host.parameters(), lr=0.01))  # type: ignore[call-arg]

    first = made()
    first.germinate("block1", "conv_light")
    learn(first.module, first.optimizer, 0)
    saved = deepcopy(first.state_dict())
    resumed = made()
    resumed.load_state_dict(saved)

    for step in range(2):
        resumed.germinate("block2.pool", "conv_light")
        seed = resumed.slots["block2.pool"].seed
        before = [parameter.detach().clone() for parameter in seed.parameters()]
        learn(resumed.module, resumed.optimizer, step)
        assert any(not torch.equal(*pair) for pair in zip(before, seed.parameters(), strict=True))
        resumed.cull("block1")
        learn(resumed.module, resumed.optimizer, step)
        check_optimizer_matches(resumed)
        resumed.load_state_dict(saved)
        check_optimizer_matches(resumed)


@pytest.mark.parametrize("name", REFUSED)
def test_an_optimizer_that_cannot_train_seeds_is_refused_in_one_line(name: str) -> None:
    matrices = [parameter for parameter in host_of("image").parameters() if parameter.ndim == 2]

    with pytest.raises(ValueError) as refusal:
        growing(EAGER, lambda _: OPTIMIZERS[name](matrices, lr=0.01))  # type: ignore[call-arg]

    assert str(refusal.value) == REFUSED[name]
