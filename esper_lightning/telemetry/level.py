"""Level of detail of telemetry: as configured, and raised to debug for a while after an anomaly."""

from typing import Literal, get_args

Level = Literal["off", "minimal", "normal", "debug"]
LEVELS: tuple[Level, ...] = get_args(Level)


class DetailLevel:
    """Level of detail as a function of the tick.

    Args:
        level: Configured level.
        ticks: Environment steps for which an anomaly raises the level to debug.
    """

    def __init__(self, level: Level, ticks: int) -> None:
        self.level: Level = level
        self.ticks = ticks
        self.raised_since = self.raised_until = 0  # the level is raised in the ticks (since, until]

    def level_at(self, tick: int) -> Level:
        """Return the level in force at `tick`."""
        return "debug" if self.is_raised(tick) else self.level

    def is_raised(self, tick: int) -> bool:
        """Return True if the level at `tick` is higher than the configured one."""
        return self.raised_since < tick <= self.raised_until and self.level not in ("off", "debug")

    def includes(self, level: Level, tick: int) -> bool:
        """Return True if telemetry of `level` is due at `tick`."""
        return LEVELS.index(self.level_at(tick)) >= LEVELS.index(level)

    def raise_level(self, tick: int) -> None:
        """Raise the level to debug from the next tick on, for the configured number of ticks."""
        if not self.is_raised(tick):
            self.raised_since = tick
        self.raised_until = tick + self.ticks

    def state_dict(self) -> list[int]:
        return [self.raised_since, self.raised_until]

    def load_state_dict(self, state: list[int]) -> None:
        """Restore the state."""
        self.raised_since, self.raised_until = state

    def changes_after(self, tick: int) -> bool:
        """Return True if the level of the next tick differs from that of `tick`."""
        return self.is_raised(tick + 1) != self.is_raised(tick)
