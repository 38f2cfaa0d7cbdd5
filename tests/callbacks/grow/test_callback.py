"""Grow: a module that knows nothing of growth is trained, grown, saved and resumed by its own Trainer."""

import csv
import math
import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import LambdaCallback, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.nn import functional as F
from torch.optim import Optimizer, lr_scheduler

from esper_lightning.callbacks import Grow
from esper_lightning.controllers.schedules import Schedule, ScheduledAction, write_schedule
from esper_lightning.envs import Op
from esper_lightning.envs.host_pool import SinglePool
from esper_lightning.growth import LifecycleConfig, detach_slots, slots_of
from esper_lightning.growth.lifecycle import SeedEvent
from esper_lightning.growth.stages import Stage
from esper_lightning.telemetry.events import Contributed, Started, read_events
from tests.callbacks.gpt import NoFolder, RateSearch
from tests.callbacks.grow.trainings import (
    LIFE,
    Classifier,
    DigitsData,
    TwoOptimizers,
    classifier,
    equal,
    grow,
    train,
    trainer,
)
from tests.decisions import decide, germinate

EPOCHS = 9


def test_a_training_in_which_nothing_grows_is_bit_for_bit_that_without_the_callback() -> None:
    plain, watched = classifier("step"), classifier("step")
    train(plain, epochs=3)
    train(watched, grow(), epochs=3)

    assert list(slots_of(watched)) == ["3", "5"]
    detach_slots(watched.net)
    assert equal(watched, plain)
    assert [name for name, _ in watched.named_modules()] == [name for name, _ in plain.named_modules()]


class Seen(Callback):
    """Whether deciders see the network as a new pool does, and the relative learning rate, after each batch."""

    def __init__(self, grow: Grow) -> None:
        self.grow = grow
        self.is_current: list[bool] = []
        self.lr_shares: list[float] = []

    def on_train_batch_end(self, *_: object) -> None:
        pool = self.grow.pool
        assert pool is not None
        self.lr_shares.append(pool.env.lr_share)
        fresh = SinglePool(pool.env, pool.growable, pool.config)
        fresh.update()
        seen, expected = ((each.observation.features, *each.masks) for each in (pool, fresh))
        self.is_current.append(all(torch.equal(*pair) for pair in zip(seen, expected, strict=True)))


class Run:
    """A run with a checkpoint after each epoch, and what it saw."""

    def __init__(self, folder: Path) -> None:
        self.module, self.folder = classifier("lambda", dropout=0.0), folder
        self.grow = grow(LIFE)
        self.seen = Seen(self.grow)
        checkpoints = ModelCheckpoint(
            folder, "{epoch}", monitor="val_acc", mode="max", save_top_k=-1, auto_insert_metric_name=False
        )
        callbacks = [self.grow, self.seen, checkpoints, LearningRateMonitor()]
        logger = CSVLogger(folder, name="", version="log")
        self.trainer = train(self.module, *callbacks, epochs=EPOCHS, enable_checkpointing=True, logger=logger)

    def checkpoint(self, epoch: int) -> Path:
        return self.folder / f"{epoch}.ckpt"

    def rows(self) -> list[dict[str, str]]:
        """Return the rows of the log of metrics."""
        with (self.folder / "log" / "metrics.csv").open() as file:
            return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(tmp_path_factory.mktemp("run"))


def test_seeds_live_their_lives_and_every_change_is_recorded(run: Run) -> None:
    first, second = run.grow.growing.slots.values()
    assert (first.stage, second.occupied) == (Stage.FOSSILIZED, False)
    started, *events = read_events(run.folder / "log" / "events.jsonl")
    assert isinstance(started, Started) and started.horizon == EPOCHS
    changes = [event for event in events if isinstance(event, SeedEvent)]
    lives = {slot: [(e.tick, e.after.name) for e in changes if e.slot == slot] for slot in ("3", "5")}
    assert lives["3"] == [(0, "GERMINATED"), (1, "TRAINING"), (2, "BLENDING"), (5, "PROBATIONARY"), (6, "FOSSILIZED")]
    assert [after for _, after in lives["5"]][:4] == ["GERMINATED", "TRAINING", "BLENDING", "PROBATIONARY"]
    assert (7, "CULLED") in lives["5"]
    measured = [event for event in events if isinstance(event, Contributed)]
    assert {name for event in measured for name in event.slot} == {"3", "5"}
    assert any(abs(points) > 0.0 for event in measured for points in event.points if points is not None)


def test_deciders_and_callbacks_see_the_network_as_it_is(run: Run) -> None:
    assert len(run.seen.is_current) == 5 * EPOCHS
    # Lightning sets the rate of the next epoch before the last batch of an epoch ends.
    assert all(is_current for i, is_current in enumerate(run.seen.is_current, 1) if i % 5)
    assert run.seen.lr_shares == pytest.approx([0.9 ** (batch // 5) for batch in range(1, 5 * EPOCHS + 1)])


def test_a_seed_follows_the_schedule_of_the_learning_rate(run: Run) -> None:
    host, seed = run.trainer.optimizers[0].param_groups

    assert (seed["name"], seed["lr"]) == ("seed.3", pytest.approx(3e-3 * 0.9 ** (EPOCHS - 1)))
    assert host["lr"] == pytest.approx(3e-3 * 0.9**EPOCHS), "it is set again after the last epoch"


def test_metrics_of_growth_and_learning_rates_are_in_the_log(run: Run) -> None:
    seeds, parameters, rates = (
        [float(row[name]) for row in run.rows() if row[name]]
        for name in ("growth/seeds", "growth/parameters", "lr-AdamW")
    )
    assert seeds == [1, 2, 2, 2, 2, 2, 2, 1, 1]
    assert parameters[-1] == sum(p.numel() for p in run.module.net.parameters()) > 2000
    assert len(set(rates)) == EPOCHS, "one curve, without a gap"


@pytest.mark.parametrize("epoch", [0, 6])
def test_a_checkpoint_gives_the_numbers_with_which_it_was_saved(run: Run, epoch: int) -> None:
    saved = torch.load(run.checkpoint(epoch), weights_only=True)
    (logged,) = [row["val_acc"] for row in run.rows() if row["val_acc"] and row["epoch"] == str(epoch)]
    fresh = Classifier("lambda")

    (scores,) = trainer(grow()).test(fresh, DigitsData(), ckpt_path=run.checkpoint(epoch), verbose=False)

    assert scores["val_acc"] == pytest.approx(float(logged), abs=1e-6)
    assert list(fresh.state_dict()) == list(saved["state_dict"])


@pytest.mark.parametrize("epoch", [1, 4])
def test_a_resumed_run_equals_one_that_never_stopped(run: Run, epoch: int) -> None:
    resumed = Classifier("lambda", dropout=0.0)

    train(resumed, grow(LIFE), epochs=EPOCHS, resume_from=run.checkpoint(epoch))

    assert equal(resumed, run.module)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decider": "periodic"}, "the checkpoint is of decider: Plan, the run of decider: periodic"),
        ({"slots": ["5", "0"]}, r"slots are \['5', '0'\] in this run and \['3', '5'\] in the checkpoint"),
        ({"blueprints": ["norm"]}, r"blueprints are \['norm'\] in this run and .* in the checkpoint"),
    ],
)
def test_a_checkpoint_of_other_growth_is_refused(run: Run, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"{message}; give (the run )?the same"):
        train(Classifier("lambda"), grow(**options), epochs=EPOCHS, resume_from=run.checkpoint(1))


@pytest.mark.slow
@pytest.mark.parametrize(("horizon", "last"), [(None, 7), (4, 3)])
def test_a_run_resumed_for_longer_decides_until_its_new_end_or_its_own_horizon(
    horizon: int | None, last: int, tmp_path: Path
) -> None:
    train(classifier(), grow(horizon=horizon), epochs=4).save_checkpoint(tmp_path / "end.ckpt")
    callback = grow(horizon=horizon)

    train(classifier(), callback, epochs=8, resume_from=tmp_path / "end.ckpt")

    assert callback.decider.seen == list(range(4, last + 1))


def test_a_network_grows_under_manual_optimization_with_two_optimizers() -> None:
    module = TwoOptimizers()
    callback = grow({0: germinate(0)}, network="net.0", slots=["2", "4"], blueprints=["mlp_small"])
    made = train(module, callback, epochs=5)

    body, head = made.optimizers
    assert [group.get("name") for group in body.param_groups][1:] == ["seed.2"] and len(head.param_groups) == 1
    assert callback.growing.slots["2"].blended
    assert body.param_groups[1]["lr"] == pytest.approx(0.01 * 0.9**4)


def test_a_host_is_clipped_as_if_its_seed_were_not_there() -> None:
    norms: list[list[float]] = []

    def watch(trainer: Trainer, *_: object) -> None:
        groups = trainer.optimizers[0].param_groups
        norms.append([torch.cat([p.grad.flatten() for p in group["params"]]).norm().item() for group in groups])

    plain, grown = classifier(), classifier()
    train(plain, epochs=2, gradient_clip_val=0.1)
    train(grown, grow({0: germinate(0)}), LambdaCallback(on_train_batch_end=watch), epochs=2, gradient_clip_val=0.1)

    assert all(norm <= 0.1 + 1e-6 for of_batch in norms for norm in of_batch)
    assert all(len(of_batch) == 2 and of_batch[0] == pytest.approx(0.1, abs=1e-4) for of_batch in norms[:3])
    weights = dict(grown.net.named_parameters())
    assert all(torch.equal(p, weights[name]) for name, p in plain.net.named_parameters()), "the seed only learns"


class LastGradients(Callback):
    """Gradients of the seed in slot 3 at the last step before each validation, and those by which it was judged."""

    def __init__(self, grow: Grow) -> None:
        self.grow, self.steps = grow, 0
        self.present: list[float] = []
        self.judged: dict[int, list[float]] = {}
        self.expected: dict[int, list[float]] = {}

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        self.present = self.grow.growing.gradient_stats_tensor()[1].tolist()
        self.steps += 1

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self.expected[self.grow.validations] = self.present

    def on_train_batch_start(self, *_: object) -> None:
        gradient = self.grow.growing.measurements["3"].gradient
        if gradient is not None:
            self.judged.setdefault(self.grow.validations, list(gradient))


ACCUMULATED = {"accumulate_grad_batches": 2, "val_check_interval": 2}
ACROSS_EPOCHS = {"val_check_interval": 3, "check_val_every_n_epoch": None}


@pytest.mark.parametrize("settings", [ACCUMULATED, ACROSS_EPOCHS])
def test_seeds_are_judged_by_the_gradients_of_the_last_step_before_a_validation(settings: dict[str, Any]) -> None:
    callback = grow({0: germinate(0)}, every=2, horizon=4)
    watch = LastGradients(callback)

    train(classifier(), callback, watch, epochs=4, **settings)

    ticks = [validation for validation in watch.judged if validation % 2 == 0]
    assert len(ticks) >= 2 and [watch.judged[at] for at in ticks] == [watch.expected[at] for at in ticks]


def test_a_second_training_with_the_same_callback_goes_on_with_what_has_grown() -> None:
    module, callback = classifier(), grow(decider="periodic")
    train(module, callback, epochs=4)
    assert [slot.occupied for slot in callback.growing.slots.values()] == [True, False]

    made = train(module, callback, epochs=3)

    first, second = callback.growing.slots.values()
    assert (first.age, second.age) == (5, 2), "the last validation of each training is followed by no batch"
    assert [group.get("name") for group in made.optimizers[0].param_groups][1:] == ["seed.3", "seed.5"]


@pytest.mark.parametrize(("mode", "unit"), [("max", r"\+\d+\.\d points"), ("min", r"[+-]\d+\.\d % of the loss")])
def test_what_a_seed_is_worth_is_told_in_the_unit_of_the_metric(
    mode: str, unit: str, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, monitor = {0: germinate(0), 6: decide(Op.FOSSILIZE, slot=0)}, {"max": "val_acc", "min": "val_loss"}[mode]

    train(classifier(), grow(plan, monitor=monitor, mode=mode), epochs=8)

    (line,) = [line for line in capsys.readouterr().out.splitlines() if "FOSSILIZED" in line]
    assert re.search(rf", worth {unit}$", line)


class Breaks(Classifier):
    """Classifier with a metric that never moves, and with one broken number from epoch 5 to 7: `metric`, or `the
    training loss`, whose gradients stay as they are."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def breaks(self, what: str) -> bool:
        return what == self.what and 5 <= self.current_epoch <= 7

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + (math.inf if self.breaks("the training loss") else 0.0)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.log("metric", math.nan if self.breaks("metric") else 0.5)


@pytest.mark.parametrize("what", ["metric", "the training loss"])
def test_nothing_grows_and_no_seed_is_removed_while_a_number_is_not_finite(
    what: str, recwarn: pytest.WarningsRecorder, capsys: pytest.CaptureFixture[str]
) -> None:
    lifecycle = LifecycleConfig(training_ticks=1, min_contribution=None, min_gradient_health=0.0)
    callback = grow({0: germinate(0)}, monitor="metric", lifecycle=lifecycle)

    train(Breaks(what), callback, epochs=10)

    assert callback.decider.seen == [0, 1, 2, 3, 4, 5, 9]
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines if "→" in line][-2:] == ["Grow, tick 5", "Grow, tick 9"]
    assert "(contribution +0.00 points is not positive)" in lines[-2]
    said = {str(warning.message) for warning in recwarn if "is not finite" in str(warning.message)}
    assert said == {f"Grow: {what} is not finite; seeds stay as they are until it is"}


@pytest.mark.parametrize(("metric", "warned"), [("metric", 1), ("val_acc", 0)])
def test_a_metric_that_stays_where_it_was_before_training_is_warned_of_once(
    metric: str, warned: int, recwarn: pytest.WarningsRecorder
) -> None:
    train(Breaks("nothing"), grow(decider="wait", monitor=metric, batches=1), epochs=13)

    said = [warning for warning in recwarn if "is hardly better than before training" in str(warning.message)]
    assert len(said) == warned


class Scaled(Classifier):
    """Its losses are those of a classifier, on another scale."""

    def __init__(self, scale: float, shift: float) -> None:
        super().__init__()
        self.scale, self.shift = scale, shift

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("scaled", self.scale * loss + self.shift)


@pytest.mark.parametrize(("scale", "shift", "warned"), [(1.0, 0.0, 0), (3e3, 0.0, 1), (1.0, -20.0, 1), (1.0, 7.0, 0)])
def test_a_loss_that_deciders_cannot_see_is_warned_of_and_not_taken_for_one_that_stays(
    scale: float, shift: float, warned: int, recwarn: pytest.WarningsRecorder
) -> None:
    train(Scaled(scale, shift), grow(decider="wait", monitor="scaled", mode="min"), epochs=12)

    said = [str(warning.message) for warning in recwarn]
    assert sum("deciders see exp(−loss)" in line for line in said) == warned
    assert not any("is hardly better than before training" in line for line in said)


def test_a_schedule_that_is_too_long_is_refused_before_grow_writes_anything(tmp_path: Path) -> None:
    plan = Schedule(("3", "5"), (ScheduledAction(3, "GERMINATE", "5", blueprint="bottleneck"),))
    write_schedule(plan, tmp_path / "plan.json")

    with pytest.raises(ValueError, match=r"entry 1 .*: an episode has 3 ticks, 0 to 2; name an earlier tick"):
        train(classifier(), grow(decider=str(tmp_path / "plan.json")), epochs=3, logger=CSVLogger(tmp_path, "log"))

    assert not list(tmp_path.rglob("events.jsonl"))


def test_the_folder_of_events_is_that_of_the_first_logger_that_has_one(tmp_path: Path) -> None:
    train(classifier(), grow(LIFE), epochs=2, logger=[NoFolder(), CSVLogger(tmp_path, name="", version="csv")])

    events = read_events(tmp_path / "csv" / "events.jsonl")
    assert any(isinstance(event, SeedEvent) for event in events)


def losses_into(values: list[float]) -> Callback:
    return LambdaCallback(on_train_batch_end=lambda trainer, module, outputs, *_: values.append(float(outputs["loss"])))


@pytest.mark.parametrize("epochs", [(), pytest.param((2, 4), marks=pytest.mark.slow)])
def test_nothing_grows_in_a_search_for_the_learning_rate_and_all_is_as_before_it(
    epochs: tuple[int, ...], tmp_path: Path
) -> None:
    expected, module = classifier(dropout=0.0), classifier(dropout=0.0)
    losses: list[float] = []
    searched_losses: list[float] = []
    train(expected, grow(LIFE), losses_into(losses), epochs=6)

    search, path = RateSearch(*epochs), tmp_path / "last.ckpt"
    searching = (search, grow(LIFE), losses_into(searched_losses))
    train(module, *searching, epochs=6, default_root_dir=tmp_path).save_checkpoint(path)

    assert search.searches == (len(epochs) or 1)
    assert searched_losses == losses and equal(module, expected)
    state = torch.load(path, weights_only=False)["callbacks"]["Grow"]
    assert state["validations"] == 6 and state["batches_seen"] == len(losses) == 30


def test_a_search_for_the_learning_rate_before_a_second_training_keeps_the_seeds_of_the_first(tmp_path: Path) -> None:
    module = classifier()
    train(module, grow(LIFE), epochs=3)
    grown = [slot.blueprint for slot in slots_of(module.net).values()]

    growth = grow()
    train(module, RateSearch(), growth, epochs=2, default_root_dir=tmp_path)

    assert [slot.blueprint for slot in slots_of(module.net).values()] == grown == ["conv_light", "bottleneck"]
    assert growth.validations == 2


def test_a_search_for_the_learning_rate_is_refused_in_a_resumed_training(run: Run, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^Grow: RateSearch lets the trainer forget the checkpoint that it resumes"):
        train(
            classifier("lambda", dropout=0.0),
            grow(LIFE),
            RateSearch(),
            epochs=EPOCHS,
            resume_from=run.checkpoint(3),
            default_root_dir=tmp_path,
        )


def test_a_yaml_of_lightnings_own_command_line_grows_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "grow.yaml").write_text("""
trainer:
  accelerator: cpu
  max_epochs: 2
  logger: false
  enable_checkpointing: false
  callbacks:
    - class_path: esper_lightning.callbacks.Grow
      init_args:
        slots: [net.3, "5"]
        blueprints: [norm]
        decider: periodic
        price: 0.1
        seed_options: {lr: 0.001}
        lifecycle: {training_ticks: 1}
""")
    cli = LightningCLI(Classifier, DigitsData, args=["fit", "--config", str(tmp_path / "grow.yaml")])

    (callback,) = (callback for callback in cli.trainer.callbacks if isinstance(callback, Grow))
    assert [slot.blueprint for slot in callback.growing.slots.values()] == ["norm", None]
    assert callback.growing.lifecycle.training_ticks == 1
    assert callback.growing.module is cli.model.net
    assert callback.pool is not None and callback.pool.envs[0].price == 0.1
    assert cli.trainer.optimizers[0].param_groups[1]["lr"] == 0.001


class Published(Classifier):
    """The module of a tutorial that many repositories have: it steps a scheduler that Lightning does not know."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        self.warm_up = lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
        return optimizer

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.warm_up.step()


class Lookahead(Classifier):
    def configure_optimizers(self) -> Any:
        import timm.optim  # imported late: it takes seconds

        return timm.optim.Lookahead(torch.optim.AdamW(self.parameters(), lr=0.01))


class PastLightning(Classifier):
    """Manual optimization of the plain optimizer, so that the Trainer counts no steps."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers(use_pl_optimizer=False)
        optimizer.zero_grad()
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        optimizer.step()
        return loss


class BySomeClosures(PastLightning):
    """Manual optimization of some batches by a closure, which computes the gradients within the step."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers()
        loss = Classifier.training_step(self, batch, batch_idx)

        def closure() -> Tensor:
            optimizer.zero_grad()
            self.manual_backward(loss)
            return loss

        if batch_idx % 2:
            optimizer.step(closure=closure)
        return loss


@pytest.mark.parametrize("kind", [Published, Lookahead, PastLightning, BySomeClosures])
def test_a_seed_learns_at_the_rate_of_the_host_and_its_gradients_are_known(kind: type[Classifier]) -> None:
    torch.manual_seed(0)
    module, rates = kind(), list[list[float]]()
    ends = LambdaCallback(
        on_train_batch_end=lambda trainer, *_: rates.append([g["lr"] for g in trainer.optimizers[0].param_groups])
    )
    callback = grow({0: germinate(0, 0)})
    train(module, callback, ends, epochs=4)

    assert callback.growing.slots["3"].stage is Stage.BLENDING
    health = callback.growing.measurements["3"].gradient
    assert health is not None and health.health > 0.9
    assert all(len(row) == 2 for row in rates) and (rates[-1][0] == rates[-1][1] or kind is Published)
    if kind is Published:
        assert [row[1] for row in rates[1:]] == pytest.approx([row[0] for row in rates[:-1]]), "set at the next step"


def test_layers_before_a_seed_in_probation_learn_through_it() -> None:
    sizes = list[float]()
    watch = LambdaCallback(
        on_before_optimizer_step=lambda _, module, optimizer: sizes.append(module.net[0].weight.grad.norm().item())
    )
    callback = grow({0: germinate(0, 0)})
    train(classifier(), callback, watch, epochs=8)

    slot = callback.growing.slots["3"]
    assert slot.stage is Stage.PROBATIONARY and slot.alpha == 1.0
    assert min(sizes[-5:]) > 0.1 * max(sizes)


def test_a_teacher_that_is_a_copy_of_the_network_is_told_to_get_no_seeds() -> None:
    module = Classifier()
    module.teacher = deepcopy(module.net)
    with pytest.warns(UserWarning, match="'teacher' is a copy of 'net' and gets no seeds"):
        train(module, grow(network="net"), epochs=1)
