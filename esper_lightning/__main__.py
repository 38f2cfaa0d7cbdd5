"""Entry point of `esper-lightning` and `python -m esper_lightning`."""

import sys
import traceback
from pathlib import Path

from esper_lightning.runtime.console import quieter_lightning


@quieter_lightning()
def main(args: list[str] | None = None) -> None:
    """Run the command line with `args`, by default those of the process.

    A wrong setting is one line on stderr and exit code 2, a policy that is not finite one line and exit code 3. Every
    other error, also one of the user's code, is a traceback.
    """
    if str(Path.cwd()) not in sys.path:
        # So that a config can name the user's own modules; last, so that it hides no package.
        sys.path.append(str(Path.cwd()))

    from esper_lightning.cli.commands import run  # imported late: importing torch and Lightning takes seconds
    from esper_lightning.runtime.checkpoint import DivergedError

    try:
        run(sys.argv[1:] if args is None else args)
    except (ValueError, RuntimeError, DivergedError) as error:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        # By the module's name: the folder of callbacks is a link, whose files lie elsewhere.
        is_ours = frame.f_globals.get("__name__", "").partition(".")[0] == "esper_lightning"
        # torch's own report of the weights that a checkpoint lacks, or has beside those of the policy
        is_about_weights = str(error).startswith("Error(s) in loading state_dict")
        is_users_mistake = is_about_weights or (is_ours and isinstance(error, ValueError))
        if not is_users_mistake and not isinstance(error, DivergedError):
            raise
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(3 if isinstance(error, DivergedError) else 2) from None


if __name__ == "__main__":
    main()
