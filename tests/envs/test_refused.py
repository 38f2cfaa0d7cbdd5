"""Invalid settings, states and actions of environments are refused in one line with the reason."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from torch import Tensor, nn
from torch.nn import functional as F

from esper_lightning.envs import ActionConfig, HostPool, check_host_count
from esper_lightning.envs.config import MAX_HOSTS
from esper_lightning.envs.family import ContextDistribution, FamilyConfig
from esper_lightning.envs.governor import GovernorConfig
from esper_lightning.envs.host_training import HostTraining
from esper_lightning.envs.observation import ObservationConfig
from esper_lightning.envs.rewards import ObjectiveConfig
from esper_lightning.growth.stages import Stage
from esper_lightning.hosts import CNN
from tests.conftest import SMALL
from tests.decisions import WAIT, Row, act, cull, germinate

MakePool = Callable[..., HostPool]

SETTINGS: list[tuple[type, dict[str, Any], str]] = [
    (ActionConfig, {"blueprints": []}, "empty"),
    (ActionConfig, {"blueprints": ["conv_ligth"]}, "did you mean 'conv_light'"),
    (ActionConfig, {"blueprints": ["norm", "conv_light", "norm"]}, "'norm' is named twice"),
    (ActionConfig, {"tempos": {}}, "at least one tempo"),
    (ActionConfig, {"tempos": {"FAST": 3, "NOW": 0}}, "at least 1 host epoch"),
    (HostTraining, {"lr_schedule": "linear"}, "lr_schedule must be one of constant, cosine, decay, got 'linear'"),
    (HostTraining, {"lr": 0.0}, "training.lr must be positive, got 0.0"),
    (HostTraining, {"batch_size": 0}, "batch_size must be positive"),
    (HostTraining, {"batches": 0}, "batches must be positive"),
    (HostTraining, {"batches": 2**63}, "training.batches must be at most 100000"),
    (HostTraining, {"flops": 0.0}, "training.flops must be positive, got 0"),
    (HostTraining, {"batches": 2, "flops": 1e6}, "training.batches and training.flops both say how long a host epoch"),
    (HostTraining, {"max_grad_norm": -5.0}, "max_grad_norm must be positive"),
    (HostTraining, {"weight_decay": -0.1}, "weight_decay must not be negative"),
    (HostTraining, {"micro_batches": 0}, "training.micro_batches must be positive, got 0"),
    (HostTraining, {"micro_batches": 5}, "micro_batches must divide batch_size, 5 does not divide 32"),
    (GovernorConfig, {"window": 0}, "Governor.rules.window must be at least 1 host epoch, got 0"),
    (GovernorConfig, {"penalty": math.nan}, "Governor.rules.penalty must not be negative, got nan"),
    (GovernorConfig, {"max_loss": 0.0}, "Governor.rules.max_loss must be positive, got 0.0"),
    (ObjectiveConfig, {"price": -0.1}, "objective.price must be finite and not negative, got -0.1"),
    (ObjectiveConfig, {"price": math.inf}, "objective.price must be finite and not negative, got inf"),
    (ObjectiveConfig, {"price": math.nan}, "objective.price must be finite and not negative, got nan"),
    (FamilyConfig, {"held_out": [{"host.kernel": [3]}]}, "family.train has none"),
    (
        FamilyConfig,
        {"train": [{"host.kernel": [1, 3]}], "held_out": [{"host.kernel": [3]}]},
        "host.kernel 3 is a context of family.train",
    ),
    *(
        (FamilyConfig, {"train": [{name: values}]}, f"family.train: {name}{said}")
        for name, values, said in (
            ("host.kernel", [], " needs a list of values, got []"),
            ("host.kernel", 3, " needs a list of values, got 3"),
            ("host", [1], ": unknown variable; there are host.<argument>"),
            ("data.noise", [0.1], ": unknown variable; there are host.<argument>, data.transform"),
            ("data.transform", ["mirrored"], ": unknown transform 'mirrored'; there are: none, inverted"),
            ("training.momentum", [0.5], ": unknown variable"),
            ("training.lr", [0.0], ": training.lr must be positive, got 0.0"),
            ("training.lr", [0.1, True], ": it must be a number, got True"),
            ("fail", [1.5], ": it is a chance, from 0 to 1, got 1.5"),
            ("fail.conv_lihgt", [0.5], ": unknown blueprint 'conv_lihgt'; did you mean 'conv_light'"),
            ("objective.price", [-0.1], ": it must be a number and not negative"),
            ("objective.price", [math.inf], ": it must be a number and not negative"),
            ("horizon", [0], ": it must be a whole number from 1 on, got 0"),
        )
    ),
]


@pytest.mark.parametrize(("kind", "settings", "message"), SETTINGS)
def test_a_setting_that_makes_no_sense_is_refused(kind: type, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]*$") as error:
        kind(**settings)
    assert message in str(error.value)


class OneSlotUnreached(CNN):
    """Host whose forward pass skips the slot of its last block."""

    def _block(self, i: int, x: Tensor) -> Tensor:
        return super()._block(i, x) if i < 2 else F.relu(self.norms[i](self.convs[i](x)))


def cnn(input_shape: Sequence[int], outputs: int, **settings: Any) -> nn.Module:
    return CNN(input_shape, outputs, **{"base": 2, "slots": []} | settings)


def unreached(input_shape: Sequence[int], outputs: int) -> nn.Module:
    return OneSlotUnreached(input_shape, outputs, base=2, pools=2, slots=["block1", "block3"])


SLOTTED = partial(cnn, slots=["block1"])


@pytest.mark.parametrize(
    ("n_envs", "changes", "message"),
    [
        (0, {}, "n_envs must be at least 1, got 0"),
        (-1, {}, "n_envs must be at least 1, got -1"),
        (1, {"training": HostTraining(batch_size=5000)}, "batch_size is 5000, more than the task's 1597"),
        (1, {"training": HostTraining(flops=1e3)}, r"training\.flops is 1000, but a minibatch of a host costs .*, and"),
        (1, {"host": cnn}, "the host has no slots"),
        (1, {"host": unreached}, "slot 'block3': nothing can grow there; .*does not reach the slot"),
        (1, {"observation": ObservationConfig(hidden=["scroe.0"])}, "called 'scroe.0'; did you mean 'score.0'"),
        (1, {"observation": ObservationConfig(shown=["nothing*"])}, "no feature is called 'nothing\\*'"),
        (1, {"observation": ObservationConfig(hidden=["*"])}, "shows no feature"),
        (1, {"host": SLOTTED, "family": FamilyConfig(train=[{"host.kernal": [3]}])}, "made with {'kernal': 3}"),
        (1, {"host": SLOTTED, "family": FamilyConfig(train=[{"host.kernel": [2]}])}, "an odd kernel"),
    ],
)
def test_a_pool_that_cannot_work_is_refused(
    make_pool: MakePool, n_envs: int, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make_pool(n_envs, **changes)


def test_contexts_that_do_not_fit_and_states_of_other_hosts_are_refused(make_pool: MakePool) -> None:
    with pytest.raises(ValueError, match=r"family: horizon 13 is longer than env\.horizon, 12; raise env\.horizon"):
        replace(SMALL, horizon=12, family=FamilyConfig(train=[{"horizon": [8, 13]}]))
    with pytest.raises(ValueError, match="no held-out contexts"):
        ContextDistribution(FamilyConfig(train=[{"host.kernel": [3]}]), held_out=True)
    with pytest.raises(ValueError, match=r"holds 2 environments, this run has 3; set data\.n_envs to 2"):
        make_pool(3).load_state_dict(make_pool(2).state_dict())


def test_a_number_of_hosts_that_is_not_possible_is_refused() -> None:
    check_host_count("hosts", MAX_HOSTS)
    check_host_count("hosts", 0, least=0)
    for hosts, message in {0: "hosts must be at least 1, got 0", MAX_HOSTS + 1: "at most 10000, got 10001"}.items():
        with pytest.raises(ValueError, match=message):
            check_host_count("hosts", hosts)


@pytest.mark.parametrize("row", [(9, *WAIT[1:]), germinate(-1), germinate(0, 3), germinate(0, tempo=2), cull(0)])
def test_an_action_that_is_refused_for_one_environment_is_carried_out_in_none(make_pool: MakePool, row: Row) -> None:
    pool = make_pool(2)

    with pytest.raises(ValueError, match=r"host 1: .* is (no action|masked)"):
        pool.step(act(germinate(0), row))

    assert pool.envs[0].slots[0].stage is Stage.DORMANT
    pool.step(act(germinate(0), WAIT))
