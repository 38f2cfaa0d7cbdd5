"""Several processes learn what one process learns from the same environments."""

import json
import math
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector

from esper_lightning.ppo.collector import RolloutSummary
from esper_lightning.ppo.losses import PPOConfig, ppo_terms
from esper_lightning.ppo.running_norm import RunningMeanStd
from esper_lightning.runtime.ranks import Ranks
from tests.cue import CueMemory
from tests.ppo.loops import cue_loop, play, total
from tests.ranks import fit_in_ranks
from tests.runs import HORIZON, SignalAt, csv_rows, differences, load, only_run, tick_of, with_callback
from tests.threads import Meeting, ThreadRanks, run_in_threads

GAMES, TICKS = 64, 6
CONFIG = PPOConfig(epochs=1, minibatches=4, sequence=3, gamma=0.9)
BROKEN = 7
"""Game with a reward that is not finite."""


class BrokenReward(CueMemory):
    """Memory games of which one, if there is one at this index, has rewards that are no numbers."""

    broken: int | None = None

    def step(self, action: object) -> object:
        step = super().step(action)
        if self.broken is not None:
            step.reward[self.broken] = math.nan
        return step


class Learned(NamedTuple):
    """Result of one rollout and update of one rank."""

    first_gradient: Tensor
    parameters: Tensor
    statistics: list[Tensor]
    summary: RolloutSummary


def learn(ranks: Ranks) -> Learned:
    """Play one rollout of this rank's games and learn from it with SGD."""
    env = BrokenReward(len(ranks.own), TICKS, delay=1)
    env.broken = ranks.own.index(BROKEN) if BROKEN in ranks.own else None
    loop = cue_loop(env, CONFIG, ranks=ranks)
    weights, policy = torch.Generator().manual_seed(0), loop.policy
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=weights))
    loop.reward_norm = RunningMeanStd((), clip=float("inf"))
    norms = [loop.observation_norm, loop.value_norm, loop.reward_norm]
    play(loop)
    rollout, summary = loop.finish()
    gradients = []
    for minibatch in rollout.minibatches(
        CONFIG.epochs, CONFIG.minibatches, loop.generator, usable=summary.usable, ranks=ranks
    ):
        loss = total(ppo_terms(policy, minibatch, CONFIG, ranks))
        parts = torch.autograd.grad(loss, list(policy.parameters()))
        gradient = torch.cat([part.flatten() for part in parts])
        gradients.append(ranks.average(gradient) if isinstance(ranks, ThreadRanks) else gradient)
        with torch.no_grad():
            start = 0
            for parameter in policy.parameters():
                parameter -= 0.05 * gradients[-1][start : start + parameter.numel()].view_as(parameter)
                start += parameter.numel()
    statistics = [part for norm in norms for part in norm.buffers()]
    return Learned(gradients[0], parameters_to_vector(policy.parameters()).detach(), statistics, summary)


@pytest.mark.parametrize("world", [4, pytest.param(GAMES, marks=pytest.mark.slow)])
def test_many_ranks_learn_what_one_process_learns_with_the_same_collectives_on_each(world: int) -> None:
    alone, meeting = learn(Ranks([GAMES])), Meeting(world)

    together = run_in_threads(world, lambda rank: learn(ThreadRanks([GAMES], rank, world, meeting)))

    assert all(noted == meeting.noted[0] for noted in meeting.noted)
    assert len(meeting.noted[0]) < 40
    for one in together:
        torch.testing.assert_close(one.first_gradient, alone.first_gradient, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(one.parameters, alone.parameters, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(one.statistics, alone.statistics)
        assert one.summary.metrics == pytest.approx(alone.summary.metrics, rel=1e-5)
        assert one.summary.metrics["left_out"] == 1 and one.summary.defect == alone.summary.defect
        torch.testing.assert_close(one.summary.returns, alone.summary.returns, rtol=0.0, atol=0.0)


def test_the_environments_of_every_task_are_shared_evenly_and_joined_in_their_order() -> None:
    ranks = [Ranks([4, 2], rank, 2) for rank in range(2)]
    numbers = torch.arange(6)

    assert [one.own for one in ranks] == [[0, 1, 4], [2, 3, 5]]
    assert [one.rows(numbers).tolist() for one in ranks] == [one.rows(numbers.tolist()) for one in ranks]
    assert [one.rows(numbers).tolist() for one in ranks] == [one.own for one in ranks]
    assert ranks[0].join([one.rows(numbers.expand(3, 6), 1) for one in ranks], 1).tolist() == [list(range(6))] * 3
    assert ranks[0].join([one.own for one in ranks]) == list(range(6))
    with pytest.raises(ValueError, match="cannot be shared evenly by 2 processes; set their number to 4 or 6"):
        Ranks([2, 5], 0, 2)


HOSTS = ("--data.n_envs=4", "--trainer.max_epochs=2", "--model.ppo.epochs=3")
"""Four hosts, two rollouts, two updates of six minibatches."""


def distance(one: dict, other: dict) -> float:
    ours, theirs = (
        torch.cat([part.double().flatten() for name, part in saved["state_dict"].items() if "policy" in name])
        for saved in (one, other)
    )
    return float((ours - theirs).norm() / theirs.norm())


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict:
    root = tmp_path_factory.mktemp("alone")
    fit_in_ranks(1, root, *HOSTS)
    return load(only_run(root).last)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("executor", ["loop", "threads"])
def test_several_processes_train_the_policy_and_the_hosts_of_one(
    world: int, executor: str, alone: dict, tmp_path: Path
) -> None:
    fit_in_ranks(world, tmp_path, *HOSTS, f"--data.env.executor={executor}")

    together = load(only_run(tmp_path).last)
    assert differences(together["HostPoolData"]["pool"]["envs"], alone["HostPoolData"]["pool"]["envs"]) == []
    assert distance(together, alone) < 1e-5
    assert {path.name for path in only_run(tmp_path).folder.iterdir()} >= {"config.yaml", "events.jsonl", "run.json"}


def records_of(root: Path) -> tuple[list[str], list[dict[str, str]]]:
    """Return what a run has told but for times: its events, sorted, and the rows of its closing comparison."""
    folder = only_run(root).folder
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    (table,) = folder.rglob("evaluation.csv")
    for event in events:
        event.pop("seconds", None)
        for name in event.get("metrics", {}):  # sums over processes round differently
            event["metrics"][name] = round(event["metrics"][name], 4) if name.startswith(("loss", "kl")) else None
    return sorted(map(json.dumps, events)), csv_rows(table)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_several_processes_tell_once_what_one_tells_of_all_hosts(tmp_path: Path) -> None:
    flags = (*HOSTS, "--model.evaluation.hosts=2", "--model.evaluation.against=[climbing]", "--data.env.executor=loop")
    fit_in_ranks(1, tmp_path / "alone", *flags)
    fit_in_ranks(2, tmp_path / "together", *flags)

    assert records_of(tmp_path / "together") == records_of(tmp_path / "alone")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_run_goes_on_with_any_number_of_processes(alone: dict, tmp_path: Path) -> None:
    last = tmp_path / "version_0" / "checkpoints" / "last.ckpt"
    resume = ("--ckpt_path", str(last))

    fit_in_ranks(2, tmp_path, *HOSTS, *with_callback(SignalAt, tick=3, rank=1), code=143)
    fit_in_ranks(4, tmp_path, *HOSTS, *with_callback(SignalAt, tick=7, rank=0), *resume, code=143)
    fit_in_ranks(1, tmp_path, *HOSTS, *resume)

    resumed = load(last)
    assert differences(resumed["HostPoolData"]["pool"]["envs"], alone["HostPoolData"]["pool"]["envs"]) == []
    assert distance(resumed, alone) < 1e-5


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("tick", "rank"), [(1, 0), (HORIZON + 3, 1)])
def test_sigterm_to_either_process_saves_the_tick_and_the_run_goes_on_bit_for_bit(
    tick: int, rank: int, tmp_path: Path
) -> None:
    fit_in_ranks(2, tmp_path / "whole", *HOSTS)
    fit_in_ranks(2, tmp_path / "stopped", *HOSTS, *with_callback(SignalAt, tick=tick, rank=rank), code=143)

    last = only_run(tmp_path / "stopped").last
    assert tick_of(last) == tick
    fit_in_ranks(2, tmp_path / "stopped", *HOSTS, "--ckpt_path", str(last))
    ended, whole = load(last), load(only_run(tmp_path / "whole").last)
    for part in ("state_dict", "optimizer_states", "HostPoolData"):
        assert differences(ended[part], whole[part]) == []
