"""Stack: a GPT that knows nothing of growth begins shallow and is grown by its own Trainer, by shares or by a plan."""

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning import Callback, Trainer
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    EMAWeightAveraging,
    LambdaCallback,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.tuner import Tuner
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim.swa_utils import AveragedModel
from torch.utils.flop_counter import FlopCounterMode

from esper_lightning import from_config
from esper_lightning.callbacks import Grow, Stack
from esper_lightning.callbacks.plans import PolicyPlan, Progress, ScalingPlan
from esper_lightning.evaluation.checkpoints import load_controller
from esper_lightning.telemetry.events import Stacked, read_events
from tests.callbacks.gpt import (
    BATCHES,
    EPOCHS,
    GPT,
    LENGTH,
    EachBatch,
    LitGPT,
    NoFolder,
    RateSearch,
    equal,
    make,
    small,
    train,
    trainer,
    weights,
)
from tests.decisions import WAIT, act, germinate
from tests.tiers import rest_is_slow

TOTAL = BATCHES * EPOCHS
"""Batches of a training."""

AT = 0.6
"""Share of the training after which networks grow: in the middle of the second epoch."""

CHANGE = round(AT * TOTAL)
"""Steps before the network grows."""


def stacked(at: Any = AT, start: int = 2, **settings: Any) -> Stack:
    return Stack("net.blocks", start=start, at=at, **settings)


def depth(module: Any) -> int:
    return len(module.net.blocks)


def fp16() -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=2.0**10))


ACCUMULATED = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}


class Translator(LitGPT):
    """Two networks that learn side by side."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.decoder = GPT(3)

    def loss(self, seeds: Sequence[int]) -> Tensor:
        loss, self.net, self.decoder = super().loss(seeds), self.decoder, self.net
        loss, self.net, self.decoder = loss + super().loss(seeds), self.decoder, self.net
        return loss


def seeds() -> Grow:
    return Grow(["norm"], blueprints=["norm"], monitor="val_loss", mode="min", decider="periodic", batches=1, horizon=8)


SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[], list[Callback]], Callable[[], dict[str, Any]]]] = {
    "seeds": (make, lambda: [seeds(), stacked()], dict),
    "from one block": (make, lambda: [stacked(start=1)], dict),
    "doubling": (make, lambda: [Stack("net.blocks", start=2)], dict),
    "interleave": (make, lambda: [stacked(order="interleave")], dict),
    "zero": (make, lambda: [stacked(new="zero", zero=["project", "mlp.2"])], dict),
    "middle, twice": (make, lambda: [stacked({0.3: 3, 0.6: 4}, order="middle")], dict),
    "fresh": (make, lambda: [stacked(new="fresh", order="last")], dict),
    "reset": (make, lambda: [stacked(state="reset")], dict),
    "bf16-mixed": (make, lambda: [stacked()], lambda: {"precision": "bf16-mixed"}),
    "accumulation and clipping": (make, lambda: [stacked(0.5)], lambda: ACCUMULATED),
    "fp16": (make, lambda: [stacked()], lambda: {"plugins": [fp16()], "gradient_clip_val": 0.1}),
    "compiled network": (lambda: make(compiled="net"), lambda: [stacked()], dict),
    "compiled blocks": (lambda: make(compiled="blocks"), lambda: [stacked()], dict),
    "manual optimization": (lambda: make(manual=True), lambda: [stacked()], dict),
    "compiled module": (lambda: torch.compile(make(), backend="eager"), lambda: [stacked()], dict),
    "EMA": (make, lambda: [EMAWeightAveraging(decay=0.7), stacked()], dict),
    "EMA behind": (make, lambda: [stacked(order="interleave"), EMAWeightAveraging(decay=0.7)], dict),
    "two lists": (Translator, lambda: [stacked(), Stack("decoder.blocks", start=1, at=0.3, order="interleave")], dict),
    "SWA": (make, lambda: [stacked(0.4), StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1)], dict),
    "EMA of zero": (make, lambda: [stacked(new="zero", zero=["project", "mlp.2"]), EMAWeightAveraging()], dict),
    "seeds behind": (make, lambda: [stacked(), seeds()], dict),
    "SWA ahead": (make, lambda: [StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=2), stacked()], dict),
}


@pytest.mark.thinned(4)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if "compiled" in name else []) for name in SETTINGS]
)
def test_a_training_resumed_before_at_and_after_the_change_ends_as_the_whole_one(name: str, tmp_path: Path) -> None:
    build, callbacks, settings = SETTINGS[name]
    whole, steps = build(), EachBatch(tmp_path)
    train(whole, *callbacks(), steps, **settings())
    assert steps.depths[0] < 4 and steps.depths[-1] == 4
    assert any("seed" in key for key in weights(whole)) == ("seeds" in name)
    change = steps.depths.index(4)

    for batches in (2, 4, change, change + 2, change + 4):
        torch._dynamo.reset()
        resumed = build()
        train(resumed, *callbacks(), resume_from=steps.path(batches), **settings())
        assert equal(weights(resumed), weights(whole)), f"resumed after {batches} batches"


@pytest.mark.parametrize("settings", [{}, ACCUMULATED, {"precision": "bf16-mixed"}])
def test_until_the_change_the_training_is_that_of_the_small_network(settings: dict[str, Any], tmp_path: Path) -> None:
    steps, alone = EachBatch(tmp_path / "stacked"), EachBatch(tmp_path / "alone")
    train(make(), stacked(), steps, **settings)
    train(small(2), alone, **settings)

    change = steps.depths.index(4)
    # In the second case a step of two batches is waited for.
    assert change == CHANGE + ("accumulate_grad_batches" in settings)
    for batches in range(1, change + 1):
        ours, theirs = (torch.load(each.path(batches), weights_only=True) for each in (steps, alone))
        assert equal(ours["state_dict"], theirs["state_dict"])


@pytest.mark.parametrize(
    ("final", "start", "depths"),
    [
        (2, None, [1] * 5 + [2] * 5),
        (4, None, [1] * 4 + [2] * 3 + [4] * 3),
        (7, None, [1] * 3 + [2] * 2 + [4] * 3 + [7] * 2),
        (9, None, [2] * 3 + [4] * 2 + [8] * 3 + [9] * 2),
        (6, 3, [3] * 5 + [6] * 5),
    ],
)
def test_left_to_itself_it_doubles_a_quarter_of_the_blocks_after_equal_shares(
    final: int, start: int | None, depths: list[int]
) -> None:
    seen = EachBatch()
    train(LitGPT(final), Stack("net.blocks", start=start), seen)

    assert seen.depths == depths


def test_a_share_that_rounding_makes_larger_is_due_at_its_batch() -> None:
    seen = EachBatch()
    train(LitGPT(2), Stack("net.blocks", at=1 / 3), seen, max_steps=9)

    assert seen.depths == [1] * 3 + [2] * 6


def test_copies_are_averaged_and_trained_like_their_sources() -> None:
    module, ema = make(), EMAWeightAveraging(decay=0.9)
    grown: dict[str, Any] = {}

    def look(trainer: Trainer, *_: object) -> None:
        if trainer.global_step == CHANGE:
            average: Any = ema._average_model
            for name, each in ("blocks", module), ("average", average.module):
                grown[name] = [[x.clone() for x in block.parameters()] for block in each.net.blocks]

    train(module, ema, stacked(), LambdaCallback(on_train_batch_start=look))

    for blocks in (grown["blocks"], grown["average"]):
        assert [sum(map(torch.equal, blocks[i], blocks[i % 2])) for i in range(4)] == [len(blocks[0])] * 4


def test_the_last_checkpoint_is_that_of_the_plain_class_and_the_best_one_is_tested_at_its_own_depth(
    tmp_path: Path,
) -> None:
    best = ModelCheckpoint(tmp_path, "best", monitor="val_loss", save_last=True)
    module = make()
    made = train(module, stacked(), best, enable_checkpointing=True)

    plain = LitGPT.load_from_checkpoint(best.last_model_path)
    assert equal(weights(plain), weights(module))
    continued = make()
    train(continued, resume_from=Path(best.last_model_path), max_epochs=3)
    assert depth(continued) == 4, "the plain class goes on without the callback"

    first = EachBatch(tmp_path)
    train(make(), stacked(), first, max_epochs=1, limit_train_batches=3, max_steps=2)
    (scores,) = trainer(stacked()).test(make(), ckpt_path=first.path(1), verbose=False)
    assert scores["val_loss"] > 0.0
    (scores,) = made.test(module, ckpt_path="best", verbose=False)
    assert scores["val_loss"] == pytest.approx(float(best.best_model_score))


def test_a_second_fit_goes_on_and_a_new_trainer_begins_with_the_small_network() -> None:
    module, callback = make(), stacked()
    made = train(module, callback)
    made.fit_loop.max_epochs = EPOCHS + 1
    made.fit(module)
    assert depth(module) == 4 and callback.depths == [4]

    train(module, callback, max_steps=1)
    assert callback.depths == [2]


@pytest.mark.parametrize(("accumulated", "batches", "steps"), [(1, CHANGE, CHANGE), (2, CHANGE + 1, 4)])
def test_the_change_is_told_with_the_losses_of_the_batches_around_it(
    accumulated: int, batches: int, steps: int, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = EachBatch()

    train(make(), stacked(), seen, accumulate_grad_batches=accumulated)

    before, after = seen.losses[batches - 1 : batches + 1]
    told = f"Stack, step {steps}: net.blocks 2 → 4, training loss {before:.3f} → {after:.3f}"
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("Stack, ")] == [told]


def test_blocks_are_not_counted_as_seeds(capsys: pytest.CaptureFixture[str]) -> None:
    growing = seeds()
    train(make(), growing, stacked())

    assert growing.pool is not None and growing.pool.env.flops.host > 0
    whole, host = (sum(p.numel() for p in module.parameters()) for module in (growing.network, make().net))
    assert whole > host == growing.pool.env.host_parameters
    assert f"Grow: net has {whole:,} parameters, {host:,} of them without seeds" in capsys.readouterr().out


def test_the_loggers_get_the_number_of_blocks_at_each_change(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)

    train(make(), stacked(), logger=logger)

    logger.experiment.flush()
    events = EventAccumulator(logger.log_dir).Reload().Scalars("stack/net.blocks")
    assert [(e.step, e.value) for e in events] == [(0, 2.0), (CHANGE, 2.0), (CHANGE, 4.0), (TOTAL, 4.0)]


def test_the_folder_of_events_is_that_of_the_first_logger_that_has_one(tmp_path: Path) -> None:
    loggers = [NoFolder(), CSVLogger(tmp_path, name="", version="csv")]

    train(make(), stacked(), logger=loggers)

    grown = [event for event in read_events(tmp_path / "csv" / "stack.jsonl") if isinstance(event, Stacked)]
    assert [(event.tick, event.before, event.after) for event in grown] == [(CHANGE, 2, 4)]


@pytest.mark.parametrize("epochs", [(), (0, 1)])
def test_a_search_for_the_learning_rate_is_that_of_the_present_blocks_and_changes_nothing(
    epochs: tuple[int, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected, without = make(), EachBatch()
    train(expected, stacked(0.4), without)
    said = capsys.readouterr().out

    module, steps, search, growth = make(), EachBatch(), RateSearch(*epochs), stacked(0.4)
    train(module, search, growth, steps, default_root_dir=tmp_path)

    assert search.searches == (len(epochs) or 1)
    assert steps.losses == without.losses and steps.depths == without.depths == [2] * 4 + [4] * 6
    assert equal(weights(module), weights(expected)) and growth.batches == TOTAL
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("Stack")] == said.splitlines()


def test_the_tuner_finds_a_learning_rate_for_the_first_blocks_before_the_training(tmp_path: Path) -> None:
    module, made = make(), trainer(stacked(), default_root_dir=tmp_path)
    first = {name: value.clone() for name, value in weights(module).items()}

    found = Tuner(made).lr_find(module, num_training=7, update_attr=False)

    assert found is not None and len(found.results["lr"]) == 7 and depth(module) == 2
    assert all(torch.equal(value, first[name]) for name, value in weights(module).items())
    made.fit(module)
    assert depth(module) == 4 and made.global_step == TOTAL


def test_a_search_for_the_learning_rate_is_refused_in_a_resumed_training(tmp_path: Path) -> None:
    train(make(), stacked(), EachBatch(tmp_path))

    with pytest.raises(ValueError, match=r"^Stack: RateSearch lets the trainer forget the checkpoint"):
        train(make(), RateSearch(), stacked(), default_root_dir=tmp_path, resume_from=tmp_path / "3.ckpt")


def flops_of(depth: int) -> int:
    # The counter knows the matrix products of attention, and not the fused kernel of a CPU.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        small(depth).loss([0, 1]).backward()
    return counter.get_total_flops()


def test_the_flops_of_a_training_are_told_in_batches_of_a_fixed_depth(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    callback, steps = stacked(), EachBatch(tmp_path)
    train(make(), callback, steps)

    spent = CHANGE * flops_of(2) + (TOTAL - CHANGE) * flops_of(4)
    assert callback.cost is not None and callback.flops_spent == spent and flops_of(2) < flops_of(4)
    assert [callback.cost.flops({"net.blocks": depth}) for depth in (1, 2, 3, 4)] == [*map(flops_of, range(1, 5))]
    words = 16 * LENGTH
    told = (
        f"net.blocks has 4 of 4 blocks; {TOTAL} training batches cost {spent:.3g} FLOPs, those of "
        f"{spent // flops_of(4)} at 4 or {spent // flops_of(2)} at 2 blocks throughout, "
        f"{TOTAL * words / sum(p.numel() for p in make().parameters()):.2g} targets per parameter; compare"
    )
    assert callback.cost.targets == words and told in capsys.readouterr().out
    for batches in (2, CHANGE, CHANGE + 2):
        resumed = stacked()
        train(make(), resumed, resume_from=steps.path(batches))
        assert resumed.state_dict() == callback.state_dict()

    train(make(), stacked(), max_epochs=4, accumulate_grad_batches=5)
    spent = 15 * flops_of(2) + 5 * flops_of(4)
    last, first = (spent // (5 * flops_of(depth)) for depth in (4, 2))
    told = f"4 steps of 5 batches cost {spent:.3g} FLOPs, those of {last} at 4 or {first} at 2 blocks throughout"
    assert told in capsys.readouterr().out, "steps are those of max_steps"


def test_a_rate_that_has_begun_to_fall_is_warned_of() -> None:
    class Falling(LitGPT):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    with pytest.warns(UserWarning, match=r"the learning rate has fallen from 0\.1 to 0\.0531 before net\.blocks grows"):
        train(Falling(), stacked())


SCALES: dict[str, Callable[[int], Any]] = {
    "list": lambda n: nn.ModuleList(nn.LayerNorm(1) for _ in range(n)),
    "modules by name": lambda n: nn.ModuleDict({str(i): nn.LayerNorm(1) for i in range(n)}),
    "parameters": lambda n: nn.ParameterList(torch.ones(1) for _ in range(n)),
    "parameters by name": lambda n: nn.ParameterDict({str(i): torch.ones(1) for i in range(n)}),
    "two for each block": lambda n: nn.ModuleList(nn.LayerNorm(1) for _ in range(2 * n)),
    "numbers": lambda n: nn.Parameter(torch.ones(n)),
    "rows": lambda n: nn.Parameter(torch.ones(n, 2, 1)),
    "one for the output, too": lambda n: nn.Parameter(torch.ones(n + 1)),
}


class Scales(LitGPT):
    """Each block has a scale beside it."""

    def __init__(self, kind: str = "list", manual: bool = False) -> None:
        super().__init__(manual=manual)
        self.scales = SCALES[kind](len(self.net.blocks))
        self.stem = nn.Sequential(nn.Linear(1, 1), nn.GELU(), nn.Dropout(), nn.Identity())
        self.shortcut = nn.Sequential()

    def loss(self, seeds: Sequence[int]) -> Tensor:
        ones, named = self.stem(torch.ones(2, 1)), isinstance(self.scales, nn.ModuleDict | nn.ParameterDict)
        twice = len(self.scales) == 8
        scales = [self.scales[str(i) if named else i] for i in range(len(self.net.blocks) * (1 + twice))]
        if len(self.scales) == 5:
            scales.append(self.scales[4])
        scaled = [scale(ones) if isinstance(scale, nn.Module) else scale * ones for scale in scales]
        # The gradients of the first step are zero, as behind a head that begins as zeros.
        return super().loss(seeds) + self.trainer.global_step * sum(x.square().mean() for x in scaled)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if not self.automatic_optimization:
            self.zero_grad()
        return loss


@pytest.mark.parametrize(("kind", "manual"), [*((kind, False) for kind in SCALES), ("list", True)])
def test_parts_beside_the_blocks_that_do_not_grow_are_told_of(
    kind: str, manual: bool, recwarn: pytest.WarningsRecorder
) -> None:
    train(Scales(kind, manual), stacked())

    said = [str(warning.message) for warning in recwarn if "parts have a gradient" in str(warning.message)]
    assert len(said) == 1
    assert f"of 'scales' the first {'4 of 8' if kind == 'two for each block' else '2 of 4'} parts" in said[0]


def test_a_list_beside_the_blocks_that_grows_by_a_stack_of_its_own_is_not_told_of(
    recwarn: pytest.WarningsRecorder,
) -> None:
    train(Scales(), stacked(), Stack("scales", start=2, at=AT))

    assert not [warning for warning in recwarn if "parts have a gradient" in str(warning.message)]


class OwnAverage(Callback):
    def on_fit_start(self, trainer: Trainer, pl_module: L.LightningModule) -> None:
        self.average = AveragedModel(pl_module)


class Holder(Callback):
    def on_fit_start(self, trainer: Trainer, pl_module: L.LightningModule) -> None:
        self.module = pl_module


@pytest.mark.parametrize(
    ("callback", "told"), [(OwnAverage, 1), (Holder, 0), (lambda: EMAWeightAveraging(decay=0.9), 0)]
)
def test_an_average_that_does_not_grow_along_is_told_of(
    callback: Callable[[], Callback], told: int, recwarn: pytest.WarningsRecorder
) -> None:
    train(Translator(), stacked(at={0.3: 3, 0.6: 4}), Stack("decoder.blocks", start=1, at=0.3), callback())

    said = [str(warning.message) for warning in recwarn if "which does not grow along" in str(warning.message)]
    assert len(said) == 2 * told  # one for each list


class Taught(LitGPT):
    """A teacher that begins as a copy, as in BYOL and DINO, or as another network of the class."""

    def __init__(self, is_copy: bool) -> None:
        super().__init__()
        self.teacher = (copy.deepcopy(self.net) if is_copy else GPT(4)).requires_grad_(False)


@pytest.mark.parametrize(("is_copy", "beside", "told"), [(True, (), 1), (True, ("teacher.blocks",), 0), (False, (), 0)])
def test_a_teacher_within_the_module_that_does_not_grow_along_is_told_of(
    is_copy: bool, beside: Sequence[str], told: int, recwarn: pytest.WarningsRecorder
) -> None:
    train(Taught(is_copy), stacked(), *(Stack(name, start=2, at=AT) for name in beside))

    said = [str(warning.message) for warning in recwarn if "'teacher.blocks' is a copy of 'net.blocks'" in str(warning)]
    assert len(said) == told


class WithoutScales(L.LightningModule):
    """Blocks of one matrix each: nothing in them tells that they are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(4))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = torch.ones(2, 4)
        for block in self.blocks:
            x = x + block(x).relu()
        return x.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    train_dataloader = LitGPT.train_dataloader


def test_blocks_of_an_earlier_training_are_not_dropped_by_a_second_one() -> None:
    module = WithoutScales()
    train(module, Stack("blocks"))
    with pytest.raises(ValueError, match="the 4 blocks of 'blocks' hold trained weights"):
        train(module, Stack("blocks"))
    assert len(module.blocks) == 4

    again = Stack("blocks", start=1)
    train(module, again)
    assert again.depths == [1, 2, 4]


@pytest.mark.parametrize(
    ("make_callback", "is_refused"),
    [
        (lambda: Grow(["net.norm"], monitor="val_loss", mode="min"), True),
        (lambda: Stack("net.blocks", plan="scaling"), True),
        (stacked, False),
    ],
)
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_processes_that_keep_what_has_grown_to_themselves_are_refused(
    make_callback: Callable[[], Callback], is_refused: bool, method: str
) -> None:
    """With shares the process that is left has as many blocks, into which Lightning loads the trained ones."""
    callback, module = make_callback(), make()
    made = trainer(callback, strategy=DDPStrategy(start_method=method), devices=1)
    said = f"with strategy='ddp_{method}' what has grown stays in the processes"
    with pytest.raises(ValueError, match=said) if is_refused else nullcontext():
        callback.setup(made, module, "fit")
        module.setup("fit")


def test_the_share_of_a_training_that_a_timer_ends_is_that_of_its_time() -> None:
    module, callback = make(), stacked(0.3)

    train(module, callback, max_epochs=-1, max_time=timedelta(seconds=2))

    assert callback.depths == [2, 4]


# Plans.


def progress(**given: Any) -> Progress:
    parameters = {depth: 100 * depth for depth in range(1, 9)}
    defaults = {"share": 0.5, "depth": 2, "first": 2, "most": 6, "parameters": parameters, "targets_left": 1e5}
    return Progress(**{**defaults, "flops_spent": 0, "metrics": {}, **given})


class Patient:
    """A plan with a memory: another block whenever it has been asked three times since the last one."""

    reason = "it is patient"

    def __init__(self) -> None:
        self.asked = 0
        self.seen: list[Progress] = []

    def __call__(self, progress: Progress) -> int:
        self.asked += 1
        self.seen.append(progress)
        return progress.depth + (self.asked % 3 == 0)

    def state_dict(self) -> dict[str, Any]:
        return {"asked": self.asked}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.asked = state["asked"]


def late(progress: Progress) -> int:
    """Return four blocks once a validation has been made, and half of the training is over."""
    return 4 if progress.share >= 0.5 and "val_loss" in progress.metrics else 0


class Eager(ScalingPlan):
    """The rule of the package with less to ask for."""

    def decide(self, progress: Progress) -> int:
        return progress.deeper if self.tick >= 2 else progress.depth


class Rich(PolicyPlan):
    """The policy of the package, which is told of a thousand times as many targets."""

    def __init__(self) -> None:
        super().__init__("tamiyo_depth")

    def decide(self, progress: Progress) -> int:
        assert progress.targets_left is not None
        return super().decide(progress._replace(targets_left=1000 * progress.targets_left))


PLANS: dict[str, tuple[Callable[[], Any], list[int]]] = {
    "a rule": (Eager, [1] * 4 + [2] + [3] * 2 + [4] * 3),
    "a policy": (Rich, [1] * 4 + [2] * 6),
    "a function": (lambda: late, [1] * 5 + [4] * 5),
    "an object with a memory": (Patient, [1] * 3 + [2] * 3 + [3] * 3 + [4]),
    "an import path": (lambda: f"{__name__}.Patient", [1] * 3 + [2] * 3 + [3] * 3 + [4]),
}


@pytest.mark.parametrize("name", rest_is_slow(PLANS, PLANS.keys() - {"a policy"}))
def test_a_training_resumed_with_a_plan_ends_as_the_whole_one(name: str, tmp_path: Path) -> None:
    plan, depths = PLANS[name]
    whole, seen, first = make(), EachBatch(tmp_path), Stack("net.blocks", start=1, plan=plan())
    train(whole, first, seen)
    assert seen.depths == depths

    for batches in range(1, TOTAL):
        if name == "a function" and batches == BATCHES:
            continue  # Lightning does not make up for the validation behind this batch, of which the plan would know
        module, callback = make(), Stack("net.blocks", start=1, plan=plan())
        train(module, callback, resume_from=seen.path(batches))
        assert equal(weights(module), weights(whole)), f"resumed after {batches} batches"
        assert (callback.depths, callback.flops_spent) == (first.depths, first.flops_spent)


def test_a_plan_sees_the_training_as_it_is() -> None:
    plan = Patient()
    sizes = {depth: sum(p.numel() for p in make(depth).parameters()) for depth in (1, 2, 3, 4)}

    callback = Stack("net.blocks", start=1, plan=plan)
    train(make(), callback)

    words = 16 * LENGTH
    asked = plan.seen  # not before the first batch, when no share of the training is over
    assert [seen.share for seen in asked] == [batch / TOTAL for batch in range(1, TOTAL)][: len(asked)]
    assert [seen.targets_left for seen in asked] == pytest.approx([(TOTAL - i) * words for i in range(1, TOTAL)])
    assert all(seen.parameters == sizes and (seen.first, seen.most) == (1, 4) for seen in asked)
    assert [seen.depth for seen in asked] == [1] * 3 + [2] * 3 + [3] * 3
    assert callback.cost is not None
    assert [seen.flops_spent for seen in asked[:3]] == [i * callback.cost.flops({"net.blocks": 1}) for i in (1, 2, 3)]
    assert asked[0].metrics == {} and asked[-1].metrics.keys() >= {"val_loss"}


def test_the_rule_grows_as_long_as_the_targets_to_come_suffice() -> None:
    plan = ScalingPlan()
    assert plan(progress(share=0.2)) == 2, "too early"
    assert plan(progress(share=0.34, targets_left=15 * 400 - 1)) == 2
    assert "4 blocks would have 15 targets to come for each parameter, and the rule asks for 15" in plan.reason
    assert plan(progress(share=0.4, targets_left=1e9)) == 2, "it is asked once in each sixth of the training"
    assert plan(progress(share=0.5, targets_left=15 * 400)) == 4
    assert plan(progress(share=0.7, depth=4, most=5, targets_left=15 * 500)) == 5, "not more than there are"


def test_a_network_that_has_not_grown_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    train(module := make(), Stack("net.blocks", start=2, plan="scaling"))

    (line,) = [line for line in capsys.readouterr().out.splitlines() if " of 4 blocks, as " in line]
    assert line.startswith("Stack: net.blocks has 2 of 4 blocks, as 4 blocks would have 0.")
    assert "; build the class with 2 to load the last checkpoint; 10 training batches cost " in line
    assert LitGPT(2).load_state_dict(module.state_dict()).missing_keys == []


@pytest.mark.parametrize(
    ("settings", "plan", "depths"),
    rest_is_slow(
        [
            ("start: 1, at: {0.2: 2, 0.6: 4}, order: interleave", "Shares", [1, 2, 4]),
            ("plan: scaling", "ScalingPlan", [1]),
            ("plan: tamiyo_depth", "PolicyPlan", [1]),
            (f"plan: {__name__}.late", "function", [1, 4]),
            (f"plan: {__name__}.Patient", "Patient", [1, 2, 3, 4]),
        ],
        lambda case: case[1] in ("Shares", "ScalingPlan", "Patient"),
    ),
)
def test_it_is_named_in_a_config_and_a_plan_on_the_command_line(
    settings: str, plan: str, depths: list[int], tmp_path: Path
) -> None:
    config = tmp_path / "stack.yaml"
    config.write_text(f"""
trainer:
  callbacks:
    - class_path: esper_lightning.callbacks.Stack
      init_args: {{blocks: net.blocks, {settings}}}
""")
    plain = ["fit", "--trainer.max_epochs=2", "--trainer.logger=false", "--trainer.enable_checkpointing=false"]
    switches = ["--trainer.callbacks=esper_lightning.callbacks.Stack", "--trainer.callbacks.blocks=net.blocks"]
    of_file, of_line = ["--config", str(config)], [*switches, f"--trainer.callbacks.{settings.replace(': ', '=')}"]

    for args in (of_file, of_line) if settings.startswith("plan") else (of_file,):
        cli = LightningCLI(LitGPT, args=[plain[0], *args, *plain[1:]], save_config_callback=None)
        (callback,) = [each for each in cli.trainer.callbacks if isinstance(each, Stack)]
        assert (type(callback.plan).__name__, callback.depths) == (plan, depths)
        assert len(cli.model.net.blocks) == depths[-1]


@pytest.mark.parametrize(("targets", "depths"), [(20, [1] * 6), (80, [1, 1, 2, 2, 2, 2])])
def test_the_policy_is_asked_at_sixths_and_grows_where_the_budget_is_large(targets: int, depths: list[int]) -> None:
    sizes = {1: 7_216, 2: 10_320, 3: 13_424, 4: 16_528}  # of the network of its training
    plan, depth, asked = PolicyPlan("tamiyo_depth"), 1, []
    for batch in range(1, 60):
        left = targets * sizes[1] * (1 - batch / 60)
        depth = plan(progress(share=batch / 60, depth=depth, first=1, most=4, targets_left=left, parameters=sizes))
        asked.append(depth)

    assert asked == [depth for depth in depths for _ in range(10)][1:]


def test_the_policy_sees_a_training_as_it_sees_a_host_of_its_own_training() -> None:
    budget = "--data.env.family.train=[{training.flops: [2.0e+7]}]"
    _, data = from_config("depth", "--data.n_envs=2", budget, "--data.host.init_args.width=8")
    data.build(torch.device("cpu"))
    plan = PolicyPlan("tamiyo_depth")
    pool = data.make_pool(2, observation=load_controller("tamiyo_depth").observation)
    pool.reset([2, 4])

    for action in (germinate(0, 0), WAIT, germinate(1, 0), germinate(2, 0)):
        for env, rows, masks in zip(pool.envs, pool.observation.features, pool.masks_on_cpu.slot, strict=True):
            block = sum(p.numel() for p in env.network.blocks[0].parameters())
            sizes = {depth: env.host_parameters + (depth - 1) * block for depth in (1, 2, 3, 4)}
            depth = len(env.network.blocks)
            left = env.targets_per_parameter(sizes[depth]) * sizes[depth]
            now = progress(share=env.tick / 6, depth=depth, first=1, most=4, targets_left=left, parameters=sizes)
            places = plan._as_pool(now)
            torch.testing.assert_close(places.observation.features[0], rows)
            assert torch.equal(places.masks.slot[0], masks)
        pool.step(act(action, WAIT))
    assert [len(env.network.blocks) for env in pool.envs] == [4, 1]


def test_a_plan_with_a_memory_begins_anew_in_each_training_and_belongs_to_one_stack() -> None:
    stack = Stack("net.blocks", start=1, plan=Eager())
    for _ in range(2):
        train(make(), stack)
        assert stack.depths == [1, 2, 3, 4]

    plan = Patient()
    with pytest.raises(ValueError, match=r"'net.blocks' and 'net.\w+' have one plan, which remembers something"):
        train(make(), Stack("net.blocks", plan=plan), Stack("net.others", plan=plan))


def test_a_training_goes_on_with_another_plan(tmp_path: Path) -> None:
    seen = EachBatch(tmp_path)
    train(make(), Stack("net.blocks", start=1, plan=Patient), seen)
    for plan in ("scaling", "tamiyo_depth", late):
        callback = Stack("net.blocks", start=2, plan=plan)
        train(make(), callback, resume_from=seen.path(2))
        assert callback.depths[0] == 1, "the plan sees a network of fewer blocks than its own start"


# Refusals.


class Averaging(LitGPT):
    def __init__(self) -> None:
        super().__init__()
        self.average = AveragedModel(self.net)


class Unlike(LitGPT):
    def __init__(self) -> None:
        super().__init__()
        self.net.blocks[3] = nn.Linear(8, 8)


class Forgetful(LitGPT):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.tokens.parameters(), lr=0.1)


class Sized(LitGPT):
    batch_size = 1


class ByHand(LitGPT):
    """Its loss is not one of torch's, so that no targets are known."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        logits = self.net(torch.zeros(1, LENGTH, dtype=torch.int64))
        return -F.log_softmax(logits, -1)[..., 0].mean()


@pytest.mark.parametrize(
    ("module", "settings", "of_trainer", "reason"),
    [
        (LitGPT, {"at": 0.0}, {}, "at must lie between 0 and 1, got 0.0"),
        (LitGPT, {"at": {}}, {}, "at must lie between 0 and 1"),
        (LitGPT, {"at": {0.2: 4, 0.1: 8}, "start": 2}, {}, "must increase from start = 2 on"),
        (LitGPT, {"at": {0.1: 8, 0.2: 4}, "start": 2}, {}, "must increase from start = 2 on"),
        (LitGPT, {"at": {0.1: 2}, "start": 2}, {}, "must increase from start = 2 on"),
        (LitGPT, {"start": 0}, {}, "start must be at least 1 block, got 0"),
        (LitGPT, {"plan": "scaling", "at": 0.3}, {}, "at is a plan of its own; give at or plan"),
        (LitGPT, {"plan": "scalling"}, {}, "there is no plan 'scalling'; give scaling, tamiyo_depth"),
        (LitGPT, {"plan": 4}, {}, "plan must be a function of the progress, got int"),
        (LitGPT, {"plan": "tests.callbacks.test_stack.nobody"}, {}, "plan: tests.callbacks.test_stack has no 'nobody'"),
        (LitGPT, {"plan": "tamiyo"}, {}, "the policy 'tamiyo' grows seeds and not blocks"),
        (LitGPT, {"plan": "missing.safetensors"}, {}, "missing.safetensors"),
        (LitGPT, {"plan": "scaling", "order": [0, 0]}, {}, "sources one by one are those of a single change"),
        (LitGPT, {"at": {0.1: 3, 0.2: 4}, "order": "0-1, 0"}, {}, "sources one by one are those of a single change"),
        (LitGPT, {"at": None, "start": 1, "order": "0-1, 0-1"}, {}, "sources one by one are those of a single change"),
        (LitGPT, {"blocks": "net.layers"}, {}, "there is no 'net.layers' in LitGPT; lists in it: net.blocks"),
        (LitGPT, {"start": 4}, {}, "start must be below 4, the number of .* module builds in 'net.blocks', got 4"),
        (LitGPT, {"at": {0.5: 3}}, {}, "at ends with 3; build the final network"),
        (lambda: LitGPT(8), {"start": None, "at": {0.2: 2, 0.5: 8}}, {}, "at must begin with more than 2 blocks"),
        (LitGPT, {"order": [0, 1, 1]}, {}, "order lists 3 blocks, and to is 4"),
        (Unlike, {}, {}, "'net.blocks' .*blocks 0 and 3 differ in their parameters or shapes"),
        (Forgetful, {}, {}, "no optimizer holds parameter 'norm1.weight' of block 0"),
        (Averaging, {}, {}, "AveragedModel, which does not grow along"),
        (Sized, {}, {"beside": [BatchSizeFinder()]}, "BatchSizeFinder does not follow"),
        (LitGPT, {}, {"max_epochs": -1}, "the training has no end to take a share of"),
        (LitGPT, {}, {"strategy": "fsdp"}, "FSDPStrategy keeps parameters in a form that cannot grow"),
        (ByHand, {"plan": "scaling"}, {}, "the plan needs the number of targets of a batch, .*; give at, or a plan"),
        (ByHand, {"plan": "tamiyo_depth"}, {}, "the plan needs the number of targets of a batch"),
        (LitGPT, {"plan": lambda _: 5}, {}, "the plan asks for 5 blocks of 'net.blocks', and the module builds 4"),
        (LitGPT, {"plan": lambda _: 2.5}, {}, "the plan asks for 2.5 blocks of 'net.blocks', and the module builds 4"),
    ],
)
def test_what_cannot_grow_is_refused_in_one_line(
    module: Any, settings: dict[str, Any], of_trainer: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    connector = L.pytorch.trainer.connectors.accelerator_connector._AcceleratorConnector
    monkeypatch.setattr(connector, "_check_strategy_and_fallback", lambda self: None)  # FSDP on a CPU
    settings = {"blocks": "net.blocks", "start": 2, **({} if "plan" in settings else {"at": AT}), **settings}
    options = {name: value for name, value in of_trainer.items() if name != "beside"}

    with pytest.raises(ValueError, match=f"^(Stack: (?!Stack)|policy ).*{reason}") as refusal:
        train(module(), Stack(**settings), *of_trainer.get("beside", []), **options)

    assert "\n" not in str(refusal.value)
