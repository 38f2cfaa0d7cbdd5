"""Several processes of one run: a signal to any of them stops all, and the run goes on."""

from pathlib import Path

import pytest

from tests.ranks import StopAt, fit_in_ranks
from tests.runs import HORIZON, differences, load, only_run, with_callback

HOSTS = ("--data.n_envs=2", "--trainer.max_epochs=3")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def content(path: Path) -> dict:
    """Return what two runs of equal policies and hosts have in common in their checkpoints."""
    saved = load(path)
    return {name: saved[name] for name in ("state_dict", "optimizer_states", "HostPoolData")}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The last checkpoint of a run of two processes."""
    root = tmp_path_factory.mktemp("uninterrupted")
    fit_in_ranks(2, root, *HOSTS)
    return only_run(root).last


@pytest.mark.parametrize(("tick", "rank"), [(1, 0), (HORIZON + 3, 1), (2 * HORIZON, 0)])
def test_sigterm_to_either_process_saves_the_tick_and_ends_both(
    tick: int, rank: int, uninterrupted: Path, tmp_path: Path
) -> None:
    fit_in_ranks(2, tmp_path, *HOSTS, *with_callback(StopAt, tick=tick, rank=rank), code=143)

    last = only_run(tmp_path).last
    assert load(last)["callbacks"]["RolloutState"]["loop"]["ticks"] == tick
    fit_in_ranks(2, tmp_path, *HOSTS, "--ckpt_path", str(last))
    assert differences(content(last), content(uninterrupted)) == []
