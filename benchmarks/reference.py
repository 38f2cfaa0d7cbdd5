"""Write the generated parts of the reference pages.

python -m benchmarks.reference          # writes docs/reference/telemetry.md
python -m benchmarks.reference --check  # names the pages that are not up to date, and exits with 1
"""

import argparse
import re
from pathlib import Path

from esper_lightning.telemetry.anomalies import RULES, Rule
from esper_lightning.telemetry.tensorboard import guide

PAGES = Path(__file__).parent.parent / "docs" / "reference"

GENERATED = re.compile(r"(<!-- generated: (\w+) -->\n\n).*?(\n\n<!-- end -->)", re.DOTALL)
"""Pattern of the generated parts of a page."""


def rule_row(rule: Rule) -> str:
    """Return an anomaly rule as a row of the table."""
    bound = "see below" if callable(rule.bound) else f"{rule.bound:g}"
    named = ", ".join(f"`{name}`" for name in rule.settings)
    cause = rule.cause.format(what="`…`")
    return f"| `{rule.name}` | `{rule.metric}` | {rule.side} {bound} | {rule.updates} | {cause} | {named} |"


def all_rules() -> str:
    """Return the table of anomaly rules."""
    head = "| anomaly | metric | out of bounds | updates | likely cause | look at |\n|---|---|---|---|---|---|"
    return "\n".join([head, *map(rule_row, RULES)])


GENERATORS = {"plots": guide, "rules": all_rules}
"""Function that generates each kind of part."""


def updated(text: str) -> str:
    """Return the text of a page with its generated parts replaced by new ones."""
    return GENERATED.sub(lambda part: part[1] + GENERATORS[part[2]]() + part[3], text)


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, exit with 1 if a page is not up to date")
    check = parser.parse_args(args).check
    outdated = []
    for page in sorted(PAGES.glob("*.md")):
        before = page.read_text()
        after = updated(before)
        if after != before:
            outdated.append(page.name)
            if not check:
                page.write_text(after)
    print(f"{'not up to date' if check else 'written'}: {', '.join(outdated) or 'none'}")
    if check and outdated:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
