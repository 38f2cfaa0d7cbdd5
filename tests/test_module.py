"""The LightningModule trains only the policy, at the configured learning rates."""

from copy import deepcopy
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch.nn.utils import clip_grad_norm_, parameters_to_vector
from torch.optim import Adam

from esper_lightning.callbacks import RolloutState
from esper_lightning.cli.commands import EsperCLI
from esper_lightning.datamodules import HostPoolData
from esper_lightning.envs import ActionConfig, EnvConfig
from esper_lightning.envs.host_training import HostTraining
from esper_lightning.module import ADAM_EPS, TamiyoModule
from esper_lightning.ppo.collector import RolloutSummary
from esper_lightning.ppo.losses import Anneal, PPOConfig, ppo_terms
from esper_lightning.ppo.policy import PolicyConfig, PolicyShape
from esper_lightning.ppo.rollout_buffer import Rollout
from esper_lightning.runtime.checkpoint import DivergedError
from esper_lightning.tasks import Digits
from tests.decisions import episode
from tests.runs import (
    HORIZON,
    Run,
    SaveEveryTick,
    differences,
    fit,
    load,
    make_trainer,
    only_run,
    tiny_host,
    with_callback,
)
from tests.tiers import rest_is_slow


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("module")


@pytest.fixture(scope="module")
def built(root: Path) -> EsperCLI:
    return fit(root, *with_callback(SaveEveryTick))


@pytest.fixture(scope="module")
def run(built: EsperCLI, root: Path) -> Run:
    return only_run(root)


def values(run: Run, tag: str) -> list[float]:
    return [value for _, value in run.scalars()[tag]]


def test_a_module_from_a_checkpoint_alone_acts_like_the_trained_one(built: EsperCLI, run: Run) -> None:
    loaded = TamiyoModule.load_from_checkpoint(run.last)

    trained, pool = built.model, built.datamodule.make_pool(3)
    for settings in ("policy_config", "ppo"):
        assert getattr(loaded, settings) == getattr(trained, settings)
    assert differences(dict(loaded.state_dict()), dict(trained.state_dict())) == []
    assert torch.equal(episode(pool, loaded.controller()), episode(pool, trained.controller()))


def test_hosts_are_not_part_of_the_module(built: EsperCLI) -> None:
    ours = {id(parameter) for parameter in built.model.parameters()}
    hosts = {id(parameter) for env in built.datamodule.pool.envs for parameter in env.network.parameters()}
    (optimizer,) = built.trainer.optimizers
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}

    assert trained == {id(parameter) for parameter in built.model.policy.parameters()}
    assert not hosts & (ours | trained)


def test_the_explained_variance_tells_a_perfect_critic_from_a_useless_one() -> None:
    module, returns = TamiyoModule(), torch.tensor([1.0, 2.0, 3.0, 6.0])

    def explained(values: torch.Tensor, targets: torch.Tensor = returns) -> float:
        return module.measure_critic(values, targets)["explained_variance"]

    assert explained(returns) == 1.0
    assert explained(-returns) == pytest.approx(-3.0)  # Var(2R) = 4 Var(R)
    far = 10_000.0 + torch.randn(500, generator=torch.Generator().manual_seed(0))
    assert explained(10_000.0 + 0.5 * (far - 10_000.0), far) == pytest.approx(0.75, abs=1e-3)


def test_normalisers_have_seen_every_step_when_a_rollout_ends(built: EsperCLI, run: Run) -> None:
    """F7: mean, variance and count of both normalisers are buffers of the module, and so in its checkpoint."""
    saved = load(run.last)["state_dict"]
    for name in ("observation_norm", "value_norm"):
        norm = getattr(built.model, name)
        assert {part.rpartition(".")[2] for part, _ in norm.named_buffers()} == {"mean", "var", "count"}
        assert all(torch.equal(saved[f"{name}.{part}"], value) for part, value in norm.named_buffers())
    for tick, steps in ((HORIZON - 1, 0), (HORIZON, 2 * HORIZON), (2 * HORIZON, 4 * HORIZON)):
        weights = load(run.checkpoints / f"tick{tick}.ckpt")["state_dict"]
        assert weights["observation_norm.host.count"] == weights["value_norm.count"] == steps


def test_the_best_checkpoint_holds_the_weights_that_were_validated(run: Run) -> None:
    scores = values(run, "val/objective")
    best = load(run.checkpoints / "best.ckpt")
    tick = HORIZON * (scores.index(max(scores)) + 1)

    assert best["callbacks"]["RolloutState"]["loop"]["ticks"] == tick
    assert differences(best["state_dict"], load(run.checkpoints / f"tick{tick}.ckpt")["state_dict"]) == []


def test_what_is_seen_is_normalised() -> None:
    module = TamiyoModule(PolicyConfig(asymmetric=True))
    module.build(PolicyShape(3, ActionConfig().make_space(["block1"], ["norm", "conv_light"]), privileged=2))
    features = 5.0 + 3.0 * torch.randn(9, 3, generator=torch.Generator().manual_seed(0))
    module.observation_norm.update(features)

    assert (module.observation_norm.clip, module.privileged_norm.clip) == (10.0, 10.0)
    assert module.value_norm.clip == float("inf"), "targets are as they are"
    shown = module.controller().normalise(features)
    assert torch.equal(shown, module.observation_norm(features)) and shown.mean().abs() < 0.5, "to Tamiyo playing too"


def practise(
    module: TamiyoModule,
    executor: Literal["loop", "threads"] = "loop",
    precision: Literal["32", "bf16-mixed"] = "32",
    rollouts: int = 1,
) -> None:
    """Train for a few rollouts under a plain Trainer, without the checks of the command line."""
    env = EnvConfig(horizon=4, executor=executor, training=HostTraining(batches=1))
    settings = {"precision": precision, "logger": False, "enable_checkpointing": False, "max_epochs": rollouts}
    torch.manual_seed(0)
    make_trainer(Path(), RolloutState(), **settings).fit(
        module, datamodule=HostPoolData(Digits(), tiny_host, env, n_envs=2)
    )


@pytest.mark.parametrize("executor", rest_is_slow(["loop", "threads"], {"threads"}))
def test_hosts_and_policy_stay_in_float32_under_a_trainers_autocast(executor: Literal["loop", "threads"]) -> None:
    plain, autocast = (TamiyoModule(ppo=PPOConfig(minibatches=2)) for _ in range(2))
    practise(plain, executor)
    practise(autocast, executor, "bf16-mixed")

    assert differences(autocast.trainer.datamodule.state_dict(), plain.trainer.datamodule.state_dict()) == []
    assert differences(autocast.state_dict(), plain.state_dict()) == []
    assert autocast.report is not None
    assert autocast.report.metrics["first_ratio_error"] < 1e-5


class Twice(TamiyoModule):
    """Update the module, then update a copy of its policy by hand."""

    def build(self, shape: PolicyShape) -> None:
        super().build(shape)
        self.twins = [deepcopy(self.policy)]  # in a list, so that it is no submodule
        self.adam = Adam(self.twins[0].parameters(), eps=ADAM_EPS)

    def update(self, rollout: Rollout, summary: RolloutSummary) -> None:
        generator = self.collector.generator.clone_state()
        minibatches = list(rollout.minibatches(self.ppo.epochs, self.ppo.minibatches, generator))
        super().update(rollout, summary)
        self.learn_by_hand(minibatches, at_the_end=self.trainer.current_epoch == 1)

    def learn_by_hand(self, minibatches: list[Rollout], at_the_end: bool) -> None:
        config, (twin,) = self.ppo, self.twins
        lr, weight = ((anneal.start, anneal.end)[at_the_end] for anneal in (config.lr, config.entropy))
        self.adam.param_groups[0]["lr"] = lr
        before, seen, norms = parameters_to_vector(twin.parameters()).detach().clone(), [], []
        for minibatch in minibatches:
            terms = ppo_terms(twin, minibatch, config)
            seen.append(terms)
            if config.target_kl is not None and terms.kl > 1.5 * config.target_kl:
                break
            loss = terms.policy + config.value_coefficient * terms.value - weight * terms.entropy
            for parameter, gradient in zip(
                twin.parameters(), torch.autograd.grad(loss, list(twin.parameters()), allow_unused=True), strict=True
            ):
                parameter.grad = gradient
            norms.append(clip_grad_norm_(twin.parameters(), config.max_grad_norm))
            self.adam.step()
        after = parameters_to_vector(twin.parameters()).detach()
        self.ratios = [terms.ratio for terms in seen[-config.minibatches :]]  # of the last epoch
        self.expected = {
            "minibatches": len(norms),
            "grad_norm": sum(norms) / len(norms),
            "kl": seen[-1].kl,
            "ratio_low": min(terms.ratio_low for terms in seen),
            "ratio_high": max(terms.ratio_high for terms in seen),
            "clip_fraction": sum(terms.clip_fraction for terms in seen) / len(seen),
            "loss.value": sum(terms.value.item() for terms in seen) / len(seen),
            "entropy.op": seen[0].head_entropy[0],
            "weight_change": (after - before).norm() / before.norm(),
            "lr": lr,
        }


def test_an_update_that_makes_the_weights_overflow_ends_the_run() -> None:
    """The only step of the update is finite: it ends where weights beyond 1e30 leave the range of their squares."""
    module = TamiyoModule(ppo=PPOConfig(lr=Anneal(start=1e30, end=1e30), epochs=1, minibatches=1))

    with pytest.raises(DivergedError, match=r"the policy's weights are not finite after an update; lower model.ppo.lr"):
        practise(module)


@pytest.mark.parametrize(
    ("target_kl", "learned_from"), rest_is_slow([(None, 6.0), (0.5, 6.0), (1e-9, 1.0)], {(None, 6.0), (1e-9, 1.0)})
)
def test_an_update_is_adam_on_the_loss_of_one_minibatch_after_the_other(
    target_kl: float | None, learned_from: float
) -> None:
    """Every update has its own clipped gradient; where the KL exceeds the target, only the earlier ones are applied."""
    module = Twice(
        ppo=PPOConfig(
            lr=Anneal(start=0.02, end=0.01),
            epochs=3,
            minibatches=2,
            value_coefficient=0.7,
            entropy=Anneal(start=0.2, end=0.1),
            max_grad_norm=0.2,
            target_kl=target_kl,
        )
    )
    practise(module, rollouts=2)

    assert differences(module.policy.state_dict(), module.twins[0].state_dict()) == []
    assert module.report is not None
    reported = module.report.metrics
    assert {name: reported[name] for name in module.expected} == pytest.approx(
        {name: float(number) for name, number in module.expected.items()}, rel=1e-5
    )
    torch.testing.assert_close(module.report.ratios, module.ratios, equal_nan=True)
    assert reported["minibatches"] == learned_from
    assert reported["grad_norm"] > 0.2, "else nothing was clipped"
    rollout = {f"rollout/{name}" for name in ("score", "reward", "objective", "return")}
    logged = rollout | {"train/explained_variance", "train/value_error"}
    assert logged <= set(module.trainer.callback_metrics), "for ModelCheckpoint and EarlyStopping"
