"""Every benchmark can be imported, and the pages of results show the kept results."""

import csv
import importlib
from pathlib import Path

import numpy as np
import pytest

from benchmarks import depth, grow, tables, zero_shot
from benchmarks.rows import read_rows
from esper_lightning.evaluation.statistics import mean_interval
from tests.runs import ROOT

MODULES = sorted(".".join(path.relative_to(ROOT).with_suffix("").parts) for path in (ROOT / "benchmarks").rglob("*.py"))


@pytest.mark.parametrize("name", MODULES)
def test_a_benchmark_can_be_imported(name: str) -> None:
    importlib.import_module(name)


def test_the_readmes_tables_come_from_the_kept_results(tmp_path: Path) -> None:
    source, kept = tmp_path / "evaluation.csv", tmp_path / "kept.csv"
    rows = ["controller,training_seed,host,host_seed,member,score,parameters,objective,fossils,flops"]
    worth = {("tamiyo", "0"): [0.6, 0.8], ("tamiyo", "1"): [0.7, 0.9], ("wait", ""): [0.2, 0.6]}
    for (name, seed), objectives in worth.items():
        rows += [f"{name},{seed},{host},9,a,0.5,390,{value},1,{1e9 + host}" for host, value in enumerate(objectives)]
    source.write_text("\n".join(rows) + "\n")
    tables.main(["keep", str(source), str(kept)])
    assert "member" not in kept.read_text() and not tables.members_of(kept).exists()
    assert tables.read(kept, "flops")["wait"][""].tolist() == [1e9, 1e9]
    results = tables.read(kept)
    assert results["tamiyo"]["1"].tolist() == [0.7, 0.9]
    head, _, ours, wait = tables.markdown(results)
    assert head == "| controller | objective | ahead, seed 0 | ahead, seed 1 | ahead, all |"
    assert ours.startswith("| tamiyo | .750 ±") and ours.endswith("|  |  |  |")
    leads = [[0.4, 0.2], [0.5, 0.3]]
    cells = [tables.shown(mean_interval(np.array(lead)), signed=True) for lead in [*leads, leads]]
    assert wait.split(" | ")[2:] == [*cells[:2], f"{cells[2]} |"]
    assert tables.number(-0.0214) == "−.021" and tables.number(1.5) == "1.500"


def test_results_are_grouped_by_the_variables_in_which_hosts_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, kept = tmp_path / "evaluation.csv", tmp_path / "kept.csv"
    members = ["host.widths [4, 8], price 0.1", "host.widths [4, 8], price 0.3", "host.widths [2, 2], price 0.3"]
    rows = [["controller", "training_seed", "host", "member", "objective", "score", "parameters", "fossils", "flops"]]
    for name, seed, objectives in (
        ("tamiyo", 0, (0.1, 0.3, 0.6)),
        ("tamiyo", 1, (0.3, 0.5, 0.8)),
        ("wait", "", (0.0,) * 3),
    ):
        rows += [[name, seed, i, member, objectives[i], 0.5, 390, 2, 1e9] for i, member in enumerate(members)]
    with source.open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    tables.main(["keep", str(source), str(kept)])

    assert tables.by_kind(kept, ["price"], ["tamiyo", "wait:parameters"])[2:] == [
        "| 0.1 | 1 | .200 | 390 |",
        "| 0.3 | 2 | .550 | 390 |",
    ]
    head, _, *kinds = tables.by_kind(kept, ["host.widths", "price"], ["tamiyo:fossils"])
    assert head == "| host.widths | price | hosts | tamiyo:fossils |"
    assert kinds[0] == "| [2, 2] | 0.3 | 1 | 2.000 |" and len(kinds) == 3
    with pytest.raises(SystemExit):
        tables.main(["by", str(kept), "width", "--cells", "tamiyo"])
    assert "do not differ in width; they do in host.widths, price" in capsys.readouterr().err
    with pytest.raises(ValueError, match="no results of tamyo; there are those of tamiyo, wait"):
        tables.by_kind(kept, ["price"], ["tamyo"])


BY_KIND = {
    "family host.widths": ["host.kernel", "host.widths"],
    "family": ["host.kernel", "objective.price"],
    "family_held_out": ["host.kernel", "objective.price"],
    "failing": ["fail.conv_light", "fail.bottleneck"],
}


@pytest.mark.parametrize("name", BY_KIND)
def test_the_pages_tables_of_kinds_of_host_are_those_of_the_kept_results(name: str) -> None:
    page = (ROOT / "docs" / "results" / "family.md").read_text()
    head = f"| {' | '.join([*BY_KIND[name], 'hosts'])} | "
    cells = {line.removeprefix(head).removesuffix(" |") for line in page.splitlines() if line.startswith(head)}
    (columns,) = cells

    lines = tables.by_kind(
        ROOT / "benchmarks" / "results" / f"{name.split()[0]}.csv", BY_KIND[name], columns.split(" | ")
    )

    assert len(lines) >= 6 and "\n".join(lines) in page


def test_the_pages_table_of_failing_grafts_is_that_of_the_kept_results() -> None:
    results = tables.read(ROOT / "benchmarks" / "results" / "failing.csv")
    lines = tables.markdown(results)

    assert len(lines) > 7 and "\n".join(lines) in (ROOT / "docs" / "results" / "family.md").read_text()


def test_the_page_on_growing_in_lightning_shows_the_kept_results() -> None:
    page = (ROOT / "docs" / "results" / "grow.md").read_text()
    assert "\n".join(grow.table(read_rows(grow.RESULTS, grow.Row))) in page


def test_the_page_on_a_policy_for_any_network_shows_the_kept_results() -> None:
    page = (ROOT / "docs" / "results" / "zero_shot.md").read_text()
    rows = read_rows(zero_shot.RESULTS, zero_shot.Row)
    for table in (zero_shot.table, zero_shot.seed_table):
        assert "\n".join(table(rows, zero_shot.GENERAL)) in page
    clipped = zero_shot.table(read_rows(zero_shot.RESULTS.with_stem("zero_shot_clipped"), zero_shot.Row), "general")
    assert "\n".join(clipped[: clipped.index("")]) in page


def test_the_page_on_depth_shows_the_kept_results() -> None:
    rows = read_rows(depth.RESULTS, depth.Row)
    page = (ROOT / "docs" / "results" / "depth.md").read_text()
    for host, steps in (("gpt", 14_000), ("gpt32", 6_000), ("vit", 3_000), ("cnn", 2_000), ("mlp", 1_500)):
        lines = depth.table([row for row in rows if (row.host, row.steps) == (host, steps)])
        assert len(lines) > 4 and "\n".join(lines) in page
    assert "\n".join(depth.value(rows)).partition("\n\n")[0] in page


def test_networks_of_any_depth_are_compared_at_equal_flops(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = str(tmp_path / "depth.csv")
    plans = ["six", "three", "3 to 6", "1 to 3 to 6", "3 to 6, zero", "3 to 6, interleave"]
    run = ["run", "--host", "mlp", "--steps", "40", "--rows", *plans, "--rates", "1e-3", "--csv", results]
    depth.main(run)
    depth.main(run)  # makes no training twice
    rows = read_rows(Path(results), depth.Row)

    assert [row.plan for row in rows if row.split == "test"] == plans
    budget = 40 * depth.step_flops(depth.HOSTS["mlp"], 6)
    for row in (row for row in rows if row.split == "test"):
        assert 0 <= row.flops - budget < depth.step_flops(depth.HOSTS["mlp"], row.depth)
        assert row.depth == max([depth.PLANS[row.plan].start, *(to for _, to in depth.PLANS[row.plan].growth)])
    capsys.readouterr()
    depth.main(["table", "--host", "mlp", "--steps", "40", "--csv", results])
    lines = capsys.readouterr().out.splitlines()
    by_plan = {line.split(" | ")[0].removeprefix("| "): line.split(" | ") for line in lines[2:]}
    six, grown = (next(row.loss for row in rows if (row.plan, row.split) == (p, "test")) for p in ("six", "3 to 6"))
    assert list(by_plan) == [plan for plan in depth.PLANS if plan in plans]
    assert by_plan["3 to 6"][3] == f"{grown:.3f}" and by_plan["3 to 6"][4].startswith(f"{six - grown:+.3f}")
