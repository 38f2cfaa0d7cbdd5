"""Invalid settings and actions raise an error of one line with the reason."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from torch import Tensor, nn
from torch.nn import functional as F

from esper_lightning.envs import HostPool, check_host_count
from esper_lightning.envs.config import MAX_HOSTS
from esper_lightning.envs.host_training import HostTraining
from esper_lightning.growth.stages import Stage
from esper_lightning.hosts import CNN
from tests.decisions import WAIT, Row, act, cull, germinate


def without_slots(input_shape: Sequence[int], outputs: int) -> nn.Module:
    return CNN(input_shape, outputs, base=2, slots=[])


@pytest.fixture(scope="module")
def pool(make_pool: Callable[..., HostPool]) -> HostPool:
    return make_pool(1)


class OneSlotUnreached(CNN):
    """Host whose forward pass skips the slot of its last block."""

    def _block(self, i: int, x: Tensor) -> Tensor:
        return super()._block(i, x) if i < 2 else F.relu(self.norms[i](self.convs[i](x)))


def unreached(input_shape: Sequence[int], outputs: int) -> nn.Module:
    return OneSlotUnreached(input_shape, outputs, base=2, pools=2, slots=["block1", "block3"])


@pytest.mark.parametrize(
    ("n_envs", "changes", "message"),
    [
        (0, {}, "n_envs must be at least 1, got 0"),
        (-1, {}, "n_envs must be at least 1, got -1"),
        (1, {"training": HostTraining(batch_size=5000)}, "batch_size is 5000, more than the task's 1597"),
        (1, {"host": without_slots}, "the host has no slots"),
        (1, {"host": unreached}, "slot 'block3': nothing can grow there; .*does not reach the slot"),
    ],
)
def test_a_pool_that_cannot_work_is_refused(
    make_pool: Callable[..., HostPool], n_envs: int, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make_pool(n_envs, **changes)


def test_a_number_of_hosts_that_is_not_possible_is_refused() -> None:
    check_host_count("hosts", MAX_HOSTS)
    check_host_count("hosts", 0, least=0)
    for hosts, message in {0: "hosts must be at least 1, got 0", MAX_HOSTS + 1: "at most 10000, got 10001"}.items():
        with pytest.raises(ValueError, match=message):
            check_host_count("hosts", hosts)


@pytest.mark.parametrize("row", [(9, *WAIT[1:]), germinate(-1), germinate(0, 3), germinate(0, tempo=2)])
def test_an_action_that_names_nothing_is_refused(pool: HostPool, row: Row) -> None:
    pool.reset([0])

    with pytest.raises(ValueError):
        pool.step(act(row))


def test_an_action_that_is_refused_for_one_environment_is_carried_out_in_none(
    make_pool: Callable[..., HostPool],
) -> None:
    pool = make_pool(2)

    with pytest.raises(ValueError, match=r"host 1: CULL block1\.pool is masked"):
        pool.step(act(germinate(0), cull(0)))

    assert pool.envs[0].slots[0].stage is Stage.DORMANT
    pool.step(act(germinate(0), WAIT))
