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
    plugins,
    ppo,
    trust,
)

DEFECTS = (
    *findings.DEFECTS,
    *growth.DEFECTS,
    *grow.DEFECTS,
    *ppo.DEFECTS,
    *execution.DEFECTS,
    *evaluation.DEFECTS,
    *governor.DEFECTS,
    *checkpoints.DEFECTS,
    *trust.DEFECTS,
    *plugins.DEFECTS,
    *endings.DEFECTS,
    *doors.DEFECTS,
)
