"""Measure what the callback Grow brings in a training as a user writes it.

    python -m benchmarks.grow result  # 20 trainings, 20 to 50 minutes of one core
    python -m benchmarks.grow table

result: a narrow ResNet-18 on letters, trained for 20 epochs by an ordinary LightningModule: as it is; grown by the
    default rule, by a schedule and by the policy `tamiyo`; and with the schedule's seeds built in from the start.
table: Markdown table of the kept results.

Results are rows of a CSV file. Rows that it has got are not measured again.
"""

import argparse
import tempfile
import time
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.rows import appended_rows, read_rows
from esper_lightning.callbacks import Grow
from esper_lightning.controllers.schedules import Schedule, ScheduledAction, write_schedule
from esper_lightning.growth import slots_of
from esper_lightning.growth.blueprints import build_seed
from esper_lightning.growth.stages import Stage
from esper_lightning.tasks import Glyphs, Split, TaskData

RESULTS = Path(__file__).parent / "results" / "grow.csv"

EPOCHS, BATCH, LR = 20, 64, 0.002

BASE = 8
"""Channels of the first stage; each further stage has twice as many."""

SLOTS = ("layer1", "layer2", "layer3")
"""Slots of all grown networks."""

BLUEPRINT = "conv_light"

SCHEDULED = {"layer2": 1, "layer3": 2}
"""Ticks of the germinations of the schedule. Seeds are kept as soon as they pass the gate."""

AS_IT_WAS, BUILT_IN = "as it was", "built in"

PLANS = (AS_IT_WAS, "default rule", "schedule", "tamiyo", BUILT_IN)


class BasicBlock(nn.Module):
    """Residual block of two 3×3 convolutions (https://arxiv.org/abs/1512.03385, page 4)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = (
            nn.Identity()
            if inputs == outputs
            else nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        )

    def forward(self, x: Tensor) -> Tensor:  # [B, inputs, S, S] -> [B, outputs, S / stride, S / stride]
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(out + self.shortcut(x))


class ResNet18(nn.Module):
    """ResNet-18 for small images of one channel, with a narrow base."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, BASE, 3, 1, 1, bias=False), nn.BatchNorm2d(BASE), nn.ReLU())
        for stage, inputs in enumerate((BASE, BASE, 2 * BASE, 4 * BASE)):
            outputs, stride = BASE * 2**stage, 1 if stage == 0 else 2
            blocks = nn.Sequential(BasicBlock(inputs, outputs, stride), BasicBlock(outputs, outputs, 1))
            self.add_module(f"layer{stage + 1}", blocks)
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * BASE, classes))

    def forward(self, x: Tensor) -> Tensor:  # [B, 1, S, S] -> [B, classes]
        x = self.stem(x)
        for stage in range(4):
            x = self.get_submodule(f"layer{stage + 1}")(x)
        return self.head(x)


class Classifier(L.LightningModule):
    """An ordinary LightningModule with a scheduler, which knows nothing of growth."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.network(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        outputs = self.network(batch[0])
        self.log("val_loss", F.cross_entropy(outputs, batch[1]))
        self.log("val_acc", (outputs.argmax(1) == batch[1]).float().mean())

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("test_acc", (self.network(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=LR, weight_decay=0.01)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)]


class Row(NamedTuple):
    """Result of a run."""

    plan: str
    rng_seed: int
    accuracy: float  # on test images, in points of 100
    parameters: int  # at the end, those of seeds included
    seconds: float  # of processor time of the training, validations included
    kept: str  # slot and blueprint of each fossilized seed
    unfinished: str  # the same of seeds that were neither kept nor removed by the end


def loader(split: Split, *, is_training: bool) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*split), BATCH if is_training else 250, shuffle=is_training, drop_last=is_training)


def make_schedule() -> Schedule:
    """Return a schedule that germinates a seed in each of two slots early, and keeps it when it passes the gate."""
    germinations = [ScheduledAction(tick, "GERMINATE", slot, blueprint=BLUEPRINT) for slot, tick in SCHEDULED.items()]
    fossilizations = [ScheduledAction(tick + 1, "FOSSILIZE", slot) for slot, tick in SCHEDULED.items()]
    return Schedule(SLOTS, (*germinations, *fossilizations))


def make_grow(plan: str, rng_seed: int, schedule: Path) -> Grow | None:
    """Return the callback of a plan, or None if nothing grows."""
    if plan == "default rule":
        return Grow(SLOTS, rng_seed=rng_seed)
    if plan == "schedule":
        return Grow(SLOTS, decider=str(schedule), rng_seed=rng_seed)
    if plan == "tamiyo":
        return Grow(SLOTS, decider="tamiyo", loss="val_loss", rng_seed=rng_seed)
    return None


def build_in(network: nn.Module, rng_seed: int) -> None:
    """Put the seeds of the schedule behind their stages as plain modules that begin as the identity."""
    generator = torch.Generator().manual_seed(rng_seed)
    for slot in SCHEDULED:
        width = BASE * 2 ** (int(slot.removeprefix("layer")) - 1)
        seed = build_seed(BLUEPRINT, "image", width, device=torch.device("cpu"), generator=generator)
        setattr(network, slot, nn.Sequential(network.get_submodule(slot), seed))


def run(plan: str, rng_seed: int, data: TaskData, schedule: Path) -> Row:
    """Train and test one network."""
    L.seed_everything(rng_seed, verbose=False)
    network = ResNet18(data.outputs)
    if plan == BUILT_IN:
        build_in(network, rng_seed)
    grow = make_grow(plan, rng_seed, schedule)
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=EPOCHS,
        callbacks=[grow] if grow else [],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    module = Classifier(network)
    L.seed_everything(rng_seed, verbose=False)  # the same minibatches in all plans
    begin = time.process_time()
    trainer.fit(module, loader(data.train, is_training=True), loader(data.validation, is_training=False))
    seconds = time.process_time() - begin
    (tested,) = trainer.test(module, loader(data.test, is_training=False), verbose=False)
    occupied = {f"{name} {slot.blueprint}": slot.stage for name, slot in slots_of(network).items() if slot.occupied}
    return Row(
        plan,
        rng_seed,
        round(100.0 * tested["test_acc"], 2),
        sum(parameter.numel() for parameter in network.parameters()),
        round(seconds, 1),
        "; ".join(seed for seed, stage in occupied.items() if stage is Stage.FOSSILIZED),
        "; ".join(seed for seed, stage in occupied.items() if stage is not Stage.FOSSILIZED),
    )


def measure(path: Path, rng_seeds: list[int]) -> None:
    """Measure all plans that the file has not got yet; each row is appended when its run ends."""
    known = {(row.plan, row.rng_seed) for row in read_rows(path, Row)}
    wanted = [(plan, seed) for seed, plan in product(rng_seeds, PLANS) if (plan, seed) not in known]
    data = Glyphs(train=4000, validation=1000).load()
    with tempfile.TemporaryDirectory() as folder, appended_rows(path, Row) as append:
        schedule = Path(folder) / "schedule.json"
        write_schedule(make_schedule(), schedule)
        for plan, rng_seed in wanted:
            row = run(plan, rng_seed, data, schedule)
            append([row])
            print(*row, sep=", ", flush=True)


def table(rows: list[Row]) -> list[str]:
    """Return a Markdown table of means over RNG seeds, with the single runs in parentheses.

    The column "ahead" has the accuracy minus that of the network as it was, paired by RNG seed.
    """
    plain = {row.rng_seed: row for row in rows if row.plan == AS_IT_WAS}
    lines = ["| network | test accuracy | ahead | parameters | processor seconds | seeds kept | unfinished |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for plan in PLANS:
        own = [row for row in rows if row.plan == plan]
        if own:
            leads = [row.accuracy - plain[row.rng_seed].accuracy for row in own if row.rng_seed in plain]
            ahead = with_runs(leads, "{:+.2f}") if plan != AS_IT_WAS and leads else ""
            accuracy = with_runs([row.accuracy for row in own], "{:.2f}")
            parameters, seconds = mean(row.parameters for row in own), mean(row.seconds for row in own)
            kept, unfinished = (
                mean(len(seeds.split("; ")) if seeds else 0 for seeds in column)
                for column in ([row.kept for row in own], [row.unfinished for row in own])
            )
            lines.append(
                f"| {plan} | {accuracy} | {ahead} | {parameters:,.0f} | {seconds:.0f} | {kept:.1f} | {unfinished:.1f} |"
            )
    return lines


def with_runs(values: list[float], form: str) -> str:
    """Return the mean of values, and the values in parentheses."""
    return f"{form.format(mean(values))} ({', '.join(form.format(value) for value in values)})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    measured = commands.add_parser("result")
    measured.add_argument("--csv", type=Path, default=RESULTS, help="rows are added here")
    measured.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3])
    commands.add_parser("table").add_argument("--csv", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.command == "result":
        measure(args.csv, args.seeds)
    else:
        print("\n".join(table(read_rows(args.csv, Row))))


if __name__ == "__main__":
    main()
