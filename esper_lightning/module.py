"""The policy and its PPO update as a LightningModule with manual optimization."""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from lightning import Callback, LightningModule
from torch import nn
from torchmetrics import ExplainedVariance, MeanSquaredError, MetricCollection

from esper_lightning.checkpointing.validate import (
    MODULE_KEY,
    RULES_KEY,
    UPDATED_KEY,
    check_policy,
    checkpoint_errors,
    open_checkpoint,
    write_identity,
)
from esper_lightning.console import print_status
from esper_lightning.controllers.learned import LearnedController
from esper_lightning.datamodules.hosts import PolicyData
from esper_lightning.envs.spaces.rows import RowSizes
from esper_lightning.envs.step_result import LOGGED_METRICS
from esper_lightning.ppo.collector import RolloutCollector, RolloutSummary
from esper_lightning.ppo.guard import check_change, count_skips, is_finite_step, skip_unless
from esper_lightning.ppo.losses import (
    LARGEST_SETTING,
    PPOConfig,
    PPOTerms,
    empty_terms,
    ppo_terms,
    terms_over_ranks,
    update_metrics,
)
from esper_lightning.ppo.rollout_buffer import Rollout
from esper_lightning.ppo.running_norm import RowNorm, RunningMeanStd
from esper_lightning.ranks import ALONE
from esper_lightning.serialization.checks import check_weights, load_settings
from esper_lightning.serialization.safe_load import CPU
from esper_lightning.tamiyo.policy import PolicyConfig, PolicyShape, policy_shape, use_ieee_float32
from esper_lightning.tamiyo.set_policy import make_policy

MONITORED_METRICS = (
    *(f"rollout/{name}" for name in ("return", *LOGGED_METRICS)),
    "train/explained_variance",
    "train/value_error",
)
"""Metrics of a rollout of hosts that checkpoints and early stopping can monitor."""


@dataclass(frozen=True, kw_only=True)
class NormalizeConfig:
    """Running normalisation of observations and rewards."""

    observations: bool = True
    """Normalise features by their running mean and standard deviation."""

    momentum: float | None = None
    """Weight of the previous statistics at the update after a rollout. None: all observations so far count equally."""

    clip: float = 10.0
    """Normalised features are clipped to this absolute value."""

    rewards: bool = False
    """Divide rewards by the running standard deviation of the discounted sum of rewards. Advantages and value targets
    are normalised anyway, so this changes only the meaning of model.ppo.advantage_floor."""

    def __post_init__(self) -> None:
        if self.momentum is not None and not 0.0 < self.momentum < 1.0:
            raise ValueError(f"normalize.momentum must lie in (0, 1), got {self.momentum}")
        if not 0.0 < self.clip <= LARGEST_SETTING:
            raise ValueError(f"normalize.clip must be positive and at most {LARGEST_SETTING:g}, got {self.clip}")


def attached_data(trainer: Any) -> PolicyData:
    """Return the data module of a trainer, which Lightning sets without declaring it."""
    return trainer.datamodule


def attached_callbacks(trainer: Any) -> list[Callback]:
    """Return the callbacks of a trainer, which Lightning sets without declaring them."""
    return trainer.callbacks


class UpdateReport(NamedTuple):
    """Report of one PPO update, for callbacks."""

    summary: RolloutSummary
    metrics: dict[str, float]
    """Metrics of the update, by name."""
    ratios: list[torch.Tensor]
    """Probability ratios of the last epoch over the rollout, one tensor per minibatch that was used; NaN at steps with
    a forced action."""


class TamiyoModule(LightningModule):
    """LightningModule that trains Tamiyo, or a policy for any other vector environment, with PPO.

    A Lightning batch is one environment step of all hosts, or a whole rollout where steps are short. An epoch is one
    rollout and one PPO update.

    Args:
        policy: Architecture and size of the policy.
        ppo: Settings of PPO.
        normalize: Settings of observation normalisation.
    """

    def __init__(
        self,
        policy: PolicyConfig = PolicyConfig(),
        ppo: PPOConfig = PPOConfig(),
        normalize: NormalizeConfig = NormalizeConfig(),
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.policy_config = policy
        self.ppo = ppo
        self.normalize = normalize
        self.terms_of = ppo_terms
        self.ranks = ALONE
        self.report: UpdateReport | None = None  # report of the last update in this process
        self.scored: dict[str, torch.Tensor] | None = None  # state_dict that played the last rollout of this process
        self.means: dict[str, Any] = {}  # means over all environments at the end of the last rollout of this process
        self.saves_scored = False  # True while a checkpoint is saved that was chosen by the score of a rollout
        self.skips_in_a_row = 0  # minibatches skipped at the end of the last update
        # Of one rollout: updated once, from the complete rollout, so that a resumed run has the same values.
        self.critic_metrics = MetricCollection(
            {"explained_variance": ExplainedVariance(), "value_error": MeanSquaredError(squared=False)},
            prefix="train/",
        )

    @classmethod
    def load_from_checkpoint(  # pyright: ignore[reportIncompatibleMethodOverride]  # a checkpoint holds all settings
        cls, checkpoint_path: str | Path, map_location: torch.device | str = CPU
    ) -> Self:
        """Return a trained module with the settings in its checkpoint. It needs no Trainer and no environments.

        Args:
            checkpoint_path: File that a Trainer saved during `fit`, with hosts or with any other environments. One
                with the weights alone suffices.
            map_location: Device of the module.

        Raises ValueError, in one line, if the file is damaged or not from this package.
        """
        checkpoint = open_checkpoint(checkpoint_path, check_policy)
        with checkpoint_errors(checkpoint_path, "loaded"):
            return cls.from_checkpoint(checkpoint).to(map_location)

    @classmethod
    def from_checkpoint(cls, checkpoint: Mapping[str, Any]) -> Self:
        """Return the module in the content of a checkpoint; it shares the tensors of the weights.

        Raises ValueError, RuntimeError, LookupError or TypeError if its settings or weights are damaged.
        """
        saved, weights = checkpoint[MODULE_KEY], checkpoint["state_dict"]
        module = cls(**{name: load_settings(kind, saved[name]) for name, kind in SETTINGS_TYPES.items()})
        with torch.device("meta"):  # a damaged size must not allocate memory
            module.build(PolicyShape.from_state_dict(saved["shape"]))
        check_weights(module, weights)
        module.load_state_dict(weights, assign=True)
        return module

    def check(self, data: PolicyData) -> None:
        """Raise ValueError if the module's settings do not fit the environments."""
        sequences_per_env = data.horizon // (
            self.ppo.sequence or data.horizon
        )  # RolloutBuffer requires whole sequences
        if self.ppo.minibatches > data.n_envs * sequences_per_env:
            available = (
                f"{data.n_envs} environments"
                if sequences_per_env == 1
                else f"{data.n_envs * sequences_per_env} sequences"
            )
            raise ValueError(
                f"model.ppo.minibatches is {self.ppo.minibatches}, more than the {available} they are "
                f"made of; lower it or raise data.n_envs"
            )
        self.ppo.check_heads(data.heads)

    def setup(self, stage: str) -> None:
        self.build_for(attached_data(self.trainer))

    def build_for(self, data: PolicyData) -> None:
        """Build the policy for the shapes of the environments. They stay outside: this module must not train hosts."""
        self.check(data)
        self.build(policy_shape(data.pool))

    def build(self, shape: PolicyShape) -> None:
        """Build the policy and its normalisers.

        Raises ValueError if the critic needs privileged features and there are none, or if the settings do not fit the
        action heads.
        """
        use_ieee_float32()
        self.policy_shape = shape
        self.policy = make_policy(shape, self.policy_config)
        self.observation_norm = self._make_norm(shape.features if shape.rows is None else shape.rows)
        self.value_norm = RunningMeanStd((), clip=float("inf"))
        self.privileged_norm = self._make_norm(shape.privileged) if self.policy_config.asymmetric else None
        self.reward_norm = RunningMeanStd((), clip=float("inf")) if self.normalize.rewards else None

    def _make_norm(self, features: int | RowSizes) -> nn.Module:
        settings = self.normalize
        if not settings.observations:
            return nn.Identity()
        if isinstance(features, RowSizes):
            return RowNorm(features, momentum=settings.momentum, clip=settings.clip)
        return RunningMeanStd((features,), settings.momentum, settings.clip)

    def on_fit_start(self) -> None:
        if not any(callback.state_key == "RolloutState" for callback in attached_callbacks(self.trainer)):
            raise ValueError("the callback RolloutState is missing: without it a run cannot be resumed; add it")
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

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # On a GPU only a fused optimizer can skip a step without a transfer; one whose gradients are scaled unscales
        # them itself, after they are clipped.
        fused = self.device.type == "cuda" and self.trainer.scaler is None
        return torch.optim.Adam(
            self.policy.parameters(), lr=self.ppo.lr.at(0.0), eps=self.ppo.adam_eps, fused=fused or None
        )

    def training_step(self, tick: int, batch_idx: int) -> None:
        # The trainer's autocast must not reach hosts or policy: the probability ratio would no longer start at 1.
        with torch.autocast(self.device.type, enabled=False):
            if batch_idx == 0:
                self.collector.reset()
            for _ in range(int(self.collector.buffer.ticks // self.trainer.num_training_batches)):
                self.collector.step()
            step = self.collector.last_step
            if self.trainer.is_last_batch:
                with self.collector.pool.clock.measure("update"):
                    self.scored = OrderedDict((name, part.clone()) for name, part in self.state_dict().items())
                    self.update(*self.collector.finish())
        self.log_dict(step.log, prog_bar=True, logger=False)

    def update(self, rollout: Rollout, summary: RolloutSummary) -> None:
        """Run one PPO update on a rollout and store its report.

        A minibatch whose loss or gradient is not finite is skipped. Raises DivergedError after three in a row, or if
        the policy's weights are not finite at the end.
        """
        assert self.trainer.max_epochs is not None, "Lightning has put its default there"
        progress = self.trainer.current_epoch / max(1, self.trainer.max_epochs - 1)  # 0 in a run of one rollout
        optimizer = self.optimizers()
        assert not isinstance(optimizer, list), "there is one"
        for group in optimizer.param_groups:
            group["lr"] = self.ppo.lr.at(progress)
        entropy_coefficient = self.ppo.entropy.at(progress)
        value_coefficient = self.ppo.value_coefficient_at(self.trainer.current_epoch)
        before = nn.utils.parameters_to_vector(self.policy.parameters()).detach().clone()
        minibatch_terms: list[PPOTerms] = []
        self.grad_norms: list[torch.Tensor] = []
        self.finite: list[torch.Tensor] = []  # [] bool for each minibatch: False if it was skipped
        generator, places = self.collector.generator, summary.places
        for minibatch in rollout.minibatches(self.ppo.epochs, self.ppo.minibatches, generator, places=places):
            terms = self._terms_over_ranks(minibatch)
            minibatch_terms.append(PPOTerms(*(term.detach() for term in terms)))
            # Reading the KL costs a device synchronisation; without it an update could diverge unnoticed.
            if self.ppo.target_kl is not None and terms.kl.item() > self.ppo.kl_slack * self.ppo.target_kl:
                break
            optimizer.zero_grad()
            self.loss = terms.total(value_coefficient, entropy_coefficient)
            self.manual_backward(self.loss)
            optimizer.step()
        finite = torch.stack(self.finite).tolist() if self.finite else []
        self.skips_in_a_row = count_skips(finite, self.skips_in_a_row)
        after = nn.utils.parameters_to_vector(self.policy.parameters()).detach()
        weight_change = (torch.linalg.vector_norm(after - before) / torch.linalg.vector_norm(before)).item()
        check_change(weight_change)
        rewards = {} if summary.reward_deviation is None else {"reward_deviation": summary.reward_deviation}
        metrics = update_metrics(minibatch_terms, self.grad_norms, self.policy.heads.sizes, finite=finite) | {
            **rewards,
            "skipped": float(finite.count(False)),
            "left_out": float(summary.left_out),
            "weight_change": weight_change,
            **self.measure_critic(summary.values, summary.value_targets),
            "advantage_spread": summary.advantage_spread,
            "lr": self.ppo.lr.at(progress),
            "entropy_coefficient": entropy_coefficient,
            "value_coefficient": value_coefficient,
        }
        last_pass = (len(minibatch_terms) - 1) // self.ppo.minibatches * self.ppo.minibatches
        if summary.left_out:
            print_status(
                f"{summary.left_out} of {summary.left_out + len(summary.returns)} environments are left out of update "
                f"{self.trainer.current_epoch + 1}: {summary.defect}"
            )
        if not all(finite):
            print_status(
                f"{finite.count(False)} of {len(finite)} minibatches of update {self.trainer.current_epoch + 1} were "
                f"skipped: their loss or gradient is not finite"
            )
        self.report = UpdateReport(summary, metrics, [terms.ratio for terms in minibatch_terms[last_pass:]])
        self.log_dict(self.critic_metrics, on_step=False, on_epoch=True, logger=False)
        # Metrics for checkpoints and early stopping; logged once per rollout, so they are right after a resume, too.
        self.means = {"return": summary.returns.mean(), **self._log_over_ranks()}
        self.log_dict({f"rollout/{name}": value for name, value in self.means.items()}, logger=False)

    def _log_over_ranks(self) -> Mapping[str, Any]:
        """Return the scalars to log of the last step: means over the environments of all ranks."""
        log, ranks = self.collector.last_step.log, self.ranks
        if ranks.world == 1:
            return log
        means = ranks.sum(torch.stack([torch.as_tensor(value, dtype=torch.float64) for value in log.values()]))
        return dict(zip(log, means / ranks.world, strict=True))

    def _terms_over_ranks(self, minibatch: Rollout) -> PPOTerms:
        """Return the terms of a minibatch of all ranks, given this rank's part of it, which may be empty."""
        is_empty = minibatch.log_prob.shape[1] == 0
        own = empty_terms(self.policy, minibatch) if is_empty else self.terms_of(self.policy, minibatch, self.ppo)
        return terms_over_ranks(own, list(self.policy.heads.tables), self.ppo, ranks=self.ranks)

    def measure_critic(self, values: torch.Tensor, targets: torch.Tensor) -> dict[str, float]:
        """Return the metrics of the critic on one rollout, by name.

        Args:
            values: Values [steps] that the critic estimated.
            targets: Returns [steps] that they should equal.
        """
        # Both metrics depend on differences alone. Torchmetrics subtracts a squared mean from a mean of squares, which
        # would cancel in float32 if the mean of the returns were not removed first.
        offset = targets.mean() if self.ranks.world == 1 else self.ranks.moments(targets).mean
        self.critic_metrics.reset()
        self.critic_metrics.update(values - offset, targets - offset)
        found = self.critic_metrics.compute()
        return {name.removeprefix("train/"): value.item() for name, value in found.items()}

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Clip gradients and skip a step that is not finite; in this hook gradients are unscaled in every precision."""
        self.grad_norms.append(nn.utils.clip_grad_norm_(self.policy.parameters(), self.ppo.max_grad_norm))
        self.finite.append(is_finite_step(self.loss, self.grad_norms[-1]))
        skip_unless(self.finite[-1], optimizer)

    def controller(self) -> LearnedController:
        """Return a controller that plays the current policy greedily."""
        return LearnedController(self.policy, self.observation_norm)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        settings = {"policy": self.policy_config, "ppo": self.ppo, "normalize": self.normalize}
        module = {name: asdict(part) for name, part in settings.items()} | {"shape": self.policy_shape.state_dict()}
        data = attached_data(self.trainer)
        write_identity(checkpoint, run_identity(self, data), module)
        if (rules := data.growth_rules()) is not None:
            checkpoint[RULES_KEY] = rules
        if self.saves_scored and self.scored is not None:
            checkpoint[UPDATED_KEY] = checkpoint["state_dict"]
            checkpoint["state_dict"] = self.scored

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if UPDATED_KEY in checkpoint:
            checkpoint["state_dict"] = checkpoint[UPDATED_KEY]
        attached_data(self.trainer).adapt_checkpoint(checkpoint)


SETTINGS_TYPES = {"policy": PolicyConfig, "ppo": PPOConfig, "normalize": NormalizeConfig}
"""Types of the settings of `TamiyoModule`, by argument."""

POLICY_IDENTITY_SETTINGS = ("width", "blueprint_embedding", "memory", "asymmetric", "probability_floors")
NORMALIZE_IDENTITY_SETTINGS = ("observations", "momentum", "rewards")
"""Names of the settings that determine the weights of a checkpoint and their meaning."""


def run_identity(module: TamiyoModule, data: PolicyData) -> dict[str, Any]:
    """Return the properties that a resumed run must share with the saved one, by setting name."""
    return (
        data.identity()
        | {f"model.policy.{name}": getattr(module.policy_config, name) for name in POLICY_IDENTITY_SETTINGS}
        | {f"model.normalize.{name}": getattr(module.normalize, name) for name in NORMALIZE_IDENTITY_SETTINGS}
    )
