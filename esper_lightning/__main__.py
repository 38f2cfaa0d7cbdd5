"""`esper-lightning` and `python -m esper_lightning`."""

import logging
import warnings

CHATTER = ("Tip:", "GPU available", "TPU available", "Seed set to")
"""Lightning's advertisements and what the saved config says anyway: they would bury what a run has to say."""


def worth_saying(record: logging.LogRecord) -> bool:
    return not any(words in record.getMessage() for words in CHATTER)


def main(args: list[str] | None = None) -> None:
    """Runs the command line (None: that of the process); bad input ends it with one line and exit code 2."""
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.seed"):
        logging.getLogger(name).addFilter(worth_saying)
    warnings.filterwarnings("ignore", message=".*`isinstance\\(treespec, LeafSpec\\)`.*")  # Lightning's, about torch
    warnings.filterwarnings("ignore", message="Checkpoint directory .* exists and is not empty")  # it is on a resume

    from esper_lightning.cli import run  # imported late: torch and Lightning take seconds

    run(args)


if __name__ == "__main__":
    main()
