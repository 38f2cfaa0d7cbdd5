"""The benchmark of depth counts FLOPs, steps and rates rightly, and compares trainings as its page says."""

import copy
import math
import shutil
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning import Callback, Trainer
from torch._dynamo.utils import counters
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import depth, tables
from benchmarks.depth import Result
from benchmarks.rows import read_rows
from esper_lightning.evaluation.statistics import Interval
from tests.tiers import rest_is_slow


class Witness(Callback):
    """Notes depth, FLOPs and learning rates of each step of a training, by torch's counter on copies of the network."""

    def __init__(self) -> None:
        self.depths: list[int] = []
        self.flops: dict[int, int] = {}  # of a step, by depth
        self.rates: list[set[float]] = []

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        self.depths.append(len(module.net.blocks))
        if self.depths[-1] not in self.flops:
            inputs, targets = batch
            with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
                F.cross_entropy(copy.deepcopy(module.net)(inputs).flatten(0, 1), targets.flatten().long()).backward()
            self.flops[self.depths[-1]] = counter.get_total_flops()

    def on_before_optimizer_step(self, trainer: Trainer, module: Any, optimizer: Any) -> None:
        self.rates.append({group["lr"] for group in optimizer.param_groups})


@pytest.fixture
def witness(monkeypatch: pytest.MonkeyPatch) -> Witness:
    seen = Witness()
    monkeypatch.setattr(depth, "Trainer", lambda callbacks, **rest: Trainer(callbacks=[*callbacks, seen], **rest))
    return seen


TOKENS = 1.0
BUDGET_STEPS = 22_736 * TOKENS / 256  # parameters of gpt16 at six blocks, tokens of a minibatch


@pytest.mark.parametrize(
    ("row", "optimizer", "depths"),
    rest_is_slow(
        [
            ("blocks=3", "adamw", {3: 1.0}),
            ('Stack("blocks", start=1, at={0.3: 2, 0.6: 4}), blocks=4', "adamw", {1: 0.3, 2: 0.3, 4: 0.4}),
            ('Stack("blocks", start=2, at=0.5)', "muon", {2: 0.5, 6: 0.5}),
        ],
        lambda case: len(case[2]) == 3,
    ),
)
def test_a_row_spends_its_budget_and_decays_by_an_independent_count(
    row: str, optimizer: str, depths: dict[int, float], witness: Witness
) -> None:
    (steps,) = depth.lengths("gpt16", TOKENS, row)

    result = depth.train(("gpt16", TOKENS, row, optimizer, steps), 0.01, 0)

    assert len(witness.depths) == len(witness.rates) == result.steps == steps > 100
    shares = {blocks: len(list(of)) / steps for blocks, of in groupby(witness.depths)}
    assert shares == pytest.approx(depths, abs=1.0 / steps) and result.depth == list(depths)[-1]
    assert result.flops == sum(witness.flops[blocks] for blocks in witness.depths)
    six = depth.make_gpt(6, 16, 64)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        six(torch.zeros(4, 64, dtype=torch.uint8)).sum().backward()
    assert abs(result.flops - BUDGET_STEPS * counter.get_total_flops()) < max(witness.flops.values())
    falls = np.linspace(0.01, 0.0, steps - round(0.8 * steps) + 1)  # over the last fifth of the steps
    expected = np.minimum(0.01 * np.arange(1, steps + 1) / 100, 0.01)
    expected[-len(falls) + 1 :] = np.minimum(expected[-len(falls) + 1 :], falls[:-1])
    assert all(len(rates) == 1 for rates in witness.rates)
    np.testing.assert_allclose([min(rates) for rates in witness.rates], expected, atol=0.01 / (0.2 * steps))


def test_a_row_that_decides_in_training_is_placed_by_the_flops_that_it_has_spent(witness: Witness) -> None:
    row = 'Stack("blocks", start=1, plan=lambda progress: 1 + 2 * (progress.share > 0.4)), blocks=3'
    lengths = depth.lengths("gpt16", 0.2, row)
    assert [length / lengths[-1] for length in lengths] == pytest.approx(depth.DECIDING, abs=0.01)

    result = depth.train(("gpt16", 0.2, row, "adamw", lengths[0]), 0.01, 0)

    assert set(witness.depths) == {1, 3} and result.flops == sum(witness.flops[blocks] for blocks in witness.depths)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_a_compiled_training_grows_as_the_uncompiled_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(depth, "TESTED", 64)
    row = 'Stack("blocks"), blocks=2'
    cell = ("gpt16", TOKENS, row, "adamw", *depth.lengths("gpt16", TOKENS, row))

    plain = depth.train(cell, 0.01, 0)
    graphs = counters["stats"]["unique_graphs"]
    compiled = depth.train(cell, 0.01, 0, compiled=True)

    assert counters["stats"]["unique_graphs"] >= graphs + 2  # with one block, and with two
    assert (compiled.flops, compiled.depth, compiled.compiled) == (plain.flops, 2, 1)
    assert (compiled.validation, compiled.test) == pytest.approx((plain.validation, plain.test), abs=1e-3)


@pytest.mark.slow
def test_the_rate_is_searched_until_the_best_is_inside_and_finished_trainings_are_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(depth, "TESTED", 64)
    stack = 'Stack("blocks", start=1, at=0.5), blocks=2'
    place = ["--budget", "0.4", "--csv", str(tmp_path / "depth.csv")]
    run = ["run", *place, "--rows", "blocks=1", stack, "--rates", "0.04", "--seeds", "0", "1"]
    depth.main(run)
    rows = read_rows(tmp_path / "depth.csv", Result)
    for row in ("blocks=1", stack):
        by_rate = {r.rate: r.validation for r in rows if r.row == row and r.seed == 0}
        best = min(by_rate, key=by_rate.__getitem__)
        assert {best / 2, best, 2 * best} <= by_rate.keys()
        assert [r.rate for r in rows if r.row == row and r.seed == 1] == [best]

    with monkeypatch.context() as patch:
        patch.setattr(depth, "train", lambda *_, **__: pytest.fail("a finished training is made again"))
        depth.main(run)
    assert read_rows(tmp_path / "depth.csv", Result) == rows

    capsys.readouterr()
    depth.main(["table", *place])
    lines = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if "`" in line]
    (bold, *_), (name, steps, blocks, *rest) = lines
    at_best = {(r.row, r.seed): r.test for r in rows if r.rate == next(s.rate for s in rows if s[2] == r[2] and s.seed)}
    ahead = sum(at_best["blocks=1", seed] - at_best[stack, seed] for seed in (0, 1)) / 2
    assert bold == "| **`blocks=1`**" and name == f"| `{stack}`"
    assert (int(steps), blocks, rest[1]) == (*depth.lengths("gpt16", 0.4, stack), "2", "2")
    assert rest[3].startswith(tables.shown(Interval(ahead, 0.0, 0.0), signed=True).split()[0])


def result(row: str, flops: float, test: float, seed: int = 0, **changes: Any) -> Result:
    plain = Result("gpt16", 1.0, row, "adamw", 10, 0.01, seed, flops, 2, test, test, 1.0, "", "", 1, 0)
    return plain._replace(**changes)


def test_losses_and_compute_are_interpolated_in_the_log_of_the_flops() -> None:
    curve = [result("", 1.0, 3.0), result("", 4.0, 2.0), result("", 16.0, 1.5)]

    assert depth.loss_at(curve, 2.0) == pytest.approx(2.5)  # halfway between 1 and 4
    assert depth.loss_at(curve, 8.0) == pytest.approx(1.75)
    assert math.isnan(depth.loss_at(curve, 17.0)) and math.isnan(depth.loss_at([], 1.0))
    assert depth.flops_to(curve, 2.5) == pytest.approx(2.0)
    assert depth.flops_to(curve, 1.75) == pytest.approx(8.0)
    assert depth.flops_to(curve, 1.25) == pytest.approx(32.0)  # the last line goes on
    assert depth.flops_to(curve, 3.5) == pytest.approx(0.5)  # and the first one
    assert math.isnan(depth.flops_to(curve[:1], 3.0))
    assert depth.flops_to([*curve, result("", 64.0, 2.5), result("", 256.0, 1.5)], 2.0) == pytest.approx(128.0)


def test_compute_saved_compares_with_the_best_fixed_depth_and_its_interval_holds_the_truth() -> None:
    random, hits, trials = np.random.default_rng(0), 0, 300

    def loss(flops: float) -> float:
        return 2.0 - 0.1 * math.log2(flops) + 0.01 * float(random.standard_normal())

    for _ in range(trials):  # the grown row has at 6 what the better fixed depth has at 8
        fixed = {seed: [result("blocks=2", 8.0, loss(8.0), seed)] for seed in range(4)}
        worse = {seed: [result("blocks=1", 8.0, 9.0, seed)] for seed in range(4)}
        grown = {seed: [result("Stack", x, loss(x * 8 / 6), seed) for x in (2.0, 4.0, 6.0, 8.0)] for seed in range(4)}
        curves = {"blocks=1": worse, "blocks=2": fixed, "Stack": grown}
        (mean, low, high), _ = depth.saved(curves, "Stack", 8.0) or ((math.nan,) * 3, False)
        hits += low <= 0.25 <= high
    assert depth.best_fixed(curves, 8.0) == "blocks=2"
    assert low < mean < high and 0.92 <= hits / trials <= 0.98
