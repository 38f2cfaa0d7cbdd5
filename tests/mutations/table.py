"""The table of all defects."""

from tests.mutations import (
    checkpoints,
    doors,
    endings,
    evaluation,
    execution,
    findings,
    governor,
    grow,
    growth,
    gym,
    plugins,
    ppo,
    ranks,
    sets,
    trust,
)

DEFECTS = (
    *findings.DEFECTS,
    *growth.DEFECTS,
    *grow.DEFECTS,
    *gym.DEFECTS,
    *ppo.DEFECTS,
    *sets.DEFECTS,
    *execution.DEFECTS,
    *evaluation.DEFECTS,
    *governor.DEFECTS,
    *checkpoints.DEFECTS,
    *trust.DEFECTS,
    *plugins.DEFECTS,
    *endings.DEFECTS,
    *ranks.DEFECTS,
    *doors.DEFECTS,
)
