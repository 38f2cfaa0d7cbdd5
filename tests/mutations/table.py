"""The table of all defects."""

from tests.mutations import checkpoints, execution, findings, governor, growth, ppo

DEFECTS = (
    *findings.DEFECTS,
    *growth.DEFECTS,
    *ppo.DEFECTS,
    *execution.DEFECTS,
    *governor.DEFECTS,
    *checkpoints.DEFECTS,
)
