"""`esper-lightning` and `python -m esper_lightning`."""

import logging
import warnings


def main(args: list[str] | None = None) -> None:
    """Runs the command line (None: that of the process); bad input ends it with one line and exit code 2."""
    # Advertisements and hints that have no meaning here must not bury what the run says.
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(lambda r: "Tip:" not in r.getMessage())
    warnings.filterwarnings("ignore", message=".*`isinstance\\(treespec, LeafSpec\\)`.*")  # Lightning's, about torch
    warnings.filterwarnings("ignore", message="Checkpoint directory .* exists and is not empty")  # it is on a resume

    from esper_lightning.cli import run  # imported late: torch and Lightning take seconds

    run(args)


if __name__ == "__main__":
    main()
