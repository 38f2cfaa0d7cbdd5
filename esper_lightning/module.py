"""The policy and its PPO update as a LightningModule with manual optimization."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning import Callback, LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torchmetrics import ExplainedVariance, MeanSquaredError, MetricCollection

from esper_lightning.callbacks import RolloutState
from esper_lightning.controllers.learned import LearnedController
from esper_lightning.datamodules import HostPoolData, PolicyData, attached_data
from esper_lightning.evaluation.comparison import ComparisonResult, EvaluationConfig
from esper_lightning.evaluation.report import EVALUATION_FOLDER, compare
from esper_lightning.ppo.collector import RolloutCollector, RolloutSummary
from esper_lightning.ppo.losses import PPOConfig, PPOTerms, ppo_terms, update_metrics
from esper_lightning.ppo.policy import Policy, PolicyConfig, PolicyShape, policy_shape, use_ieee_float32
from esper_lightning.ppo.rollout_buffer import Rollout
from esper_lightning.ppo.running_norm import RunningMeanStd, make_norm
from esper_lightning.runtime.checkpoint import (
    DATA_SETTINGS_KEY,
    HYPER_PARAMETERS_KEY,
    IDENTITY_KEY,
    MODULE_KEY,
    RULES_KEY,
    SCHEMA,
    SCHEMA_KEY,
    check_finite,
    check_identity,
    check_policy,
    differences,
)
from esper_lightning.runtime.compiled import Compiled
from esper_lightning.runtime.console import DivergedError, print_status
from esper_lightning.runtime.limits import has_end, share_of_training
from esper_lightning.runtime.ranks import ALONE
from esper_lightning.runtime.serialization import load_settings

ADAM_EPS = 1e-5
"""Adam's epsilon, larger than usual, so that steps do not grow when PPO's gradients get small."""

KL_SLACK = 1.5
"""Multiple of the KL target at which an update ends early: above 1, as the target is a mean and not a bound."""

MAX_SKIPS = 3
"""Consecutive skipped minibatches that end the run."""


class UpdateReport(NamedTuple):
    """Report of one PPO update, for callbacks."""

    summary: RolloutSummary
    metrics: dict[str, float]  # of the update, by name
    ratios: list[Tensor]  # of the last epoch, for each minibatch that was used; NaN where the action was forced


class TamiyoModule(LightningModule):
    """LightningModule that trains Tamiyo, or a policy for any other vector environment, with PPO.

    A Lightning batch is one environment step of all hosts, or a whole rollout where steps are short. An epoch is one
    rollout and one PPO update. `test` compares the policy with baselines.

    Args:
        policy: Architecture and size of the policy.
        ppo: Settings of PPO.
        evaluation: Settings of the comparison that `test` makes.
    """

    def __init__(
        self,
        policy: PolicyConfig = PolicyConfig(),
        ppo: PPOConfig = PPOConfig(),
        evaluation: EvaluationConfig = EvaluationConfig(),
    ) -> None:
        super().__init__()
        # A checkpoint holds the settings as plain data, which `load_from_checkpoint` hands to this constructor.
        self.policy_config = load_settings(PolicyConfig, policy)
        self.ppo = load_settings(PPOConfig, ppo)
        self.evaluation = load_settings(EvaluationConfig, evaluation)
        settings = {"policy": self.policy_config, "ppo": self.ppo, "evaluation": self.evaluation}
        self.save_hyperparameters({name: asdict(config) for name, config in settings.items()})
        self.automatic_optimization = False
        self.policy_shape: PolicyShape | None = None  # None until the policy is built
        self.ranks = ALONE
        self.report: UpdateReport | None = None  # report of the last update in this process
        self.metrics: dict[str, float] = {}  # of the last rollout and update, by tag: means over all environments
        self.results: dict[str, ComparisonResult] = {}  # of the last `test` of this process, by task
        self.skips_in_a_row = 0  # minibatches skipped at the end of the last update
        self._compiled = Compiled.total  # after the last rollout
        self._share = 0.0  # of the training that was over when the present rollout began
        # Of one rollout: updated once, from the complete rollout, so that a resumed run has the same values.
        self.critic_metrics = MetricCollection(
            {"explained_variance": ExplainedVariance(), "value_error": MeanSquaredError(squared=False)}
        )

    def configure_callbacks(self) -> list[Callback]:
        """Return RolloutState unless the Trainer has it: without it a run cannot be resumed."""
        trainer: Any = self.trainer
        return [] if any(isinstance(known, RolloutState) for known in trainer.callbacks) else [RolloutState()]

    def check(self, data: PolicyData) -> None:
        """Raise ValueError if there are too few environments for the minibatches, or reward and PPO do not agree."""
        available = data.n_envs * (data.horizon // (self.ppo.sequence or data.horizon))
        if self.ppo.minibatches > available:
            raise ValueError(
                f"model.ppo.minibatches is {self.ppo.minibatches}, more than the {available} environments (or "
                f"sequences) they are made of; lower it or raise data.n_envs"
            )
        if isinstance(data, HostPoolData):
            for name in ("gamma", "horizon_is_end"):  # one setting on the command line
                ours, theirs = getattr(data.env.reward, name), getattr(self.ppo, name)
                if ours != theirs:
                    raise ValueError(f"RewardConfig.{name} is {ours} and PPOConfig.{name} {theirs}; give both the same")

    def setup(self, stage: str) -> None:
        """Build the policy for the environments of the Trainer's data module, unless it is built already."""
        data = attached_data(self.trainer)
        if stage == "fit":
            self.check(data)
            if self.trainer.max_epochs == 0:
                raise ValueError("trainer.max_epochs must be at least 1, got 0")
        shape = policy_shape(data.pool)
        if self.policy_shape is None:
            self.build(shape)
        elif shape != self.policy_shape:
            raise ValueError("the policy was made for other environments; give the data module of its training")

    def build(self, shape: PolicyShape) -> None:
        """Build the policy and its normalisers."""
        use_ieee_float32()
        self.policy_shape = shape
        self.policy = Policy(shape, self.policy_config)
        self.policy.compiled.enabled = self.ppo.compile
        self.observation_norm = make_norm(shape.rows or shape.features)
        self.value_norm = RunningMeanStd((), clip=float("inf"))
        self.privileged_norm = make_norm(shape.privileged) if self.policy_config.asymmetric else None
        self.reward_norm = RunningMeanStd((), clip=float("inf")) if self.ppo.normalize_rewards else None

    def on_fit_start(self) -> None:
        data = attached_data(self.trainer)
        self.ranks = data.ranks
        self.collector = RolloutCollector(
            data.pool,
            self.policy,
            observation_norm=self.observation_norm,
            value_norm=self.value_norm,
            config=self.ppo,
            run_rng_seed=data.seed,
            privileged_norm=self.privileged_norm,
            reward_norm=self.reward_norm,
            ranks=self.ranks,
        )

    def on_train_start(self) -> None:
        horizon, batches = attached_data(self.trainer).horizon, int(self.trainer.num_training_batches)
        if horizon % batches:
            raise ValueError(
                f"trainer.limit_train_batches leaves {batches} batches, which do not divide the {horizon} ticks "
                f"of a rollout; leave it out, or change data.env.horizon"
            )
        self._share = share_of_training(self.trainer, 0)  # for a run that is resumed in the middle of a rollout
        if not has_end(self.trainer) and self.trainer.is_global_zero:
            print_status(
                "the training has no end, so learning rate and entropy bonus keep their first values; give the Trainer "
                "max_epochs, max_steps or max_time"
            )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.trainer.scaler is not None:
            raise ValueError(
                "trainer.precision scales gradients, but the policy trains in float32; leave it out, and choose the "
                "precision of hosts by data.env.training.precision"
            )
        # On a GPU only a fused optimizer can skip a step without a transfer.
        fused = True if self.device.type == "cuda" else None
        return torch.optim.Adam(self.policy.parameters(), lr=self.ppo.lr.at(0.0), eps=ADAM_EPS, fused=fused)

    @property
    def progress(self) -> float:
        """Progress of the training at the update of the present rollout: 0 at the first, 1 at the last; estimated."""
        rollouts = self.trainer.current_epoch  # that are over
        if rollouts == 0 or self._share == 0.0:
            return 0.0
        expected_rollouts = round(rollouts / self._share)  # of the whole training
        return min(1.0, rollouts / max(1, expected_rollouts - 1))

    def training_step(self, tick: int, batch_idx: int) -> None:
        # The trainer's autocast must not reach hosts or policy: the probability ratio would no longer start at 1.
        with torch.autocast(self.device.type, enabled=False):
            if batch_idx == 0:
                self.collector.reset()
                self._share = share_of_training(self.trainer, 0)
            for _ in range(int(self.collector.buffer.ticks // self.trainer.num_training_batches)):
                self.collector.step()
            step = self.collector.last_step
            if self.trainer.is_last_batch:
                with self.collector.pool.clock.measure("update"):
                    self.update(*self.collector.finish())
        self.log_dict(step.log, prog_bar=True, logger=False)

    def update(self, rollout: Rollout, summary: RolloutSummary) -> None:
        """Run one PPO update on a rollout, store its report and log it.

        Minibatches whose loss or gradient is not finite are skipped. Raises DivergedError after three in a row, or if
        the policy's weights are not finite at the end.
        """
        config, parameters, optimizer = self.ppo, list(self.policy.parameters()), self.optimizers()
        assert isinstance(optimizer, LightningOptimizer), "there is one"
        lr, entropy_coefficient = config.lr.at(self.progress), config.entropy.at(self.progress)
        for group in optimizer.param_groups:
            group["lr"] = lr
        before = nn.utils.parameters_to_vector(parameters).detach().clone()
        all_terms: list[PPOTerms] = []
        grad_norms: list[Tensor] = []
        finite_flags: list[Tensor] = []  # [] bool for each minibatch: False if it was skipped
        for minibatch in rollout.minibatches(
            config.epochs, config.minibatches, self.collector.generator, usable=summary.usable, ranks=self.ranks
        ):
            terms = ppo_terms(self.policy, minibatch, config, self.ranks)
            all_terms.append(PPOTerms(*(term.detach() for term in terms)))
            # Reading the KL costs a device synchronisation; without it an update could diverge unnoticed.
            if config.target_kl is not None and terms.kl.item() > KL_SLACK * config.target_kl:
                break
            loss = terms.policy + config.value_coefficient * terms.value - entropy_coefficient * terms.entropy
            optimizer.zero_grad()
            self.manual_backward(loss)  # averages the gradients of all ranks
            grad_norms.append(nn.utils.clip_grad_norm_(parameters, config.max_grad_norm))
            # The norm before clipping is squared, as Adam squares gradients. All ranks see the same numbers.
            finite_flags.append((loss.detach() + grad_norms[-1].square()).isfinite())
            skip_unless(finite_flags[-1], optimizer.optimizer)
            optimizer.step()
        finite = torch.stack(finite_flags).tolist() if finite_flags else []
        for is_finite in finite:
            self.skips_in_a_row = 0 if is_finite else self.skips_in_a_row + 1
            if self.skips_in_a_row == MAX_SKIPS:
                raise DivergedError(
                    f"the loss or gradient of {MAX_SKIPS} minibatches in a row is not finite; lower model.ppo.lr, or "
                    f"set a lower model.ppo.target_kl"
                )
        after = nn.utils.parameters_to_vector(parameters).detach()
        weight_change = (torch.linalg.vector_norm(after - before) / torch.linalg.vector_norm(before)).item()
        if not isfinite(weight_change):
            raise DivergedError(
                "the policy's weights are not finite after an update; lower model.ppo.lr, or set a lower "
                "model.ppo.target_kl"
            )
        metrics = update_metrics(all_terms, grad_norms, self.policy.heads.sizes, finite=finite) | {
            **summary.metrics,
            **self.measure_critic(summary.values, summary.value_targets),
            "weight_change": weight_change,
            "lr": lr,
            "entropy_coefficient": entropy_coefficient,
        }
        last_pass = (len(all_terms) - 1) // config.minibatches * config.minibatches
        self.report = UpdateReport(summary, metrics, [terms.ratio for terms in all_terms[last_pass:]])
        self._log_update(self.report)

    def measure_critic(self, values: Tensor, targets: Tensor) -> dict[str, float]:
        """Return the metrics of the critic on one rollout, by name, given values and returns of its steps [steps]."""
        # Both metrics depend on differences alone. Torchmetrics subtracts a squared mean from a mean of squares, which
        # would cancel in float32 if the mean of the returns were not removed first.
        offset = self.ranks.moments(targets).mean
        self.critic_metrics.reset()
        self.critic_metrics.update(values - offset, targets - offset)
        return {name: value.item() for name, value in self.critic_metrics.compute().items()}

    def _log_update(self, report: UpdateReport) -> None:
        """Print what was left out of an update, and log its metrics and those of the rollout."""
        summary, metrics, update = report.summary, report.metrics, self.trainer.current_epoch + 1
        if left_out := int(metrics["left_out"]):
            print_status(
                f"{left_out} of {len(summary.usable)} environments are left out of update {update}: {summary.defect}"
            )
        if skipped := int(metrics["skipped"]):
            print_status(
                f"{skipped} of {skipped + int(metrics['minibatches'])} minibatches of update {update} were skipped: "
                f"their loss or gradient is not finite"
            )
        log, ranks = self.collector.last_step.log, self.ranks
        if ranks.world > 1:  # means over the environments of all ranks
            sums = ranks.sum(torch.stack([torch.as_tensor(value, dtype=torch.float64) for value in log.values()]))
            log = dict(zip(log, sums / ranks.world, strict=True))
        means = {"return": summary.returns.mean(), **log}
        self.metrics = {f"rollout/{name}": float(value) for name, value in means.items()}
        self.metrics |= {f"train/{name}": value for name, value in metrics.items()}
        data = attached_data(self.trainer)
        pools = data.pools.values() if isinstance(data, HostPoolData) else ()
        if self.ppo.compile or any(pool.config.training.compile for pool in pools):
            self.metrics["compile/recompilations"] = float(Compiled.total - self._compiled)
            self._compiled = Compiled.total
        # Once per rollout, so they are right after a resume, too. Lightning would write them behind the epoch's end,
        # where a run may be stopped.
        for logger in self.trainer.loggers:
            logger.log_metrics(self.metrics, step=self.collector.ticks)
        for_monitors = {"on_step": False, "on_epoch": True, "logger": False, "batch_size": 1}
        self.log_dict(self.metrics, sync_dist=ranks.world > 1, **for_monitors)

    def controller(self) -> LearnedController:
        """Return a controller that plays the current policy greedily. Raises ValueError if there is no policy yet."""
        if self.policy_shape is None:
            raise ValueError("the module has no policy before its first `fit`; use TamiyoModule.load_from_checkpoint")
        return LearnedController(self.policy, self.observation_norm)

    @contextmanager
    def _hosts(self, batch: Any) -> Iterator[HostPoolData]:
        """Yield the hosts of a validation or test of Lightning, in which they train in their own precision."""
        data = attached_data(self.trainer)
        # After a `fit` Lightning keeps its data module, and yet takes the batches of a loader that is given.
        if not isinstance(batch, list) or not all(isinstance(rng_seed, int) for rng_seed in batch):
            raise ValueError("a policy is validated and tested on hosts; give datamodule=, and no loaders")
        if not isinstance(data, HostPoolData):
            raise ValueError(f"{type(data).__name__} has no hosts to validate or test on; only `fit` is for it")
        autocast = torch.autocast(self.device.type, enabled=False)
        with torch.inference_mode(False), torch.enable_grad(), autocast:
            yield data

    def validation_step(self, rng_seeds: list[int], batch_idx: int) -> None:
        """Play one episode of the hosts with these RNG seeds, with the most likely actions, and log the mean result."""
        finals = []
        with self._hosts(rng_seeds) as data, isolate_rng():
            for pool in data.validation_pools(len(rng_seeds)):
                pool.reset(rng_seeds)
                controller = self.controller()
                controller.reset(pool)
                steps = [pool.step(controller.act(pool)) for _ in range(pool.horizon)]
                finals.append(steps[-1].metrics)
        logged = {
            f"val/{name}": torch.cat([getattr(final, name).double().cpu() for final in finals]).mean().float()
            for name in ("objective", "score")
        }
        logged["hp_metric"] = logged["val/objective"]
        if self.trainer.state.fn == TrainerFn.FITTING:
            logged["step"] = torch.tensor(float(self.collector.ticks))  # the loggers' x-axis
        logged = {name: value.to(self.device) for name, value in logged.items()}  # NCCL reduces nothing on the CPU
        self.log_dict(logged, batch_size=1, sync_dist=self.ranks.world > 1)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Compare the policy with baselines on fresh hosts and test data; see `EvaluationConfig`."""
        folder = Path(self.trainer.log_dir or self.trainer.default_root_dir) / EVALUATION_FOLDER
        if self.trainer.is_global_zero:  # one process compares; the others wait for it
            with self._hosts(batch) as data:
                trained = LearnedController(self.policy, self.observation_norm, training_seed=data.seed)
                settings = {**self.hparams, **data.hparams}
                self.results = compare(self.evaluation, data, trained, folder=folder, settings=settings)
        self.ranks.wait_for_first()
        for task, result in self.results.items():
            prefix = f"test/{task}/" if len(self.results) > 1 else "test/"
            means = result.reference.mean_metrics() | {
                name: float(result.reference.values(name).mean()) for name in ("objective", "score")
            }
            logged = {f"{prefix}{name}": mean for name, mean in means.items() if isfinite(mean)}
            self.log_dict(logged, batch_size=1, rank_zero_only=True)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add what a resumed run must share (its identity), and what builds the policy before its weights are loaded.

        Raises DivergedError if the policy is not finite.
        """
        data = attached_data(self.trainer)
        assert self.policy_shape is not None, "it was built"
        checkpoint[SCHEMA_KEY], checkpoint[IDENTITY_KEY] = SCHEMA, self._identity(data)
        checkpoint[MODULE_KEY] = {"shape": self.policy_shape.state_dict(), "seed": data.seed}
        if isinstance(data, HostPoolData):
            checkpoint[RULES_KEY] = data.growth_rules()
        check_finite(checkpoint)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Check that a checkpoint fits this run, and adapt it where it may differ. Raises ValueError if it does not."""
        check_policy(checkpoint)
        if self.policy_shape is None:  # `load_from_checkpoint`: there is no run to fit
            self.build(PolicyShape.from_state_dict(checkpoint[MODULE_KEY]["shape"]))
            return
        data = attached_data(self.trainer)
        check_identity(checkpoint[IDENTITY_KEY], self._identity(data))
        print_status(*differences(checkpoint.get(DATA_SETTINGS_KEY, {}), getattr(data, "hparams", {}), "data."))
        if self.trainer.state.fn != TrainerFn.FITTING:
            return
        if "RolloutState" not in checkpoint.get("callbacks", {}) or not checkpoint.get("optimizer_states"):
            raise ValueError(
                "the checkpoint lacks optimizer_states or the state of esper_lightning.callbacks.RolloutState, so it "
                "was not saved by a full run; give another one"
            )
        check_identity({"data.seed": checkpoint[MODULE_KEY].get("seed")}, {"data.seed": data.seed})
        data.adapt_checkpoint(checkpoint)
        # Lightning would restore the optimizer's old settings with its state.
        fresh = self.configure_optimizers().state_dict()["param_groups"]
        for group, settings in zip(checkpoint["optimizer_states"][0]["param_groups"], fresh, strict=True):
            group.update(settings)
        print_status(*differences(checkpoint[HYPER_PARAMETERS_KEY], self.hparams, "model."))

    def _identity(self, data: PolicyData) -> dict[str, Any]:
        """Return the properties that a resumed run must share with the saved one, by setting name."""
        policy = {f"model.policy.{name}": value for name, value in asdict(self.policy_config).items()}
        return data.resume_identity() | policy | {"model.ppo.normalize_rewards": self.ppo.normalize_rewards}


def skip_unless(finite: Tensor, optimizer: torch.optim.Optimizer) -> None:
    """Make the optimizer's next step change nothing, unless `finite` [] bool is True.

    A fused optimizer reads the flag on the device; any other one steps no parameter that has no gradient.
    """
    if optimizer.defaults.get("fused"):
        fused: Any = optimizer  # torch does not declare these attributes, which its fused optimizers read
        fused.grad_scale, fused.found_inf = None, (~finite).float()
    elif not finite:
        optimizer.zero_grad(set_to_none=True)
