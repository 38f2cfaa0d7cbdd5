"""Stack with optimizers as people use them: Muon beside AdamW, in three ways; schedule-free ones; Prodigy."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import prodigyopt
import pytest
import schedulefree
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer

from esper_lightning.callbacks import Stack
from esper_lightning.growth import stack
from tests.callbacks.gpt import EachBatch, LitGPT, equal, train, weights


class Joined(Optimizer):
    """Several optimizers as one, whose groups are theirs."""

    def __init__(self, *inner: Optimizer) -> None:
        groups = [group for each in inner for group in each.param_groups]
        super().__init__(groups, {})
        self.inner, self.param_groups = inner, groups

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        for each in self.inner:
            each.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {"inner": [each.state_dict() for each in self.inner]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for each, state in zip(self.inner, state_dict["inner"], strict=True):
            each.load_state_dict(state)


class Grouped(Optimizer):
    """One optimizer that treats matrices in another way, by a flag of their group."""

    def __init__(self, matrices: list[nn.Parameter], others: list[nn.Parameter]) -> None:
        super().__init__([{"params": matrices, "muon": True}, {"params": others, "muon": False}], {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    average = self.state[parameter].setdefault("average", torch.zeros_like(parameter))
                    average.lerp_(parameter.grad, 0.1)
                    u, _, v = torch.linalg.svd(average, full_matrices=False) if group["muon"] else (average, 0, None)
                    parameter.sub_(group["lr"] * (u if v is None else u @ v))
        return loss


Made = Optimizer | list[Optimizer]
OPTIMIZERS: dict[str, Callable[[list[Any], list[Any]], Made]] = {
    "two": lambda matrices, others: [Muon(matrices, lr=0.02), AdamW(others, lr=0.01)],
    "joined": lambda matrices, others: Joined(Muon(matrices, lr=0.02), AdamW(others, lr=0.01)),
    "grouped": Grouped,
    "schedule-free AdamW": lambda matrices, others: schedulefree.AdamWScheduleFree([*matrices, *others], lr=0.01),
    "schedule-free SGD": lambda matrices, others: schedulefree.SGDScheduleFree([*matrices, *others], lr=0.1),
    "Prodigy": lambda matrices, others: prodigyopt.Prodigy([*matrices, *others]),
}


class Lit(LitGPT):
    """Trains matrices of blocks apart from all else, by hand where there are two optimizers."""

    def __init__(self, kind: str) -> None:
        torch.manual_seed(0)
        super().__init__(manual=kind == "two")
        self.kind = kind

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.kind != "two":
            return super().training_step(batch, batch_idx)
        optimizers: Any = self.optimizers()
        loss = self.loss([1000 * self.current_epoch + batch_idx])
        self.log("train_loss", loss)
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in optimizers:
            optimizer.step()
        return loss

    def configure_optimizers(self) -> Any:
        named = list(self.named_parameters())
        matrices = [p for name, p in named if p.ndim == 2 and "blocks" in name]
        others = [p for name, p in named if p.ndim != 2 or "blocks" not in name]
        return OPTIMIZERS[self.kind](matrices, others)

    def on_train_epoch_start(self) -> None:
        self.set_mode("train")

    def on_validation_epoch_start(self) -> None:
        self.set_mode("eval")

    on_validation_epoch_end = on_train_epoch_start

    def set_mode(self, mode: str) -> None:
        """Schedule-free optimizers have other weights in evaluation."""
        for optimizer in self.trainer.optimizers:
            getattr(optimizer, mode, lambda: None)()


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_new_blocks_join_the_optimizers_of_their_sources_and_a_resumed_training_ends_the_same(
    kind: str, tmp_path: Path
) -> None:
    whole, each = Lit(kind), EachBatch(tmp_path)

    made = train(whole, Stack("net.blocks", start=2, at=0.5), each, num_sanity_val_steps=0)

    groups = [group["params"] for optimizer in made.optimizers for group in optimizer.param_groups]
    assert sorted(id(p) for params in groups for p in params) == sorted(id(p) for p in whole.parameters())
    shapes = [{p.ndim == 2 for p in params} for params in groups]
    assert shapes == ([{True}, {False, True}] if len(groups) == 2 else [{False, True}])
    source, copied = (list(whole.net.blocks[i].parameters()) for i in (0, 2))
    states = [{id(p): set(state) for p, state in optimizer.state.items()} for optimizer in made.optimizers]
    for one, other in zip(source, copied, strict=True):
        assert [state.get(id(one)) for state in states] == [state.get(id(other)) for state in states]
    for batches in (3, 6, 8):
        resumed = Lit(kind)
        train(resumed, Stack("net.blocks", start=2, at=0.5), resume_from=each.path(batches), num_sanity_val_steps=0)
        assert equal(weights(resumed), weights(whole))


@pytest.mark.parametrize("kind", ["schedule-free AdamW", "schedule-free SGD", "Prodigy"])
def test_new_blocks_at_zero_change_nothing_in_either_mode_of_an_optimizer(kind: str) -> None:
    """Such an optimizer holds values of the parameters, and those of a source are not zero."""
    module = Lit(kind)
    optimizer: Any = OPTIMIZERS[kind]([], list(module.parameters()))

    def losses() -> list[float]:
        found = []
        for mode in ("eval", "train"):
            getattr(optimizer, mode, lambda: None)()
            found.append(float(module.eval().loss([7])))
        return found

    losses()
    for seed in range(5):
        optimizer.zero_grad()
        module.loss([seed]).backward()
        optimizer.step()
    before = losses()

    stack(module, "net.blocks", to=6, optimizer=optimizer, new="zero", zero=("project", "mlp.2"))

    assert losses() == pytest.approx(before, abs=1e-5)


class TwoSteps(Optimizer):
    """SAM as it is published: a step up the gradient, then one of the inner optimizer from where it began."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})
        self.inner = AdamW(self.param_groups, lr=0.01)
        self.param_groups = self.inner.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        for parameter in self.learning():
            self.state[parameter]["up"] = 0.05 * parameter.grad
            parameter.add_(self.state[parameter]["up"])
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for parameter in self.learning():
            parameter.sub_(self.state[parameter].pop("up", 0.0))
        self.inner.step()
        self.zero_grad()

    def learning(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"] if parameter.grad is not None]


class PastLightning(LitGPT):
    """It steps an optimizer by its own methods, so that the Trainer counts no steps."""

    def __init__(self) -> None:
        super().__init__(manual=True)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers()
        for step in (optimizer.first_step, optimizer.second_step):
            loss = self.loss([batch_idx, batch_idx + 1])
            self.manual_backward(loss)
            step()
        return loss

    def configure_optimizers(self) -> Any:
        return TwoSteps(self.parameters())


class Relative(Optimizer):
    """An optimizer that has no learning rate, as Adafactor with steps relative to the parameters."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": None})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for parameter in (parameter for group in self.param_groups for parameter in group["params"]):
            if parameter.grad is not None:
                parameter.sub_(0.01 * parameter.grad.sign())
        return loss


class WithoutRate(LitGPT):
    def configure_optimizers(self) -> Any:
        return Relative(self.parameters())


@pytest.mark.parametrize("kind", [PastLightning, WithoutRate])
def test_a_network_grows_with_optimizers_whose_steps_or_rates_lightning_does_not_know(kind: type[LitGPT]) -> None:
    callback, seen = Stack("net.blocks", at=0.5), list[dict[str, Tensor]]()
    noting = LambdaCallback(on_train_batch_end=lambda trainer, module, *_: seen.append(deepcopy(weights(module))))
    trainer = train(kind(), callback, noting)

    assert callback.depths == [1, 4] and (trainer.global_step == 0) == (kind is PastLightning)
    before, after = (batch["net.blocks.3.project.weight"] for batch in seen[-2:])
    assert not torch.equal(before, after), "a new block learns"
