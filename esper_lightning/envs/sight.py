"""Observations and action masks of a pool's environments. N environments, D features, K slots."""

from collections.abc import Sequence

import torch

from esper_lightning.envs.bench import Bench
from esper_lightning.envs.host_env import HostEnv
from esper_lightning.envs.masks import Legal, Masks, legal, make_masks
from esper_lightning.envs.observation import BLUEPRINTS, Observation, features, seed_number
from esper_lightning.envs.transfer import send


class Sight:
    """Builds observation, masks and privileged features of N environments, in tensors that are updated in place.

    Args:
        envs: Environments; the entries of the list may be replaced.
        bench: Factory of these environments.
        device: Device of observation and masks.

    Attributes:
        names: Names of the D observed features.
        observation: Observation of all environments.
        masks: Masks that a policy receives; all True under `masks: false`, except `ended`.
        masks_on_cpu: Masks of the possible actions, on the CPU.
        privileged: Hidden context variables of each episode, [N, P] float. None: nothing is hidden.
        refusals: Reasons of the lifecycle gates against stage changes of each seed, [N][K].
    """

    def __init__(self, envs: Sequence[HostEnv], bench: Bench, device: torch.device) -> None:
        self.envs = envs
        self.bench = bench
        self.device = device
        self.config = bench.config.sight
        names = list(features(envs[0]))
        *chosen, self.shows_blueprints = self.config.select([*names, BLUEPRINTS])
        self.columns = [i for i, shown in enumerate(chosen) if shown]
        self.names = [names[i] for i in self.columns]
        space, number = bench.space, len(envs)
        self.masks_on_cpu = make_masks(number, space, bench.growable)
        self.masks = Masks(*(mask.to(device) for mask in self.masks_on_cpu))
        if not self.config.masks:
            self.masks = Masks(*(torch.ones_like(mask, memory_format=torch.contiguous_format) for mask in self.masks))
        self.observation = Observation(
            features=torch.zeros(number, len(self.names), device=device),
            blueprints=torch.zeros(number, len(space.slot), dtype=torch.int64, device=device),
        )
        self.privileged = torch.zeros(number, bench.secrets, device=device) if bench.secrets else None

    def look(self) -> None:
        """Update observation, masks and refusals from the environments."""
        envs, config = self.envs, self.bench.config
        self.refusals = [env.growing.refusals() for env in envs]
        rows = zip(
            *(
                legal(env.growing, refusals, self.bench.space, config.actions, env.ended)
                for env, refusals in zip(envs, self.refusals, strict=True)
            ),
            strict=True,
        )
        for name, row in zip(Legal._fields, rows, strict=True):
            known = getattr(self.masks_on_cpu, name)
            known.copy_(torch.tensor(row))
            if self.config.masks or name == "ended":
                getattr(self.masks, name).copy_(send(known, self.device))
        seen = [list(features(env).values()) for env in envs]
        table = torch.tensor([[row[i] for i in self.columns] for row in seen])
        self.observation.features.copy_(send(table, self.device))
        if self.shows_blueprints:
            seeds = torch.tensor([[seed_number(env, slot.blueprint) for slot in env.slots] for env in envs])
            self.observation.blueprints.copy_(send(seeds, self.device))

    def tell(self) -> None:
        """Update the privileged features, at the start of episodes."""
        if self.privileged is not None:
            told = torch.tensor([self.bench.tell(env) for env in self.envs])
            self.privileged.copy_(send(told, self.device))

    def possible(self, decisions: Sequence[tuple[int, ...]], nothing: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Return the actions with impossible ones replaced by `nothing`; all unchanged if the policy's masks are on."""
        if self.config.masks:
            return list(decisions)
        return [row if self.masks_on_cpu.allow(i, row) else nothing for i, row in enumerate(decisions)]
