"""How closely telemetry looks: a level, which rises by itself for a while when something is wrong."""

from typing import Any, Literal, get_args

from esper_lightning.growth.restoring import check_count, check_numbers

Level = Literal["off", "minimal", "normal", "debug"]
LEVELS: tuple[Level, ...] = get_args(Level)


class Detail:
    """The level now.

    Args:
        level: As it was asked for.
        ticks: For how many ticks an anomaly raises it to debug.
    """

    def __init__(self, level: Level, ticks: int) -> None:
        self.level = level
        self.ticks = ticks
        self.since = self.until = 0  # ticks between which it is raised: after the first, up to the second

    def now(self, tick: int) -> Level:
        """In this tick."""
        return "debug" if self.raised(tick) else self.level

    def raised(self, tick: int) -> bool:
        """Is it higher in this tick than it was asked for?"""
        return self.since < tick <= self.until and self.level not in ("off", "debug")

    def includes(self, level: Level, tick: int) -> bool:
        """Is what belongs to `level` to be done in this tick?"""
        return LEVELS.index(self.now(tick)) >= LEVELS.index(level)

    def alarm(self, tick: int) -> None:
        """From the next tick on, for a while, look at everything."""
        if not self.raised(tick):
            self.since = tick
        self.until = tick + self.ticks

    def state_dict(self) -> list[int]:
        return [self.since, self.until]

    def load_state_dict(self, state: Any) -> None:
        """Raises ValueError if the state is damaged."""
        what = "since when and until when telemetry looks closer"
        self.since, self.until = (check_count(what, tick) for tick in check_numbers(what, state, 2))

    def changes(self, tick: int) -> bool:
        """Will the next tick be looked at otherwise than this one?"""
        return self.raised(tick + 1) != self.raised(tick)
