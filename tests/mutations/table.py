"""The table of all defects."""

from tests.mutations import (
    checkpoints,
    endings,
    evaluation,
    execution,
    findings,
    governor,
    grow,
    growth,
    plugins,
    ppo,
    sets,
    trust,
)

DEFECTS = (
    *findings.DEFECTS,
    *growth.DEFECTS,
    *grow.DEFECTS,
    *ppo.DEFECTS,
    *sets.DEFECTS,
    *execution.DEFECTS,
    *evaluation.DEFECTS,
    *governor.DEFECTS,
    *checkpoints.DEFECTS,
    *trust.DEFECTS,
    *plugins.DEFECTS,
    *endings.DEFECTS,
)
