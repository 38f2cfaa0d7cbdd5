"""README.md and docs/results show the kept results, and every benchmark can be imported."""

import csv
import importlib
import re
from collections.abc import Container
from pathlib import Path

import numpy as np
import pytest

from benchmarks import depth, expand, grow, tables, zero_shot
from benchmarks.rows import read_rows
from esper_lightning.evaluation.statistics import Interval, mean_interval
from tests.runs import ROOT
from tests.tiers import rest_is_slow

README = (ROOT / "README.md").read_text()

RESULTS = ROOT / "docs" / "results"


def kept(name: str, controllers: Container[str] | None = None) -> list[str]:
    """Return the table of kept results in Markdown, a line for Tamiyo and each controller; None: all of them."""
    results = tables.read(ROOT / "benchmarks" / "results" / f"{name}.csv")
    wanted = [one for one in results if controllers is None or one == "tamiyo" or one in controllers]
    return tables.markdown({one: results[one] for one in wanted})


def cells(line: str) -> list[str]:
    """Return the cells of a row of a table."""
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_its_rows_are_those_of_the_kept_results() -> None:
    (rows,) = re.findall(r"^\| controller \| objective .*\n\|---.*\n((?:\|.*\n)+)", README, re.MULTILINE)
    shown = {name: numbers for name, *numbers in map(cells, rows.splitlines())}
    budget = {row[0]: row for row in map(cells, kept("digits_budget"))}
    told = {"written for the family": "Classified", "told the context": "Oracle"}
    budget |= {name: budget[f"benchmarks.family.{rule}"] for name, rule in told.items()}
    budget["static tamiyo, equal FLOPs"] = budget["static tamiyo"]

    assert len(shown) == 7
    for name, numbers in shown.items():
        assert numbers == [budget[name][1], budget[name][-1]], name


@pytest.mark.parametrize(
    ("page", "names"),
    rest_is_slow(
        [
            ("digits", ["digits"]),
            ("family", ["digits_budget", "digits_budget_held_out", "digits_budget_failing"]),
        ],
        lambda case: case[0] != "family",
    ),
)
def test_the_tables_are_those_of_the_kept_results(page: str, names: list[str]) -> None:
    text = (RESULTS / f"{page}.md").read_text()
    shown = re.findall(r"^\| controller \| objective .*\n\|---.*\n((?:\|.*\n)+)", text, re.MULTILINE)
    for name, rows in zip(names, shown, strict=True):
        assert len(rows.splitlines()) > 5
        assert set(rows.splitlines()) <= set(kept(name))


def test_the_figures_of_depth_are_those_of_the_kept_results() -> None:
    page, results = (RESULTS / "depth.md").read_text(), read_rows(depth.RESULTS, depth.Result)
    tables_of: dict[tuple[str, float, str], list[str]] = {}
    for host, tokens, optimizer in dict.fromkeys((result.host, result.tokens, result.optimizer) for result in results):
        table = tables_of[host, tokens, optimizer] = list(depth.table(results, host, optimizer, tokens))
        assert "\n".join(table) in page, (host, tokens, optimizer)
    for text in (README, (ROOT / "docs" / "methods" / "stack.md").read_text()):
        rows = re.findall(r"^\| `(\w+)` \| ([\d.]+) \| (`Stack.*`) \| (.*) \| (.*) \|$", text, re.MULTILINE)
        assert len(rows) >= 4
        for host, tokens, name, *told in rows:
            (row,) = (row for row in map(cells, tables_of[host, float(tokens), "adamw"]) if row[0] == name)
            assert told == [row[6], row[8]], (host, tokens, name)
        prose = text.partition("\n## ")[0]
        assert all("%" in saved and saved in prose for *_, saved in rows[:2])


def test_the_leads_of_the_rule_and_the_policy_that_decide_depth_are_those_of_the_kept_results() -> None:
    results = read_rows(depth.RESULTS, depth.Result)
    curves_of = {host: depth.curves_of(results, host, "adamw") for host in ("gpt16", "gpt32", "english")}
    default, rule = 'Stack("blocks"), blocks=2', 'Stack("blocks", start=1, plan="scaling")'
    policy = 'Stack("blocks", start=1, plan="tamiyo_depth"), blocks=4'
    scaling, tamiyo = ((ROOT / "docs" / "methods" / f"{name}.md").read_text() for name in ("scaling", "tamiyo"))
    page = (RESULTS / "depth.md").read_text()

    def lead(row: str, rival: str, tokens: float, host: str = "gpt16") -> str:
        leads = depth.leads(curves_of[host], row, rival, depth.budget_of(host, tokens))
        return tables.shown(depth.t_interval(leads), True)

    for tokens in (10.0, 25.0):
        told = " | ".join(lead(policy, rival, tokens) for rival in ("blocks=1", rule, default))
        ahead = [lead(rule, rival, tokens) for rival in ("blocks=1", default, policy)]
        assert f"| {told} |" in tamiyo and f"| {tokens:.0f} | the policy | {told} |" in page, tokens
        assert f"| {tokens:.0f} | the rule | {ahead[0]} | | {ahead[1]} |" in page, tokens
        lines = scaling.partition(f"| {tokens:.0f} | the best fixed depth")[2].splitlines()
        assert [line.rstrip("| ").rpartition("| ")[2] for line in lines[:3]] == ahead, tokens
    others = re.findall(r"^\| `(\w+)` \| (\d+) \| [\d, ]+ \| `([^`]*)`.* \| (.*) \|$", page, re.MULTILINE)
    assert len(others) == 4
    for host, tokens, rival, told in others:
        assert told == lead(rule, rival, float(tokens), host), (host, rival)
    table = scaling.partition("On other networks")[2]
    assert re.findall(r"\| ([+−]\S+ \[.*\]) \|$", table, re.MULTILINE) == [told for *_, told in others]


GENERAL = ("random", "small static", "heuristic", "periodic", "climbing", "best fixed", "replayed")
"""Rules that were not written for the family, and schedules that are the same for all hosts."""


@pytest.mark.parametrize("name", ["digits_budget", "digits_budget_held_out"])
def test_at_equal_flops_each_policy_is_ahead_of_every_general_rule_and_single_schedule(name: str) -> None:
    path = ROOT / "benchmarks" / "results" / f"{name}.csv"
    results = tables.read(path)
    assert len(results["tamiyo"]) == 5
    for seed, ours in results["tamiyo"].items():
        leads = [mean_interval(ours - results[rival].get(seed, results[rival].get(""))) for rival in GENERAL]
        assert len(ours) == 64 and min(lead.low for lead in leads) > 0.0
        assert min(lead.mean for lead in leads) >= 0.02
    flops = {rival: np.mean(list(of.values()), 0) for rival, of in tables.read(path, "flops").items()}
    spent = {rival: (of / flops["small static"]).mean() for rival, of in flops.items()}
    assert all(0.97 < share < 1.03 for share in spent.values()), spent


def test_the_leads_on_seeds_that_fail_and_over_schedules_by_kind_are_those_of_the_kept_results() -> None:
    page, path = (RESULTS / "family.md").read_text(), ROOT / "benchmarks" / "results" / "digits_budget.csv"
    rivals = ("periodic", "climbing", "benchmarks.family.Oracle", "benchmarks.family.Classified")
    rows = tables.by_kind(path, ["fail.conv_light"], [f"ahead of {rival}" for rival in rivals])
    (dead,) = (cells(row)[2:] for row in rows if cells(row)[0] == "1.0")
    bullet = page.partition("**Seeds that fail.**")[2].partition("\n")[0]
    periodic, climbing, oracle, classified = (lead.lstrip("+") for lead in dead)
    assert f"{periodic} ahead of `periodic` and {climbing} ahead of `climbing`" in bullet
    assert f"({oracle})" in bullet and f"is {classified} behind them" in bullet
    results = tables.read(path)
    for rival in ("best fixed", "periodic"):
        leads = np.array([ours - results[rival][""] for ours in results["tamiyo"].values()])
        assert tables.shown(mean_interval(leads), signed=True).lstrip("+") in page.partition("```")[0]
    ends = [f"{of.mean():.3f}"[1:] for of in results["tamiyo"].values()]
    assert f"{', '.join(ends[:4])} and {ends[4]}" in page


def test_the_leads_of_the_repeated_policies_are_those_of_the_kept_results() -> None:
    page, path = (RESULTS / "family.md").read_text(), ROOT / "benchmarks" / "results" / "digits_budget_repeated.csv"
    again, paragraph = tables.read(path), page.partition("**Repeated**")[2].partition("\n")[0]
    for rival in ("best fixed", "periodic", "climbing", "benchmarks.family.Oracle"):
        leads = np.array([ours - again[rival][""] for ours in again["tamiyo"].values()])
        shown = tables.shown(mean_interval(leads if leads.mean() > 0 else -leads), signed=True).lstrip("+")
        assert shown in paragraph
        if rival in ("best fixed", "periodic"):
            assert shown in page.partition("```")[0] and shown in (ROOT / "README.md").read_text()


def test_the_returns_on_the_page_of_ppo_are_those_of_the_kept_results() -> None:
    rows = csv.DictReader((ROOT / "benchmarks" / "results" / "peers.csv").read_text().splitlines())
    measured: dict[str, list[float]] = {}  # runs of 50,000 steps come first
    for row in rows:
        if row["program"] == "ours":
            measured.setdefault(row["seed"], []).extend(float(row[name]) for name in ("mean_return", "last_return"))

    shown = re.findall(r"^\| (\d+) \| ([\d. |]+) \|$", (RESULTS / "ppo.md").read_text(), re.MULTILINE)

    assert len(shown) == 5
    for seed, numbers in shown:
        assert [float(number) for number in numbers.split(" | ")] == pytest.approx(measured[seed], abs=0.051)


def test_the_speeds_of_executors_on_grown_networks_are_the_kept_ones_and_auto_takes_the_fastest() -> None:
    page = (ROOT / "docs" / "reference" / "executors.md").read_text()
    kept = list(csv.DictReader((ROOT / "benchmarks" / "results" / "execution.csv").read_text().splitlines()))
    rows = [row for row in kept if row["precision"] == "fp32"]
    cases = {"390": "digits", "6 k": "32x8", "95 k": "32x32", "210 k": "gpt"}

    shown = re.findall(rf"^\| (\d+) \| \d+[^|]* \| ({'|'.join(cases)}) \| (\w+) \| (.*) \|$", page, re.MULTILINE)

    measured = {(row["case"], row["hosts"], row["seeds"]) for row in rows}
    assert len(shown) == len(measured) == 21
    for hosts, size, seeds, ratios in shown:
        own = [row for row in rows if (row["case"], row["hosts"], row["seeds"]) == (cases[size], hosts, seeds)]
        by_executor = {row["executor"]: row["train_ratio"] for row in own}
        assert ratios.split(" | ") == [by_executor[name] for name in ("loop", "threads", "fused")]
        fastest = max(by_executor, key=lambda name: float(by_executor[name].split()[0]))
        assert fastest.split()[0] == ("fused" if size == "390" else "threads")  # with or without oneDNN

    in_bf16 = re.findall(r"^\| (\d+) \| (\w+) \| (\d\.\d+ \(.*\)) \| (\d\.\d+ \(.*\)) \|$", page, re.MULTILINE)
    threads = [row for row in kept if row["precision"] == "bf16" and row["executor"] == "threads"]
    assert in_bf16 == [(row["hosts"], row["seeds"], row["fp32_ratio"], row["train_ratio"]) for row in threads]


MODULES = sorted(".".join(path.relative_to(ROOT).with_suffix("").parts) for path in (ROOT / "benchmarks").rglob("*.py"))


@pytest.mark.parametrize("name", MODULES)
def test_a_benchmark_can_be_imported(name: str) -> None:
    importlib.import_module(name)


def keep(folder: Path, members: list[str], worth: dict[tuple[str, str], list[float]]) -> Path:
    """Keep a comparison with a host of each member; `worth` has its objectives by controller and training seed."""
    rows = [["controller", "training_seed", "host", "member", "objective", "score", "parameters", "fossils", "flops"]]
    for (name, seed), objectives in worth.items():
        rows += [[name, seed, i, member, objectives[i], 0.5, 390, 2, 1e9 + i] for i, member in enumerate(members)]
    with (folder / "evaluation.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    tables.main(["keep", str(folder / "evaluation.csv"), str(folder / "kept.csv")])
    return folder / "kept.csv"


def test_the_readmes_tables_come_from_the_kept_results(tmp_path: Path) -> None:
    kept = keep(
        tmp_path, ["a", "a"], {("tamiyo", "0"): [0.6, 0.8], ("tamiyo", "1"): [0.7, 0.9], ("wait", ""): [0.2, 0.6]}
    )

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
    members = ["host.widths [4, 8], price 0.1", "host.widths [4, 8], price 0.3", "host.widths [2, 2], price 0.3"]
    worth = {("tamiyo", "0"): [0.1, 0.3, 0.6], ("tamiyo", "1"): [0.3, 0.5, 0.8], ("wait", ""): [0.0] * 3}
    kept = keep(tmp_path, members, worth)

    assert tables.by_kind(kept, ["price"], ["tamiyo", "wait:parameters"])[2:] == [
        "| 0.1 | 1 | .200 | 390 |",
        "| 0.3 | 2 | .550 | 390 |",
    ]
    head, _, *kinds = tables.by_kind(kept, ["host.widths", "price"], ["tamiyo:fossils"])
    assert head == "| host.widths | price | hosts | tamiyo:fossils |"
    assert kinds[0] == "| [2, 2] | 0.3 | 1 | 2.000 |" and len(kinds) == 3
    lacking = keep(tmp_path, ["kernel 1, fail 1.0", "kernel 3", "kernel 3"], worth)
    assert tables.by_kind(lacking, ["kernel", "fail"], ["ahead of wait"])[2:] == [
        "| 1 | 1.0 | 1 | +.200 [.100, .300] |",
        f"| 3 |  | 2 | {tables.shown(mean_interval(np.array([[0.3, 0.6], [0.5, 0.8]])), signed=True)} |",
    ]
    kept = keep(tmp_path, members, worth)
    with pytest.raises(SystemExit):
        tables.main(["by", str(kept), "width", "--cells", "tamiyo"])
    assert "do not differ in width; they do in host.widths, price" in capsys.readouterr().err
    with pytest.raises(ValueError, match="no results of tamyo; there are those of tamiyo, wait"):
        tables.by_kind(kept, ["price"], ["tamyo"])


BY_KIND = {
    "digits_budget": ["host.kernel", "fail.conv_light", "training.flops"],
    "digits_budget_held_out": ["host.kernel", "fail.conv_light", "data.transform"],
}


@pytest.mark.parametrize("name", BY_KIND)
def test_the_pages_tables_of_kinds_of_host_are_those_of_the_kept_results(name: str) -> None:
    page = (RESULTS / "family.md").read_text()
    head = f"| {' | '.join([*BY_KIND[name], 'hosts'])} | "
    cells = {line.removeprefix(head).removesuffix(" |") for line in page.splitlines() if line.startswith(head)}
    (columns,) = cells

    lines = tables.by_kind(
        ROOT / "benchmarks" / "results" / f"{name.split()[0]}.csv", BY_KIND[name], columns.split(" | ")
    )

    assert len(lines) >= 6 and "\n".join(lines) in page


def test_pages_show_the_kept_results_of_growing_transfer_and_expansion() -> None:
    docs = ROOT / "docs"
    pages = {path.stem: path.read_text() for path in (*docs.glob("methods/*.md"), RESULTS / "zero_shot.md")}
    assert "\n".join(grow.table(read_rows(grow.RESULTS, grow.Row))) in pages["seeds"]
    rows = read_rows(zero_shot.RESULTS, zero_shot.Row)
    assert "\n".join(zero_shot.table(rows)) in pages["zero_shot"]
    assert "\n".join(expand.table(read_rows(expand.RESULTS, expand.Row))) in pages["expand"]


@pytest.mark.parametrize("name", ["stack", "scaling", "tamiyo"])
def test_the_leads_of_a_card_are_on_a_page_of_results(name: str) -> None:
    """A page may have the lead from the other side; the text of depth has it in words, ahead or behind."""
    card = (ROOT / "docs" / "methods" / f"{name}.md").read_text()
    pages = "".join(path.read_text() for path in RESULTS.glob("*.md")).replace(" nats", "")
    leads = re.findall(r"[+−]\d?\.\d{3} \[−?\d?\.\d{3}, −?\d?\.\d{3}\]", card)
    assert len(leads) >= 6
    for lead in leads:
        mean, low, high = (float(x.replace("−", "-")) for x in re.findall(r"−?\d?\.\d{3}", lead))
        other_side = Interval(-mean, -high, -low)
        mirrored, ahead = (tables.shown(of, signed=True) for of in (other_side, Interval(mean, low, high)))
        said = re.escape((ahead if mean > 0 else mirrored).removeprefix("+"))
        in_words = re.search(rf"{said} {'ahead' if mean > 0 else 'behind'} ", pages)
        assert lead in pages or mirrored in pages or in_words, lead
