"""What a seed is worth, however a user validates: as a plain validation with the seed switched off says, or refused."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchmetrics import MaxMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score, MulticlassRecall

from esper_lightning.callbacks import Grow
from esper_lightning.callbacks.measuring import VariantMeter
from tests.callbacks.grow.trainings import grow, trainer
from tests.decisions import germinate
from tests.growth.mixing import MIXING

torch.set_num_threads(1)

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(150, 6, generator=GENERATOR)
Y = (X[:, :3].square().sum(1) > X[:, 3:].square().sum(1)).long()
TRAIN, HELD_OUT = TensorDataset(X[:100], Y[:100]), TensorDataset(X[100:], Y[100:])


def held_out(size: int = 20, **settings: Any) -> DataLoader:
    """Return a loader of 50 samples: two batches of 20, and one of 10."""
    return DataLoader(HELD_OUT, size, **settings)


# Networks.


class Net(nn.Sequential):
    def __init__(self, behind: nn.Module | None = None) -> None:
        super().__init__(nn.Linear(6, 16), nn.ReLU(), behind or nn.Identity(), nn.Linear(16, 2))

    def forward(self, x: Tensor) -> Tensor:
        for i in range(4):
            x = self[i](x)
        return x


# Modules.


class Plain(L.LightningModule):
    def __init__(self, behind: nn.Module | None = None) -> None:
        super().__init__()
        self.net = Net(behind)
        self.prepare()

    def prepare(self) -> None:
        pass

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def right(self, batch: Any) -> Tensor:
        return (self.net(batch[0]).argmax(1) == batch[1]).float()

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val_acc", self.right(batch).mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.02)


def validated(step: Callable[..., object]) -> type[Plain]:
    """Return a kind of module with a validation step of its own."""
    return type("Validated", (Plain,), {"validation_step": step})


def holding(make: Callable[[], object]) -> type[Plain]:
    """Return a kind of module with an attribute that knows nothing of PyTorch."""
    return type("Holding", (Plain,), {"prepare": lambda self: setattr(self, "held", make())})


class MetricInTheNetwork(Plain):
    def prepare(self) -> None:
        self.net.accuracy = MulticlassAccuracy(2, average="micro")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.net.accuracy.update(self.net(batch[0]).argmax(1), batch[1])

    def on_validation_epoch_end(self) -> None:
        self.log("val_acc", self.net.accuracy.compute())
        self.net.accuracy.reset()


class Groups(Plain):
    """A collection whose metrics share a state, and one of them twice."""

    def prepare(self) -> None:
        parts = {"acc": MulticlassAccuracy(2), "recall": MulticlassRecall(2), "f1": MulticlassF1Score(2)}
        self.metrics = MetricCollection(parts, prefix="val_")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.metrics.update(self.net(batch[0]), batch[1])
        self.log_dict(self.metrics)


@dataclass
class Meter:
    total: Any = 0.0
    history: list[float] = field(default_factory=list)

    def update(self, values: Tensor) -> None:
        self.total = self.total + values.sum()
        self.history += values.tolist()

    def mean(self) -> float:
        return float(self.total) / len(self.history)


class Meters(Plain):
    """Meters of another class deep in plain objects. In training they hold a graph."""

    def prepare(self) -> None:
        self.records = [{"val": (Meter(),)}]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.kept = Meter(total=loss * 1.0)
        return loss

    def meter(self) -> Meter:
        return self.records[0]["val"][0]

    def on_validation_epoch_start(self) -> None:
        self.records[0]["val"] = (Meter(),)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.meter().update(self.right(batch))

    def on_validation_epoch_end(self) -> None:
        self.log("val_acc", self.meter().mean())


class NeverReset(Meters):
    def on_validation_epoch_start(self) -> None:
        pass


class Buffers(Plain):
    """A count that the network keeps in a buffer and in a parameter that does not learn."""

    def prepare(self) -> None:
        self.net.register_buffer("hits", torch.zeros(()))
        self.net.seen = nn.Parameter(torch.zeros(()), requires_grad=False)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.net.hits += self.right(batch).sum()
        self.net.seen += len(batch[0])

    def on_validation_epoch_end(self) -> None:
        self.log("val_acc", self.net.hits / self.net.seen)
        self.net.hits.zero_()
        self.net.seen.zero_()


class Features(Plain):
    """A forward hook keeps features, which validation reads."""

    def prepare(self) -> None:
        self.features: dict[str, Tensor] = {}
        self.net[2].register_forward_hook(lambda module, inputs, output: self.features.update(last=output))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.net(batch[0])
        self.log("val_loss", F.cross_entropy(self.net[3](self.features["last"]), batch[1]))


class BatchHooks(Plain):
    """Every hook around a step has a part in the number."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] + 0.1, batch[1]]

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] * 0.9, batch[1]]

    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        batch[0].add_(0.05 * batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", outputs)


class Swaps(Plain):
    """Validation on other weights, which its hooks exchange."""

    def on_validation_start(self) -> None:
        self.raw = self.net[3].weight.detach().clone()
        self.net[3].weight.data.mul_(torch.tensor([[1.5], [0.5]]))

    def on_validation_end(self) -> None:
        self.net[3].weight.data.copy_(self.raw)


def reduced(reduce_fx: str) -> type[Plain]:
    return validated(lambda self, batch, batch_idx: self.log("val_loss", self.loss(batch), reduce_fx=reduce_fx))


class Forked(Plain):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_acc", self.right(batch).mean(), on_step=True, on_epoch=True, prog_bar=True, sync_dist=True)
        self.log("val_loss", self.loss(batch))


class Best(Plain):
    """The best value so far; as that of all validations, a seed would be worth nothing in most of them."""

    def prepare(self) -> None:
        self.best = MaxMetric()
        self.outputs: list[Tensor] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.outputs.append(-self.loss(batch).exp())

    def on_validation_epoch_end(self) -> None:
        self.best(torch.stack(self.outputs).mean())
        self.log("val_loss", 1.0 / -self.best.compute())
        self.outputs.clear()


class TwoParts(Plain):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        parts = [self.loss(part) for part in batch.values() if part is not None]
        self.log("val_loss", sum(parts), batch_size=len(parts))


def probability(outputs: Tensor, y: Tensor) -> Tensor:  # [B, 2], [B] -> [B]
    return outputs.softmax(1).gather(1, y[:, None])[:, 0]


Loss = validated(lambda self, batch, batch_idx: self.log("val_loss", self.loss(batch)))
Probability = validated(
    lambda self, batch, batch_idx: self.log("val_acc", probability(self.net(batch[0]), batch[1]).mean())
)

OUTSIDE = Meter()


class GlobalMeter(NeverReset):
    def meter(self) -> Meter:
        return OUTSIDE


class CallbacksMeter(GlobalMeter):
    def meter(self) -> Meter:
        return next(callback for callback in self.trainer.callbacks if isinstance(callback, Start)).meter


counting = partial(LambdaCallback, on_validation_batch_end=lambda trainer, module, *_: module.log("seen", 0.5))
negating = partial(LambdaCallback, on_validation_batch_start=lambda trainer, module, batch, *_: batch[0].mul_(-1.0))


class IteratorStep(Plain):
    def validation_step(self, dataloader_iter: Any) -> None:
        batch, _, _ = next(dataloader_iter)
        self.log("val_acc", self.right(batch).mean(), batch_size=len(batch[0]))


class Single:
    """An object that refuses to be copied. A lock, which cannot be copied either, is shared."""

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("there is one only")


# Loaders.


class Augmented(Dataset):
    def __len__(self) -> int:
        return len(HELD_OUT)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        x, y = HELD_OUT[i]
        return x + 0.3 * torch.randn(6), y


# The table.

SCALER = torch.amp.GradScaler("cpu", init_scale=2.0**8)


class Style(NamedTuple):
    kind: type[Plain] = Plain
    loaders: Callable[[], Any] = held_out
    monitor: str = "val_acc"
    settings: dict[str, Any] = {}  # noqa: RUF012
    behind: Callable[[], nn.Module] | None = None
    callbacks: tuple[Callable[[], L.Callback], ...] = ()
    grow: dict[str, Any] = {}  # noqa: RUF012


STYLES: dict[str, Style] = {
    "a mean": Style(),
    "a metric in the network": Style(MetricInTheNetwork),
    "compute groups": Style(Groups, monitor="val_f1"),
    "meters of another class": Style(Meters),
    "buffers": Style(Buffers),
    "a lock in the module": Style(holding(lambda: {"own": Lock()})),
    "features of a hook": Style(Features, monitor="val_loss"),
    "a batch changed in place": Style(
        validated(lambda self, batch, batch_idx: self.log("val_loss", self.loss([batch[0].mul_(0.5), batch[1]]))),
        monitor="val_loss",
    ),
    "batch hooks": Style(BatchHooks, monitor="val_loss"),
    "weights exchanged by hooks": Style(Swaps),
    "weights of batches": Style(
        validated(lambda self, batch, i: self.log("val_acc", self.right(batch).mean(), batch_size=1 + 3 * i))
    ),
    "reduce_fx max": Style(reduced("max"), monitor="val_loss"),
    "reduce_fx sum": Style(reduced("sum"), monitor="val_loss"),
    "name_epoch": Style(Forked, monitor="val_acc_epoch"),
    "the best value so far": Style(Best, monitor="val_loss"),
    "two metrics": Style(Forked, monitor="val_loss", grow={"loss": "val_loss"}),
    "one loader in a dictionary": Style(loaders=lambda: {"a": held_out()}),
    "CombinedLoader of one": Style(TwoParts, lambda: CombinedLoader({"a": held_out()}, "min_size"), "val_loss"),
    "CombinedLoader max_size": Style(
        TwoParts, lambda: CombinedLoader({"a": held_out(), "b": held_out(10)}, "max_size"), "val_loss"
    ),
    "limit_val_batches": Style(Loss, monitor="val_loss", settings={"limit_val_batches": 2}),
    "a shuffled loader": Style(loaders=lambda: held_out(10, shuffle=True)),
    "an augmented loader, other batches": Style(loaders=lambda: DataLoader(Augmented(), 20), grow={"batches": 2}),
    "validation twice per epoch": Style(Meters, settings={"val_check_interval": 0.5}),
    "validation every second epoch": Style(Meters, settings={"check_val_every_n_epoch": 2}),
    "bf16-mixed": Style(Loss, monitor="val_loss", settings={"precision": "bf16-mixed"}),
    "bf16-true": Style(Loss, monitor="val_loss", settings={"precision": "bf16-true"}),
    "16-mixed": Style(Loss, monitor="val_loss", settings={"plugins": MixedPrecision("16-mixed", "cpu", SCALER)}),
    **{name: Style(Loss, monitor="val_loss", behind=behind) for name, behind in MIXING.items()},
    **{
        f"{name}, score": Style(Probability, behind=behind, grow={"score": probability})
        for name, behind in MIXING.items()
    },
}


class Start(L.Callback):
    """Keeps the random numbers with which the last validation began, or lets one begin with them."""

    def __init__(self, state: Tensor | None = None) -> None:
        self.state, self.given = state, state is not None
        self.meter = Meter()

    def on_validation_start(self, *_: object) -> None:
        if self.given:
            torch.set_rng_state(self.state)
        self.state = torch.get_rng_state()

    def on_train_end(self, trainer: Any, *_: object) -> None:
        (callback,) = (callback for callback in trainer.callbacks if isinstance(callback, Grow))
        self.batches = [kept[0] for kept in callback._meter.batches]


def trained(style: Style) -> tuple[Plain, Any, L.Trainer, Start]:
    L.seed_everything(0, verbose=False)
    global OUTSIDE
    OUTSIDE = Meter()
    module, state = style.kind(style.behind and style.behind()), Start()
    options: dict[str, Any] = {"slots": ["1"], "network": "net", "blueprints": ["mlp_small"], "batches": 8}
    options |= {"monitor": style.monitor, "mode": "min" if style.monitor == "val_loss" else "max"}
    callback = grow({0: germinate(0)}, **options | style.grow)
    epochs = 8 if "check_val_every_n_epoch" in style.settings else 4
    callbacks = [state, callback, *(make() for make in style.callbacks)]
    made = trainer(*callbacks, epochs=epochs, num_sanity_val_steps=0, **style.settings)
    made.fit(module, DataLoader(TRAIN, 25), style.loaders())
    assert {p.dtype for p in callback.growing.slots["1"].seed.parameters()} == {module.net[0].weight.dtype}
    return module, callback, made, state


@pytest.mark.parametrize("style", STYLES.values(), ids=STYLES)
def test_a_contribution_is_that_of_plain_validations(style: Style) -> None:
    module, callback, made, state = trained(style)
    told, logged = (float(made.callback_metrics[name]) for name in ("growth/contribution.1", style.monitor))
    (slot,) = callback.growing.slots.values()
    batches = DataLoader(state.batches, None) if "batches" in style.grow else style.loaders()
    settings = {
        name: value for name, value in style.settings.items() if name in ("precision", "plugins", "limit_val_batches")
    }

    def value() -> float:
        plain = trainer(Start(state.state), **settings)
        if isinstance(module, Best):
            module.best.reset()
        plain.validate(module, batches, verbose=False)
        return float(plain.callback_metrics[style.monitor])

    assert slot.blended
    whole = value()
    if style.kind is not Best and "batches" not in style.grow:
        assert logged == pytest.approx(whole, abs=1e-5), "nothing of Grow's own passes is in what the module collects"
    slot.override = lambda slot, x: x
    without = value()
    right = 100 * (without - whole) / without if style.monitor == "val_loss" else 100 * (whole - without)
    assert abs(right) > 0.5
    assert told == pytest.approx(right, abs=1e-3)


REFUSED: dict[str, tuple[Style, str]] = {
    "a meter that is never reset": (Style(NeverReset), "is not reset or not in the module"),
    "a global meter": (Style(GlobalMeter), "as Lightning logged it"),
    "a meter of a callback": (Style(CallbacksMeter), "as Lightning logged it"),
    "a metric that a callback logs": (Style(monitor="seen", callbacks=(counting,)), "what a callback logs cannot be"),
    "a callback that changes batches": (Style(callbacks=(negating,)), "as Lightning logged it"),
    "a step that takes an iterator": (Style(IteratorStep), "takes a dataloader_iter"),
    "an iterator for a loader": (Style(loaders=lambda: (batch for batch in held_out())), "can be read once only"),
    "an object that cannot be copied": (Style(holding(Single)), "cannot be copied: there is one only"),
}


@pytest.mark.parametrize(("style", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_measured_is_refused_in_one_line_that_names_the_way_out(style: Style, reason: str) -> None:
    with pytest.raises(ValueError) as raised:
        trained(style)

    said = str(raised.value)
    assert re.search(reason, said) and "Grow(score=…)" in said and "\n" not in said


@pytest.mark.parametrize(
    ("loaders", "warned"),
    [
        (lambda: held_out(shuffle=True), 1),
        (lambda: DataLoader(Augmented(), 20), 1),
        (held_out, 0),
        (lambda: held_out(10, shuffle=True, generator=torch.Generator()), 1),
    ],
)
def test_a_loader_of_other_batches_each_time_is_told_of_once(
    loaders: Callable[[], Any], warned: int, recwarn: pytest.WarningsRecorder
) -> None:
    trained(Style(Loss, loaders, "val_loss"))

    said = [str(warning.message) for warning in recwarn if "gives other batches each time" in str(warning.message)]
    assert len(said) == warned and all("\n" not in line for line in said)


@pytest.mark.parametrize(
    "name", ["a metric in the network", "meters of another class", "batch hooks", "weights exchanged by hooks"]
)
def test_a_measurement_leaves_no_trace(name: str) -> None:
    """A training with a seed that is measured at each tick equals one in which it is not."""
    weights = []
    for judged in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if not judged:
                patch.setattr(VariantMeter, "measure", lambda self, variants, name=None: [0.5] * len(variants))
                patch.setattr(VariantMeter, "compare", lambda self, measured, logged: None)
            module, *_ = trained(STYLES[name])
        weights.append(module.state_dict())

    assert all(torch.equal(x, weights[1][name]) for name, x in weights[0].items())


class Halves(Plain):
    """Its validation halves the learning rate, by a scheduler and by hand, and counts in the data module."""

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.lr_schedulers().step()  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]
            self.optimizers().param_groups[0]["weight_decay"] *= 0.5  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]
            self.trainer.datamodule.level += 1  # type: ignore[attr-defined]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        optimizer.step()
        return loss

    def configure_optimizers(self) -> Any:
        self.automatic_optimization = False
        rate = torch.tensor(0.02) if self.is_tensor else 0.02
        optimizer = torch.optim.AdamW(self.parameters(), lr=rate, weight_decay=0.5, foreach=False)
        halving = [lr_scheduler.ExponentialLR(optimizer, 0.5) for _ in range(2)]
        return [optimizer], [lr_scheduler.SequentialLR(optimizer, halving, [2])]


@pytest.mark.parametrize("is_tensor", [False, True])
def test_what_validation_does_to_rates_and_the_data_module_is_done_once(is_tensor: bool) -> None:
    callback = grow({0: germinate(0)}, slots=["1"], network="net", blueprints=["mlp_small"])
    ended = []
    for callbacks in ([], [callback]):
        data = L.LightningDataModule.from_datasets(TRAIN, HELD_OUT, batch_size=20)
        data.level = 0  # type: ignore[attr-defined]
        module = type("Halves", (Halves,), {"is_tensor": is_tensor})()
        trainer(*callbacks, epochs=5).fit(module, data)
        optimizer: Any = module.optimizers()
        host = optimizer.param_groups[0]
        ended.append((float(host["lr"]), host["weight_decay"], data.level))  # type: ignore[attr-defined]

    assert ended[0] == ended[1] and len(callback.growing.optimizer.param_groups) == 2
    assert 0.0 < ended[0][0] < 0.02 and ended[0][1:] == (0.5 * 0.5**5, 5)


class TwoModes(torch.optim.SGD):
    """SGD whose parameters are others in evaluation: 1.5 of those in training."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        for group in self.param_groups:
            group["train_mode"] = True

    def scale(self, training: bool, by: float) -> None:
        for group in self.param_groups:
            for parameter in group["params"] if group["train_mode"] is not training else ():
                parameter.data.mul_(by)
            group["train_mode"] = training

    def train(self) -> None:
        self.scale(True, 2 / 3)

    def eval(self) -> None:
        self.scale(False, 3 / 2)


class SetsModes(Plain):
    """Its optimizer is set to the mode of what begins."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return TwoModes(self.parameters(), lr=0.1)

    def on_validation_epoch_start(self) -> None:
        self.optimizers().optimizer.eval()  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]

    def on_train_epoch_start(self) -> None:
        self.optimizers().optimizer.train()  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]


@pytest.mark.parametrize("kind", [Swaps, SetsModes])
def test_weights_that_a_validation_exchanges_are_exchanged_by_lightning_alone(kind: type[Plain]) -> None:
    weights = []
    for callbacks in ([], [grow(slots=["1"], network="net", blueprints=["mlp_small"])]):
        L.seed_everything(0, verbose=False)
        module = kind()
        trainer(*callbacks, epochs=3, num_sanity_val_steps=0).fit(module, DataLoader(TRAIN, 25), held_out())
        weights.append(list(module.net.parameters()))

    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))


@pytest.mark.parametrize("are_unlike", [False, True])
def test_first_batches_that_are_unlike_the_others_are_told_of_once(
    are_unlike: bool, recwarn: pytest.WarningsRecorder
) -> None:
    x, y = X.repeat(4, 1), Y.repeat(4)
    y[:240] = 1 - y[:240] if are_unlike else y[:240]  # the rule that the network learns is wrong for them

    trained(Style(loaders=lambda: DataLoader(TensorDataset(x, y), 80), grow={"batches": 3}))

    said = [str(warning.message) for warning in recwarn if "on the first 3 validation batches" in str(warning.message)]
    assert len(said) == are_unlike and all("\n" not in line for line in said)


@pytest.mark.parametrize("rows", [range(100), [str(i) for i in range(100)]], ids=["tensors", "texts"])
def test_a_training_that_learns_at_once_is_not_told_that_its_batches_are_unlike(
    rows: Any, recwarn: pytest.WarningsRecorder
) -> None:
    class AtOnce(Plain):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.net(X[[int(row) for row in batch]])
            self.log("val_acc", torch.tensor(0.95 if self.trainer.global_step else 0.5), batch_size=25)

    made = trainer(grow(slots=["1"], network="net", blueprints=["mlp_small"], batches=2), epochs=2)
    made.fit(AtOnce(), DataLoader(TRAIN, 25), DataLoader(rows, 25))

    assert not [str(warning.message) for warning in recwarn if "validation batches, by" in str(warning.message)]
