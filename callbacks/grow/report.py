"""Reports of a training that grows: lines on the terminal, metrics for loggers, and a file of events."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from lightning import Trainer

from esper_lightning.console import print_status
from esper_lightning.envs import HostEvent
from esper_lightning.envs.single_pool import SinglePool
from esper_lightning.growth import SeedEvent
from esper_lightning.growth.lifecycle import count_parameters
from esper_lightning.growth.stages import Stage
from esper_lightning.telemetry.events import SCHEMA, Contributed, Event, EventLog, Started
from esper_lightning.telemetry.hosts import seed_changes


def growth_metrics(
    pool: SinglePool, contributions: Mapping[str, float], potentials: Mapping[str, float]
) -> dict[str, float]:
    """Return the metrics of a network for loggers, by name."""
    slots = pool.subject.slots
    return {
        "growth/parameters": float(count_parameters(pool.subject.growing.module)),
        "growth/seeds": float(sum(slot.occupied for slot in slots)),
        "growth/fossilized": float(sum(slot.stage is Stage.FOSSILIZED for slot in slots)),
        **{f"growth/alpha.{slot.name}": float(slot.alpha_now) for slot in slots if slot.blended},
        **{f"growth/contribution.{name}": points for name, points in contributions.items()},
        **{f"growth/potential.{name}": points for name, points in potentials.items()},
    }


class GrowthReport:
    """Prints every change of a seed and records it in a file in the folder of the first logger, in the first process.

    Args:
        trainer: Trainer in a fit.
        pool: The network.
        unit: Unit of contributions.
        is_resumed: True if the training goes on; events after its present tick are then removed.
    """

    def __init__(self, trainer: Trainer, pool: SinglePool, *, unit: str, is_resumed: bool) -> None:
        self.pool, self.unit = pool, unit
        self.is_silent = not trainer.is_global_zero
        self._log: EventLog | None = None
        folder = getattr(trainer.logger, "log_dir", None)
        if folder is None or self.is_silent:
            return
        Path(folder).mkdir(parents=True, exist_ok=True)
        self._log, tick = EventLog(Path(folder) / "events.jsonl"), pool.subject.tick
        if is_resumed:
            self._log.discard_after(tick)
        space = pool.space
        self._log.write([Started(tick, SCHEMA, 1, pool.config.horizon, space.slot, space.blueprint)])

    def tell(self, changes: Sequence[SeedEvent], contributions: Mapping[str, float]) -> None:
        """Tell the changes and contributions of the present tick."""
        if self.is_silent:
            return
        tick = self.pool.subject.tick
        for change in changes:
            worth = "" if change.contribution is None else f", worth {change.contribution:+.1f} points"
            print_status(f"Grow, tick {tick}: {change}{worth}".replace(" points", f" {self.unit}"))
        if self._log is not None:
            events: list[Event] = seed_changes([HostEvent(0, tick, change) for change in changes], tick, [0])
            if contributions:
                hosts = [0] * len(contributions)
                events.append(Contributed(tick, hosts, list(contributions), list(contributions.values())))
            self._log.write(events)

    def tell_end(self, name: str) -> None:
        """Tell what has become of the network called `name`."""
        if not self.is_silent:
            subject = self.pool.subject
            total, host = count_parameters(subject.growing.module), subject.host_parameters
            kept = sum(slot.stage is Stage.FOSSILIZED for slot in subject.slots)
            live = sum(slot.live for slot in subject.slots)
            sizes = f"{total:,} parameters, {host:,} of them without seeds"
            print_status(f"Grow: {name} has {sizes}; seeds: {kept} kept, {live} open")

    def close(self) -> None:
        """Close the file of events."""
        if self._log is not None:
            self._log.close()
