"""Files of a comparison: those of an earlier one that are not replaced are removed, and no others."""

from pathlib import Path

from esper_lightning.evaluation.comparison import best_hand_written
from esper_lightning.evaluation.networks import HOST_FILE, NETWORK_FILE, SAMPLES_FILE
from esper_lightning.evaluation.run import remove_earlier

EARLIER = ("schedule.json", "schedule0.json", "schedule12.json", "timeline.png", "timeline1.png")
KEPT = (
    *("best_schedule.json", "best_price_0.1.json", "schedule_mine.json", "my schedule.json", "timeline.pdf"),
    *("evaluation.csv", "notes.txt", "timeline.png.bak"),
)


def test_files_of_an_earlier_comparison_are_removed_and_those_of_the_user_and_of_a_search_stay(tmp_path: Path) -> None:
    for name in (*EARLIER, *KEPT):
        (tmp_path / name).touch()
    (tmp_path / "schedule7.json").mkdir()

    remove_earlier(tmp_path)

    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*KEPT, "schedule7.json"])
    remove_earlier(tmp_path / "new")


def test_networks_of_an_earlier_comparison_are_removed_and_what_was_exported_beside_them_stays(tmp_path: Path) -> None:
    networks = tmp_path / "networks"
    for name in ("1", "3", "mine"):
        (networks / name).mkdir(parents=True)
        for file in (HOST_FILE, NETWORK_FILE, SAMPLES_FILE):
            (networks / name / file).touch()
    (networks / "1" / "network.pt2").touch()

    remove_earlier(tmp_path)

    assert sorted(path.name for path in networks.iterdir()) == ["1", "mine"]
    assert [path.name for path in (networks / "1").iterdir()] == ["network.pt2"]
    assert len(list((networks / "mine").iterdir())) == 3


def test_a_comparison_without_a_hand_written_rule_has_no_twin_of_one() -> None:
    assert best_hand_written({}, ["climbing", "periodic"]) == []
