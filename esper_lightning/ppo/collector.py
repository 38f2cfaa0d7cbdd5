"""Collection of rollouts: the policy acts in the environments, and each step is recorded for PPO.

T environment steps per rollout, N environments.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from esper_lightning.envs.seeding import TRAINING, episode_rng_seeds
from esper_lightning.envs.vector_env import FinalObservation, VectorEnv
from esper_lightning.errors import DivergedError
from esper_lightning.ppo.gae import discounted_sums, gae, normalise
from esper_lightning.ppo.guard import find_defect, usable_environments
from esper_lightning.ppo.losses import PPOConfig
from esper_lightning.ppo.rollout_buffer import Experience, Rollout, RolloutBuffer
from esper_lightning.ppo.running_norm import ObservationNorm, RunningMeanStd
from esper_lightning.ranks import Ranks
from esper_lightning.serialization.checks import (
    check_count,
    check_generator_state,
    check_index_range,
    check_keys,
    check_matching_tensor,
)
from esper_lightning.tamiyo.policy import Policy, RecurrentState

REWARD = "the reward"

REMEDY = (
    "for a reward lower data.env.reward, data.env.objective or Governor.rules.penalty, for a feature look at the "
    "environment, else lower model.ppo.lr"
)
"""Advice where no environment of a rollout can be learned from."""


def clone_record(record: Any) -> Any:
    """Return a copy of a record of tensors."""
    return type(record)(*(part.clone() for part in record))


class RolloutSummary(NamedTuple):
    """Statistics of one rollout before the update."""

    returns: Tensor  # [N] undiscounted sum of rewards per environment of all ranks; without those that are left out
    values: Tensor  # [steps] V(s_t) of this rank's steps that are learned from, in units of the return
    value_targets: Tensor  # [steps] returns that these values estimate
    advantage_spread: float
    """Standard deviation of advantages before normalisation."""
    advantages: Tensor  # [T, N] normalised; NaN where the action was forced
    places: Tensor | None = None
    """Indices of the sequences of all ranks in this rank's rollout; see `Rollout.minibatches`. None: one rank."""
    left_out: int = 0
    """Environments from which nothing is learned, because they have numbers that are not finite or too large."""
    defect: str | None = None
    """First such number of the first environment that is left out. None: no environment is left out."""
    reward_deviation: float | None = None
    """Number by which the rewards of the rollout were divided. None: rewards are not normalised."""


class RolloutCollector:
    """Collects rollouts for PPO. A rollout is one episode of every host; with autoreset, T steps of each environment.

    Args:
        pool: The environments.
        policy: Policy that acts. Its recurrent state is stored here between steps.
        observation_norm: Normaliser of observed features, frozen within a rollout and updated at its end.
        value_norm: Normaliser of values, frozen within a rollout and updated at its end.
        config: Settings of PPO.
        run_rng_seed: RNG seed of the run: determines the episodes and the exploration.
        privileged_norm: Normaliser of the critic's privileged features. None: they are not normalised.
        reward_norm: Statistics of the discounted sum of rewards, by whose standard deviation rewards are divided.
            None: rewards are not normalised.
        ranks: Processes that collect the rollout together; `pool` has the environments of this one. None: one process.
    """

    def __init__(
        self,
        pool: VectorEnv,
        policy: Policy,
        *,
        observation_norm: nn.Module,
        value_norm: RunningMeanStd,
        config: PPOConfig,
        run_rng_seed: int,
        privileged_norm: nn.Module | None = None,
        reward_norm: RunningMeanStd | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.pool = pool
        self.ranks = ranks or Ranks([pool.n_envs])
        assert len(self.ranks.own) == pool.n_envs, "the environments of this rank"
        self.policy = policy
        self.observation_norm = observation_norm
        self.value_norm = value_norm
        self.privileged_norm = (privileged_norm or nn.Identity()) if policy.asymmetric else None
        self.reward_norm = reward_norm
        self.config = config
        self.run_rng_seed = run_rng_seed
        self.episode = 0
        self.ticks = 0  # environment steps since the run began: the x-axis of every plot
        self.generator = torch.Generator(pool.device).manual_seed(run_rng_seed)  # exploration and minibatches
        self.buffer = RolloutBuffer(pool, policy, config.sequence)
        self.raw_features = torch.zeros(pool.horizon, *pool.observation.features.shape, device=pool.device)
        self.raw_privileged = None if self.buffer.privileged is None else torch.zeros_like(self.buffer.privileged)
        # V of the last states of truncated episodes, [T, N], which an autoreset hides from the next observation.
        self.final_values = torch.zeros_like(self.buffer.values) if pool.autoreset else None
        # Discounted sums of rewards after the last rollout [N], for episodes that continue in the next one. They are no
        # part of a checkpoint: hosts begin an episode with every rollout, other environments do so after a resume.
        self.discounted_sums = torch.zeros(pool.n_envs, device=pool.device)
        self.state = policy.initial_state(pool.n_envs)
        self.starts = torch.ones(pool.n_envs, dtype=torch.bool, device=pool.device)
        self.has_reset = False  # in this process; environments with autoreset are reset only once
        self.last_step: Any = None  # result of the last step in this process, for the listeners
        self.reward_terms: dict[int, Mapping[str, Tensor]] = {}  # by step of the rollout, as far as this process knows
        self.listeners: list[Callable[[], None]] = []  # called after every step

    def reset(self) -> None:
        """Begin a rollout: reset the environments and the recurrent state, except under autoreset after the first."""
        if not (self.has_reset and self.pool.autoreset):
            of_all = episode_rng_seeds(self.run_rng_seed, TRAINING, self.episode, n_envs=self.ranks.total)
            self.pool.reset(self.ranks.rows(of_all))
            self.state = self.policy.initial_state(self.pool.n_envs)
            self.starts.fill_(True)
            self.has_reset = True
        self.episode += 1
        self.buffer.clear(self.state)
        self.reward_terms.clear()

    @torch.no_grad()
    def step(self) -> Any:
        """Choose one action per environment, take one environment step and record it. Returns the step's result."""
        with self.pool.clock.measure("policy"):
            length = self.buffer.length
            # Copies, because the step overwrites the environments' observation.
            masks, privileged = clone_record(self.pool.masks), self._normalise_privileged(self.pool.privileged)
            observation, state = self._normalise_observation(clone_record(self.pool.observation)), self.state
            privileged = None if privileged is None else privileged.clone()
            distribution, values, self.state = self.policy.step(
                observation, state, masks, starts=self.starts, privileged=privileged
            )
            action = distribution.sample(self.generator, self.ranks)
            self.raw_features[length].copy_(self.pool.observation.features)
            if self.raw_privileged is not None:
                assert self.pool.privileged is not None
                self.raw_privileged[length].copy_(self.pool.privileged)
        with torch.enable_grad():
            step = self.pool.step(action)
        with self.pool.clock.measure("policy"):
            self.buffer.add(
                Experience(
                    observation=observation,
                    masks=masks,
                    # The action as carried out: the Governor may have vetoed a part of the sampled one.
                    action=step.action,
                    log_prob=distribution.log_prob(step.action),
                    values=values,
                    starts=self.starts,
                    state=state,
                    rewards=step.reward,
                    terminated=step.terminated,
                    truncated=step.truncated,
                    privileged=privileged,
                )
            )
            # Where an episode ended, the recurrent state must not leak into the next one.
            self.starts.copy_(step.terminated)
            if self.final_values is not None:
                self.starts.logical_or_(step.truncated)
                if step.final is not None:
                    self.final_values[length].copy_(self._final_values(step.final))
        self.ticks += 1
        self.last_step = step
        self.reward_terms[length] = step.terms
        for listener in self.listeners:
            listener()
        return step

    def _final_values(self, ended: FinalObservation) -> Tensor:  # [N]
        """Return V of the states after the last action, with the recurrent state after it."""
        no_starts = torch.zeros_like(self.starts)
        privileged = self._normalise_privileged(ended.privileged)
        return self.value_norm.inverse(
            self.policy.estimate_value(
                self._normalise_observation(ended.observation), self.state, no_starts, privileged=privileged
            )
        )

    def _normalise_observation(self, observation: Any) -> Any:
        """Return an observation with normalised features, as given to the policy and stored."""
        return observation._replace(features=self.observation_norm(observation.features))

    def _normalise_privileged(self, privileged: Tensor | None) -> Tensor | None:
        """Return normalised privileged features; None if the critic sees no more than the policy."""
        return None if self.privileged_norm is None else self.privileged_norm(privileged)

    @torch.no_grad()
    def finish(self) -> tuple[Rollout, RolloutSummary]:
        """Compute advantages and value targets of the full buffer, and update the normalisers for the next rollout.

        An environment with a number that is not finite or too large is left out. Raises DivergedError if all are.
        """
        buffer, config, ranks = self.buffer, self.config, self.ranks
        assert buffer.length == buffer.ticks, "the rollout is not finished"
        # V of the state after the last action, with the recurrent state after it.
        privileged = self._normalise_privileged(self.pool.privileged)
        last_value = self.policy.estimate_value(
            self._normalise_observation(self.pool.observation), self.state, self.starts, privileged=privileged
        )
        values = self.value_norm.inverse(buffer.values)
        next_values = torch.cat([values[1:], self.value_norm.inverse(last_value)[None]])
        terminated, truncated = buffer.terminated, buffer.truncated
        if self.final_values is not None:
            next_values = torch.where(truncated, self.final_values, next_values)
        elif config.horizon_is_end:
            terminated = terminated | truncated
        reward_deviation = self._update_reward_norm()
        advantages, returns = gae(
            buffer.rewards if reward_deviation is None else buffer.rewards / reward_deviation,
            values,
            next_values,
            terminated=terminated,
            truncated=truncated & ~terminated,
            gamma=config.gamma,
            lam=config.gae_lambda,
        )
        records = {REWARD: buffer.rewards, "an observed feature": self.raw_features}
        if self.raw_privileged is not None:
            records["a privileged feature"] = self.raw_privileged
        records |= {"the policy's log-probability": buffer.log_prob, "the critic's value": values}
        results = {"the return": returns, "the advantage": advantages}
        usable = usable_environments([*records.values(), *results.values()])
        usable_of_all = ranks.gather_rows(usable)
        left_out = int((~usable_of_all).sum())
        defect = None
        if left_out:
            own = None if usable.all() else self._describe_defect(records, results, env=int(usable.int().argmin()))
            defect = next(one for one in ranks.gather_everywhere(own) if one is not None)
        if left_out == len(usable_of_all):
            raise DivergedError(f"no environment of the rollout can be learned from: {defect}; {REMEDY}")
        advantages, returns = torch.where(usable, advantages, 0.0), torch.where(usable, returns, 0.0)
        # Steps of a host whose episode ended before the horizon are padding.
        active = ~buffer.masks.ended & usable
        unforced = ~buffer.masks.forced & usable
        normalised = normalise(advantages, unforced, config.advantage_floor, ranks=ranks)
        self.value_norm.update(returns[active], ranks)
        rollout = Rollout(
            observation=buffer.observation,
            masks=buffer.masks,
            action=buffer.action,
            log_prob=buffer.log_prob,
            values=buffer.values,
            starts=buffer.starts,
            state=buffer.state,
            advantages=normalised,
            targets=self.value_norm(returns),
            privileged=buffer.privileged,
        )
        sequence_states = buffer.sequence_states
        if left_out and not usable.all():
            rest = usable.nonzero().squeeze(1)
            rollout = rollout.select_envs(rest)
            if sequence_states is not None:
                sequence_states = RecurrentState(*(part[:, rest] for part in sequence_states))
        if isinstance(self.observation_norm, ObservationNorm):
            # The rollout holds features normalised by the old statistics; the new ones apply from the next rollout on.
            self.observation_norm.update(self.raw_features[active], ranks)
        if isinstance(self.privileged_norm, RunningMeanStd):
            assert self.raw_privileged is not None
            self.privileged_norm.update(self.raw_privileged[active], ranks)
        # A state that is not finite would stay so: at the start of an episode it is multiplied by 0.
        self.state = RecurrentState(*(part.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0) for part in self.state))
        if sequence_states is not None:
            rollout = rollout.split_sequences(buffer.sequence_length, sequence_states)
        reward_unit = 1.0 if reward_deviation is None else reward_deviation.item()
        return rollout, RolloutSummary(
            returns=ranks.gather_rows(buffer.rewards.sum(0))[usable_of_all].cpu(),
            values=values[active] * reward_unit,
            value_targets=returns[active] * reward_unit,
            advantage_spread=self._spread(advantages[unforced]) * reward_unit,
            advantages=torch.where(unforced, normalised, torch.nan),
            places=None if ranks.world == 1 else self._places(usable, usable_of_all),
            left_out=left_out,
            defect=defect,
            reward_deviation=None if reward_deviation is None else reward_unit,
        )

    def _spread(self, advantages: Tensor) -> float:
        """Return the standard deviation of advantages [steps] over all ranks; 0 without any."""
        if self.ranks.world > 1:
            return self.ranks.moments(advantages).variance.sqrt().item()
        return advantages.std(correction=0).item() if len(advantages) else 0.0

    def _places(self, usable: Tensor, usable_of_all: Tensor) -> Tensor:
        """Return for each training sequence of all ranks its index in this rank's rollout, or -1, int64.

        Args:
            usable: Environments of this rank that are learned from, [n] bool.
            usable_of_all: Environments of all ranks that are learned from, [N] bool.
        """
        own = torch.tensor(self.ranks.own, device=usable.device)[usable]
        places = usable.new_full((len(usable_of_all),), -1, dtype=torch.int64)
        places[own] = torch.arange(len(own), device=usable.device)
        places = places[usable_of_all]
        sequences = range(self.buffer.ticks // self.buffer.sequence_length)
        return torch.cat([torch.where(places < 0, -1, places + k * len(own)) for k in sequences])

    def _update_reward_norm(self) -> Tensor | None:
        """Update the statistics of the discounted sum of rewards, and return its standard deviation, a scalar.

        None: rewards are not normalised. As in Engstrom et al. 2020 (https://arxiv.org/abs/2005.12729, appendix A.2),
        the statistics include the rewards that are divided, and no mean is subtracted from rewards: that would reward
        or punish the length of an episode.
        """
        if self.reward_norm is None:
            return None
        buffer = self.buffer
        sums = discounted_sums(buffer.rewards, self.discounted_sums, starts=buffer.starts, gamma=self.config.gamma)
        usable = usable_environments([buffer.rewards])
        self.discounted_sums.copy_(torch.where(usable, sums[-1], 0.0))
        self.reward_norm.update(sums[~buffer.masks.ended & usable], self.ranks)
        return self.reward_norm.deviation

    def _describe_defect(self, records: Mapping[str, Tensor], results: Mapping[str, Tensor], env: int) -> str:
        """Describe the first unusable number of one environment: `in environment 3 at step 7 the reward is nan`.

        Args:
            records: Numbers of the rollout by name, [T, N, …] each.
            results: Numbers computed from them, which are named only if no record is the cause.
            env: Index of the environment.
        """
        found = find_defect(records, env) or find_defect(results, env)
        assert found is not None, "the environment is left out"
        terms = self.reward_terms.get(found.step, {}) if found.name == REWARD else {}
        culprit = find_defect({f"the reward term {name}": paid[None] for name, paid in terms.items()}, env) or found
        return f"in environment {self.ranks.own[env]} at step {found.step + 1} {culprit.name} is {culprit.value:g}"

    def state_dict(self) -> dict[str, Any]:
        """Return the collector's state, in types that `weights_only=True` accepts."""
        return {
            "episode": self.episode,
            "ticks": self.ticks,
            "generator": self.generator.get_state(),
            "state": [part.clone() for part in self.state],
            "starts": self.starts.clone(),
            "buffer": self.buffer.state_dict(),
            "raw_features": self.raw_features[: self.buffer.length].clone(),
            **{name: part[: self.buffer.length].clone() for name, part in self._optional_storage().items()},
        }

    def _optional_storage(self) -> dict[str, Tensor]:
        """Return the storage that exists only for some environments and policies, by its key in a checkpoint."""
        storage = {"raw_privileged": self.raw_privileged, "final_values": self.final_values}
        return {name: part for name, part in storage.items() if part is not None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state from `state_dict`; its tensors may be on another device.

        Numbers that are not finite are kept: `finish` leaves their environments out. Raises ValueError if the state
        belongs to another run, or is damaged.
        """
        parts = (
            "episode",
            "ticks",
            "generator",
            "state",
            "starts",
            "buffer",
            "raw_features",
            *self._optional_storage(),
        )
        check_keys("the rollout", state, parts)
        self.episode, self.ticks = check_count("episode", state["episode"]), check_count("ticks", state["ticks"])
        self.generator.set_state(check_generator_state("the generator's state", state["generator"], self.generator))
        parts = zip(RecurrentState._fields, state["state"], self.state, strict=True)
        self.state = RecurrentState(
            *(check_matching_tensor(name, part, current).to(current.device) for name, part, current in parts)
        )
        self.starts.copy_(check_matching_tensor("starts", state["starts"], self.starts))
        self.buffer.load_state_dict(state["buffer"])
        length = self.buffer.length
        self.raw_features[:length].copy_(
            check_matching_tensor("the observed features", state["raw_features"], self.raw_features[:length])
        )
        for name, part in self._optional_storage().items():
            part[:length].copy_(check_matching_tensor(name, state[name], part[:length]))
        for head, choices in self.pool.space.iter_heads(self.buffer.action):
            check_index_range("an action", head[:length], choices)
        # With an empty buffer the rollout may not have begun.
        begun_rollouts = {self.episode - 1, self.episode} if length == 0 else {self.episode - 1}
        if self.ticks not in {rollouts * self.buffer.ticks + length for rollouts in begun_rollouts}:
            raise ValueError(
                f"the rollout is at tick {length}, but {self.ticks} ticks and {self.episode} rollouts began"
            )
