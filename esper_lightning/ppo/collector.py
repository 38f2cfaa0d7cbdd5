"""Collection of rollouts: the policy acts in the environments, and each step is recorded for PPO.

T environment steps per rollout, N environments.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from esper_lightning.envs.vector_env import TRAINING, VectorEnv, episode_rng_seeds
from esper_lightning.ppo.losses import PPOConfig, discounted_sums, gae, normalise
from esper_lightning.ppo.policy import Policy, RecurrentState
from esper_lightning.ppo.rollout_buffer import Rollout, RolloutBuffer, Steps
from esper_lightning.ppo.running_norm import ObservationNorm, RunningMeanStd
from esper_lightning.runtime.console import DivergedError
from esper_lightning.runtime.nested import map_tensors
from esper_lightning.runtime.ranks import Ranks
from esper_lightning.runtime.serialization import check_generator_state

LARGEST_NUMBER = 1e15
"""Largest absolute reward, return or feature to learn from: the sum of the squares of 10⁸ of them fits in float32."""

REWARD = "the reward"


def is_usable(record: Tensor) -> Tensor:  # [T, N, …] -> [T, N] bool
    """Return the steps whose numbers are all finite and at most `LARGEST_NUMBER`."""
    return (record.abs() <= LARGEST_NUMBER).reshape(*record.shape[:2], -1).all(-1)


class Defect(NamedTuple):
    """Number of a rollout that is not finite, or too large to learn from."""

    step: int
    name: str
    value: float


def first_defect(records: Mapping[str, Tensor], env: int) -> Defect | None:
    """Return the first unusable number of an environment in records [T, N, …] by name. None: all are usable."""
    defects = []
    for name, record in records.items():
        steps = (~is_usable(record)[:, env]).nonzero().flatten().tolist()
        if steps:
            values = record[steps[0], env].flatten()
            unusable = values[~(values.abs() <= LARGEST_NUMBER)]  # with NaN, which no comparison finds
            defects.append(Defect(steps[0], name, unusable[0].item()))
    return min(defects, key=lambda defect: defect.step, default=None)


class RolloutSummary(NamedTuple):
    """Statistics of one rollout before the update."""

    returns: Tensor  # [N] undiscounted sum of rewards per environment of all ranks; without those that are left out
    values: Tensor  # [steps] V(s_t) of this rank's steps that are learned from, in units of the return
    value_targets: Tensor  # [steps] returns that these values estimate
    advantages: Tensor  # [T, N] normalised; NaN where the action was forced
    usable: Tensor  # [N] bool: environments of all ranks that are learned from
    defect: str | None  # first number that is not finite or too large, of the first environment that is left out
    metrics: dict[str, float]  # environments left out, deviation of advantages, number by which rewards were divided


class UsableEnvs(NamedTuple):
    """Environments of a rollout whose numbers are all finite and not too large."""

    here: Tensor  # [N of this rank] bool
    everywhere: Tensor  # [N of all ranks] bool
    defect: str | None  # see `RolloutSummary`


class RolloutCollector:
    """Collects rollouts for PPO. A rollout is one episode of every host; with autoreset, T steps of each environment.

    Normalisers are frozen within a rollout and updated at its end. `reward_norm` holds the statistics of the discounted
    sum of rewards, by whose deviation rewards are divided. `run_rng_seed` determines episodes and exploration.
    """

    def __init__(
        self,
        pool: VectorEnv,
        policy: Policy,
        *,
        observation_norm: ObservationNorm,
        value_norm: RunningMeanStd,
        config: PPOConfig,
        run_rng_seed: int,
        privileged_norm: ObservationNorm | None = None,
        reward_norm: RunningMeanStd | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.pool = pool
        self.ranks = ranks or Ranks([pool.n_envs])
        self.policy = policy
        self.observation_norm = observation_norm
        self.value_norm = value_norm
        self.privileged_norm = privileged_norm if policy.asymmetric else None
        self.reward_norm = reward_norm
        self.config = config
        self.run_rng_seed = run_rng_seed
        self.episode = 0
        self.ticks = 0  # environment steps since the run began: the x-axis of every plot
        self.generator = torch.Generator(pool.device).manual_seed(run_rng_seed)  # exploration and minibatches
        self.buffer = RolloutBuffer(pool, policy, config.sequence)
        # Further records of the rollout [T, N, …]: features before normalisation, from which the normalisers learn, and
        # V of the last states of truncated episodes, which an autoreset hides from the next observation.
        self.raw_features = torch.zeros(pool.horizon, *pool.observation.features.shape, device=pool.device)
        self.raw_privileged = map_tensors(self.buffer.steps.privileged, torch.zeros_like)
        self.final_values = torch.zeros_like(self.buffer.steps.values) if pool.autoreset else None
        # Discounted sums of rewards after the last rollout [N], for episodes that continue in the next one. They are no
        # part of a checkpoint: hosts begin an episode with every rollout, other environments do so after a resume.
        self.discounted_sums = torch.zeros(pool.n_envs, device=pool.device)
        self.state = policy.initial_state(pool.n_envs)
        self.starts = torch.ones(pool.n_envs, dtype=torch.bool, device=pool.device)  # the next step resets the state
        self.has_reset = False  # in this process; environments with autoreset are reset only once
        self.last_step: Any = None  # result of the last step in this process, for the listeners
        self.reward_terms: dict[int, Mapping[str, Tensor]] = {}  # by step of the rollout, as far as this process knows
        self.listeners: list[Callable[[], None]] = []  # called after every step

    def reset(self) -> None:
        """Begin a rollout: reset the environments and the recurrent state, except under autoreset after the first."""
        if not (self.has_reset and self.pool.autoreset):
            rng_seeds = episode_rng_seeds(self.run_rng_seed, TRAINING, self.episode, n_envs=self.ranks.total)
            self.pool.reset(self.ranks.rows(rng_seeds))
            self.state = self.policy.initial_state(self.pool.n_envs)
            self.starts.fill_(True)
            self.has_reset = True
        self.episode += 1
        self.buffer.clear(self.state)
        self.reward_terms.clear()

    @torch.no_grad()
    def step(self) -> Any:
        """Choose one action per environment, take one environment step and record it. Returns the step's result."""
        pool, index, state = self.pool, self.buffer.length, self.state  # index of this step in the rollout
        with pool.clock.measure("policy"):
            # Copies, because the step overwrites the environments' observation.
            masks = map_tensors(pool.masks, torch.clone)
            observation, privileged = self._normalised(pool.observation, pool.privileged)
            hidden, self.state = self.policy.encode_step(observation, state, self.starts)
            distribution = self.policy.distribution(hidden, masks)
            values = self.policy.estimate_value(hidden, privileged)
            action = distribution.sample(self.generator, self.ranks)
            self.raw_features[index].copy_(pool.observation.features)
            if self.raw_privileged is not None:
                assert pool.privileged is not None
                self.raw_privileged[index].copy_(pool.privileged)
        with torch.enable_grad():
            step = pool.step(action)
        with pool.clock.measure("policy"):
            self.buffer.add(
                Steps(
                    observation=observation,
                    masks=masks,
                    values=values,
                    starts=self.starts,
                    privileged=privileged,
                    # The action as carried out: the Governor may have vetoed a part of the sampled one.
                    action=step.action,
                    log_prob=distribution.log_prob(step.action),
                    rewards=step.reward,
                    terminated=step.terminated,
                    truncated=step.truncated,
                ),
                state,
            )
            # Where an episode ended, the recurrent state must not leak into the next one.
            self.starts.copy_(step.terminated)
            if self.final_values is not None:
                self.starts.logical_or_(step.truncated)
                if step.final is not None:
                    final, privileged = step.final
                    final_values = self._estimate_value(final, privileged, starts=torch.zeros_like(self.starts))
                    self.final_values[index].copy_(final_values)
        self.ticks += 1
        self.last_step = step
        self.reward_terms[index] = step.terms
        for listener in self.listeners:
            listener()
        return step

    def _normalised(self, observation: Any, privileged: Tensor | None) -> tuple[Any, Tensor | None]:
        """Return observation and privileged features with normalised numbers. None: the critic gets no further ones."""
        features = self.observation_norm(observation.features)
        critic_features = None if self.privileged_norm is None else self.privileged_norm(privileged)
        return observation._replace(features=features), critic_features

    def _estimate_value(self, observation: Any, privileged: Tensor | None, *, starts: Tensor) -> Tensor:  # [N]
        """Return V of the states after the last actions in units of the return; `starts` [N] bool resets the memory."""
        observation, privileged = self._normalised(observation, privileged)
        hidden, _ = self.policy.encode_step(observation, self.state, starts)
        return self.value_norm.inverse(self.policy.estimate_value(hidden, privileged))

    @torch.no_grad()
    def finish(self) -> tuple[Rollout, RolloutSummary]:
        """Compute advantages and value targets of the full buffer, and update the normalisers for the next rollout.

        An environment with a number that is not finite or too large is left out. Raises DivergedError if all are.
        """
        buffer, steps, config, ranks = self.buffer, self.buffer.steps, self.config, self.ranks
        assert buffer.length == buffer.ticks, "the rollout is not finished"
        values = self.value_norm.inverse(steps.values)
        last_value = self._estimate_value(self.pool.observation, self.pool.privileged, starts=self.starts)
        next_values = torch.cat([values[1:], last_value[None]])
        terminated, truncated = steps.terminated, steps.truncated
        if self.final_values is not None:
            next_values = torch.where(truncated, self.final_values, next_values)
        elif config.horizon_is_end:
            terminated = terminated | truncated
        reward_unit = self._update_reward_norm()
        advantages, returns = gae(
            steps.rewards / reward_unit,
            values,
            next_values,
            terminated=terminated,
            truncated=truncated & ~terminated,
            gamma=config.gamma,
            lam=config.gae_lambda,
        )
        envs = self._find_usable_envs(values, returns, advantages)
        advantages, returns = torch.where(envs.here, advantages, 0.0), torch.where(envs.here, returns, 0.0)
        # Steps of a host whose episode ended before the horizon are padding.
        active, unforced = ~steps.masks.ended & envs.here, ~steps.masks.forced & envs.here
        advantages, spread = normalise(advantages, unforced, ranks=ranks)
        self.value_norm.update(returns[active], ranks)
        rollout = Rollout(steps, advantages, self.value_norm(returns), buffer.state)
        if buffer.sequence_length < buffer.ticks:
            rollout = rollout.split_sequences(buffer.sequence_length, buffer.sequence_states)
        # The rollout holds features normalised by the old statistics; the new ones apply from the next rollout on.
        for norm, raw in ((self.observation_norm, self.raw_features), (self.privileged_norm, self.raw_privileged)):
            if norm is not None and raw is not None:
                norm.update(raw[active], ranks)
        # A state that is not finite would stay so: at the start of an episode it is multiplied by 0.
        self.state = RecurrentState(*(tensor.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0) for tensor in self.state))
        metrics = {"left_out": float((~envs.everywhere).sum()), "advantage_spread": spread * float(reward_unit)}
        return rollout, RolloutSummary(
            returns=ranks.gather_rows(steps.rewards.sum(0))[envs.everywhere].cpu(),
            values=values[active] * reward_unit,
            value_targets=returns[active] * reward_unit,
            advantages=torch.where(unforced, advantages, torch.nan),
            usable=envs.everywhere,
            defect=envs.defect,
            metrics=metrics if self.reward_norm is None else metrics | {"reward_deviation": float(reward_unit)},
        )

    def _find_usable_envs(self, values: Tensor, returns: Tensor, advantages: Tensor) -> UsableEnvs:
        """Find the environments with usable numbers, given results [T, N]. Raises DivergedError if there are none."""
        steps, ranks = self.buffer.steps, self.ranks
        records = {
            REWARD: steps.rewards,
            "an observed feature": self.raw_features,
            **({} if self.raw_privileged is None else {"a privileged feature": self.raw_privileged}),
            "the policy's log-probability": steps.log_prob,
            "the critic's value": values,
        }
        results = {"the return": returns, "the advantage": advantages}  # to blame only if no record is the cause
        here = torch.stack([is_usable(record).all(0) for record in (records | results).values()]).all(0)
        everywhere, defect = ranks.gather_rows(here), None
        if not everywhere.all():
            own_defect = None if here.all() else self._describe_defect(records, results, env=int(here.int().argmin()))
            defect = next(text for text in ranks.gather_everywhere(own_defect) if text is not None)
        if not everywhere.any():
            raise DivergedError(
                f"no environment of the rollout can be learned from: {defect}; for a reward lower data.env.reward, "
                f"data.env.objective or Governor.rules.penalty, for a feature look at the environment, else lower "
                f"model.ppo.lr"
            )
        return UsableEnvs(here, everywhere, defect)

    def _update_reward_norm(self) -> Tensor | float:
        """Update the statistics of the discounted sum of rewards, and return the number by which rewards are divided.

        See https://arxiv.org/abs/2005.12729, appendix A.2. No mean is subtracted, which would reward or punish length.
        """
        if self.reward_norm is None:
            return 1.0
        steps = self.buffer.steps
        sums = discounted_sums(steps.rewards, self.discounted_sums, starts=steps.starts, gamma=self.config.gamma)
        usable = is_usable(steps.rewards).all(0)
        self.discounted_sums.copy_(torch.where(usable, sums[-1], 0.0))
        self.reward_norm.update(sums[~steps.masks.ended & usable], self.ranks)
        return self.reward_norm.deviation

    def _describe_defect(self, records: Mapping[str, Tensor], results: Mapping[str, Tensor], env: int) -> str:
        """Describe the first unusable number of one environment: `in environment 3 at step 7 the reward is nan`."""
        defect = first_defect(records, env) or first_defect(results, env)
        assert defect is not None, "the environment is left out"
        terms = self.reward_terms.get(defect.step, {}) if defect.name == REWARD else {}
        cause = first_defect({f"the reward term {name}": paid[None] for name, paid in terms.items()}, env) or defect
        return f"in environment {self.ranks.own[env]} at step {defect.step + 1} {cause.name} is {cause.value:g}"

    def state_dict(self) -> dict[str, Any]:
        """Return the collector's state, in types that `weights_only=True` accepts."""
        return {
            "episode": self.episode,
            "ticks": self.ticks,
            "generator": self.generator.get_state(),
            "state": [part.clone() for part in self.state],
            "starts": self.starts.clone(),
            "buffer": self.buffer.state_dict(),
            **{name: part[: self.buffer.length].clone() for name, part in self._unbuffered_tensors().items()},
        }

    def _unbuffered_tensors(self) -> dict[str, Tensor]:
        """Return the records of the rollout that the buffer does not hold, by their keys in a checkpoint."""
        names = ("raw_features", "raw_privileged", "final_values")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state of `state_dict`. After one without a rollout, see `move_to_device`, a new rollout begins."""
        self.episode, self.ticks = state["episode"], state["ticks"]
        self.generator.set_state(check_generator_state(state["generator"], self.generator))
        if "buffer" not in state:
            return
        self.state = RecurrentState(*(part.to(self.pool.device) for part in state["state"]))
        self.starts.copy_(state["starts"])
        self.buffer.load_state_dict(state["buffer"])
        for name, part in self._unbuffered_tensors().items():
            part[: self.buffer.length].copy_(state[name])
