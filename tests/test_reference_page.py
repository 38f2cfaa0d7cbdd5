"""docs/reference: its generated parts are those that `python -m benchmarks.reference` writes."""

import pytest

from benchmarks import reference


def test_settings_plots_and_rules_are_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    reference.main(["--check"])

    assert capsys.readouterr().out == "not up to date: none\n"


def test_each_generated_part_is_on_a_page() -> None:
    pages = "".join(page.read_text() for page in reference.PAGES.glob("*.md"))

    assert sorted(part[1] for part in reference.GENERATED.findall(pages)) == sorted(reference.GENERATORS)
