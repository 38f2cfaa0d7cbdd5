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
    ranks,
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
    *ranks.DEFECTS,
)
