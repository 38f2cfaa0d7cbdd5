"""Rollout, update, checkpoint, telemetry and comparison on an imitated GPU, with every executor and precision."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import SingleDeviceStrategy

from esper_lightning.callbacks import Governor, RolloutState
from esper_lightning.controllers.rules import RandomValid
from esper_lightning.datamodules import HostPoolData
from esper_lightning.envs import HostPool
from esper_lightning.envs.actions import to_action
from esper_lightning.envs.governor import GovernorConfig
from esper_lightning.evaluation.comparison import EvaluationConfig
from esper_lightning.module import TamiyoModule
from esper_lightning.ppo.collector import RolloutCollector
from esper_lightning.ppo.losses import PPOConfig, ppo_terms, update_metrics
from esper_lightning.ppo.policy import Policy, PolicyConfig, policy_shape
from esper_lightning.ppo.running_norm import RunningMeanStd, make_norm
from esper_lightning.runtime.ranks import ALONE
from esper_lightning.tasks import AugmentConfig, Digits
from esper_lightning.telemetry.metrics import tick_metrics
from esper_lightning.telemetry.observer import Observer, join, observe
from tests.conftest import SMALL, small_host
from tests.decisions import WAIT, germinate
from tests.envs.executors.fused import hosts
from tests.imitated_gpu import GPU, ImitatedGpu
from tests.ppo.loops import total
from tests.runs import differences
from tests.tiers import rest_is_slow

N_HOSTS = 2

HORIZON = 3

CASES = rest_is_slow(product(("loop", "streams", "fused"), ("fp32", "tf32", "bf16", "fp16")), {("fused", "fp16")})


def make_collector(executor: str, precision: str) -> RolloutCollector:
    """Return a collector of a small pool on the imitated GPU."""
    task = Digits(validation=50, test=50)
    training = replace(SMALL.training, precision=precision)
    config = replace(SMALL, executor=executor, training=training, horizon=HORIZON)
    governor = GovernorConfig(snapshot_every=1)
    pool = HostPool(task, task.load(), small_host, config=config, n_envs=N_HOSTS, device=GPU, governor=governor)
    torch.manual_seed(0)
    return RolloutCollector(
        pool,
        Policy(policy_shape(pool), PolicyConfig(width=16)).to(GPU),
        observation_norm=make_norm(pool.rows).to(GPU),
        value_norm=RunningMeanStd((), clip=float("inf")).to(GPU),
        config=PPOConfig(),
        run_rng_seed=7,
    )


@pytest.mark.parametrize(("executor", "precision"), CASES)
def test_a_tick_waits_for_the_gpu_twice_and_nothing_is_on_the_wrong_device(executor: str, precision: str) -> None:
    """S3: a step reads the actions in one transfer and all measurements in another, and nothing else."""
    with ImitatedGpu() as gpu:
        collector = make_collector(executor, precision)
        pool, space = collector.pool, collector.pool.space
        observer = Observer(space.slot, space.blueprint, horizon=pool.horizon, n_envs=pool.n_envs)
        collector.reset()
        collector.step()  # creates what is cached
        gpu.waits.clear()
        for tick in range(1, pool.horizon):
            step = collector.step()
            seen = join([observe(pool, step, tick)], ALONE)
            tick_metrics(seen, space.slot)
            observer.update(seen)
        assert sum(gpu.waits.values()) == 2 * (pool.horizon - 1), gpu.waits
        assert {wait.partition(" < ")[0] for wait in gpu.waits} == {"event"}

        rollout, _ = collector.finish()
        optimizer = torch.optim.Adam(collector.policy.parameters(), fused=True)
        terms = []
        for minibatch in rollout.minibatches(1, 2, collector.generator):
            terms.append(ppo_terms(collector.policy, minibatch, collector.config))
            total(terms[-1]).backward()
            torch.nn.utils.clip_grad_norm_(collector.policy.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        update_metrics(terms, [], collector.policy.heads.sizes, finite=[])

        saved = pool.state_dict(), collector.state_dict()
        pool.load_state_dict(saved[0])
        collector.load_state_dict(saved[1])
        collector.reset()
        collector.step()
        pool.test_scores()[1]
        pool.test_metrics()
        assert gpu.faults == {}


HOST_CASES = rest_is_slow(
    product(("loop", "streams", "fused"), ("cnn, depth", "gpt, depth", "residual", "mlp")),
    {("streams", "residual")},
)


@pytest.mark.parametrize(("executor", "host"), HOST_CASES)
def test_growth_in_depth_micro_batches_and_augmentation_add_no_wait(executor: str, host: str) -> None:
    augment = AugmentConfig() if host == "gpt, depth" else AugmentConfig(pad=1, flip=True)
    training = replace(hosts.FAST_CONFIG.training, micro_batches=2, lr_schedule="decay", augment=augment)
    with ImitatedGpu() as gpu:
        pool, controller = hosts.make(executor, host, 2, torch.float32, device=GPU, training=training), RandomValid(5)
        pool.step(controller.act(pool))  # creates what is cached
        for _ in range(5):
            action = controller.act(pool)
            gpu.waits.clear()
            pool.step(action)
            assert sum(gpu.waits.values()) == 2, gpu.waits
        assert any(slot.occupied for env in pool.envs for slot in env.slots)
    # Where FLOPs are counted, torch makes the causal mask in C++, on the device that tensors really have.
    assert [fault for fault in gpu.faults if "envs/flops.py" not in fault] == []


def play_in_processes(executor: str, world: int) -> list[dict[str, Any]]:
    """Return the states of four hosts on the imitated GPU after three ticks, an equal part of them in each process."""
    actions = [(germinate(0, 2), germinate(1, 1), WAIT, germinate(0, 0)), (WAIT, WAIT, germinate(1, 2), WAIT)]
    states = []
    for rank in range(world):
        data = HostPoolData(
            Digits(validation=50, test=50), small_host, replace(SMALL, executor=executor), n_envs=len(actions[0])
        )
        data.build(GPU, rank=rank, world=world)
        data.pool.reset([100 + host for host in data.ranks.own])
        for rows in (*actions, [WAIT] * len(actions[0])):
            data.pool.step(to_action([rows[host] for host in data.ranks.own], GPU))
        states += [env.state_dict() for env in data.pool.envs]
    return states


@pytest.mark.parametrize("executor", rest_is_slow(["streams", "loop"], {"streams"}))
def test_hosts_do_not_depend_on_the_number_of_processes(executor: str) -> None:
    with ImitatedGpu() as gpu:
        alone, together = (play_in_processes(executor, world) for world in (1, 2))
        assert gpu.faults == {}
    assert differences(together, alone) == []
    assert differences(alone[:1], alone[1:2]) != [], "each host has a life of its own"


class ImitatedAccelerator(CPUAccelerator):
    """Accelerator of an imitated GPU."""

    def setup_device(self, device: torch.device) -> None:
        assert device == GPU


def imitated_strategy() -> SingleDeviceStrategy:
    return SingleDeviceStrategy(device=GPU, accelerator=ImitatedAccelerator())


def fit(
    root: Path,
    executor: str,
    *callbacks: Callback,
    logger: Logger | bool = False,
    compares: bool = False,
    **training: Any,
) -> None:
    """Train two rollouts on the imitated GPU, and compare the policy if it is asked for."""
    task = Digits(validation=100, test=100)
    env = replace(SMALL, executor=executor, horizon=3, training=replace(SMALL.training, **training))
    with ImitatedGpu() as gpu:
        trainer = Trainer(
            strategy=imitated_strategy(),
            max_epochs=2,
            default_root_dir=root,
            logger=logger,
            callbacks=[RolloutState(), Governor(), *callbacks],
            enable_progress_bar=False,
            enable_checkpointing=False,
        )
        module = TamiyoModule(PolicyConfig(width=16), PPOConfig(minibatches=1), evaluation=EvaluationConfig(hosts=2))
        data = HostPoolData(task, small_host, env, n_envs=2, val_hosts=2)
        trainer.fit(module, datamodule=data)
        if compares:
            trainer.test(module, datamodule=data)
        assert gpu.faults == {}


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["loop", "streams", "fused"])
def test_a_whole_fit_ends_with_its_comparison(executor: str, tmp_path: Path) -> None:
    fit(tmp_path, executor, precision="auto", compares=True)
    assert (tmp_path / "evaluation" / "evaluation.csv").exists()


@pytest.mark.slow
def test_in_float64_fused_on_a_gpu_does_what_the_loop_does_on_the_cpu() -> None:
    """A GPU has its own memory format, alignment, and size of validation passes."""
    loop = hosts.make("loop", "cnn")
    hosts.play(loop)
    with ImitatedGpu() as gpu:
        fused = hosts.make("fused", "cnn", device=GPU)
        hosts.play(fused)
        assert hosts.distance(fused, loop) < 1e-9
        assert gpu.faults.keys() <= {"aten::sub between devices"}, "the comparison's own"
