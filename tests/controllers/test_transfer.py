"""Transfer of a policy to hosts of another kind."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from esper_lightning.controllers.learned import LearnedController, SampledController
from esper_lightning.controllers.transfer import SpaceAdapter, TrainingRules, TrainingSpaces, TransferController
from esper_lightning.envs import ActionConfig, HostPool, Op
from esper_lightning.envs.spaces.action_discovery import SharedSpace
from esper_lightning.envs.spaces.masks import Masks
from esper_lightning.envs.spaces.observation import ObservationConfig
from esper_lightning.growth.gates import LifecycleConfig
from esper_lightning.hosts import CNN, MLP
from esper_lightning.ppo.running_norm import RunningMeanStd
from esper_lightning.tamiyo.policy import Policy
from esper_lightning.tasks import Synthetic
from tests.conftest import FREE, SMALL
from tests.controllers.playing import episode
from tests.decisions import CPU, WAIT, act, decide, germinate

MakePool = Callable[..., HostPool]
MakePolicy = Callable[..., Policy]

FEW = ActionConfig(blueprints=["depthwise", "conv_small"], tempos=SMALL.actions.tempos)


def home_of(pool: HostPool) -> TrainingSpaces:
    return TrainingSpaces(pool.space, pool.feature_names)


def host_of_two(input_shape: Sequence[int], outputs: int) -> nn.Module:
    """Make a host with other slot names and widths, and one slot fewer, than the training hosts."""
    return CNN(input_shape, outputs, base=3, blocks=2, slots=["block1", "block2.pool"], channels_last=False)


@pytest.fixture(scope="module")
def known(make_pool: MakePool) -> HostPool:
    return make_pool(3)


@pytest.fixture
def abroad(make_pool: MakePool) -> HostPool:
    return make_pool(3, host=host_of_two, actions=FEW)


def random_controller(pool: HostPool, make_policy: MakePolicy, seed: int) -> SampledController:
    return SampledController(make_policy(pool, seed), RunningMeanStd((len(pool.feature_names),)), seed)


@pytest.mark.parametrize("changes", [{}, FREE], ids=["few heads", "every head"])
def test_the_training_space_is_mapped_to_itself(
    make_pool: MakePool, make_policy: MakePolicy, changes: dict[str, Any]
) -> None:
    pool = make_pool(3, **changes)
    home = home_of(pool)
    looks: list[bool] = []

    class Compared(LearnedController):
        def act(self, guise: SpaceAdapter) -> Any:
            looks.append(guise.observation.features.equal(pool.observation.features))
            looks.append(guise.observation.blueprints.equal(pool.observation.blueprints))
            looks.extend(mine.equal(its) for mine, its in zip(guise.masks, pool.masks, strict=True))
            return super().act(guise)

    policy, norm = make_policy(pool), RunningMeanStd((len(pool.feature_names),))
    plain = episode(pool, LearnedController(policy, norm))

    assert torch.equal(episode(pool, TransferController(Compared(policy, norm), home)), plain)
    assert len(looks) == pool.config.horizon * (2 + len(Masks._fields)) and all(looks)


@pytest.mark.parametrize("seed", range(5))
def test_elsewhere_only_what_is_possible_is_done(
    known: HostPool, abroad: HostPool, make_policy: MakePolicy, seed: int
) -> None:
    controller = random_controller(known, make_policy, seed)

    taken = episode(abroad, TransferController(controller, home_of(known)))  # the pool refuses masked actions

    op, slot, blueprint = taken[:, 0], taken[:, 1], taken[:, 2]
    assert (op == Op.GERMINATE).any()
    assert set(slot[op == Op.GERMINATE].tolist()) <= {0, 1}
    assert set(blueprint[op == Op.GERMINATE].tolist()) <= {0, 1}


def assert_same_shares(seen: torch.Tensor, known: HostPool) -> None:
    """Assert that the shares of slots in each stage are those of the policy's hosts after the same actions."""
    shares = [name.startswith("share.") for name in known.feature_names]
    assert sum(shares) > 5
    torch.testing.assert_close(seen[:, shares], known.observation.features[:, shares])


def test_a_missing_slot_looks_like_an_unused_one(known: HostPool, abroad: HostPool) -> None:
    guise = SpaceAdapter(home_of(known), abroad)
    known.reset([1, 2, 3])
    third = [name.startswith("block3.") for name in known.feature_names]
    first = [name.startswith("block1.pool.") for name in known.feature_names]
    small = known.space.blueprint.index("conv_small")

    for decision in (germinate(0, small), germinate(1, small), WAIT):
        assert torch.equal(guise.observation.features[:, third], known.observation.features[:, third])
        assert_same_shares(guise.observation.features, known)
        abroad.step(guise.translate(act(*[decision] * 3)))
        known.step(act(*[decision] * 3))

    seen = guise.observation.features
    assert_same_shares(seen, known)
    assert torch.equal(seen[:, third], known.observation.features[:, third])
    assert not torch.equal(seen[:, first], seen[:, third]), "one that is there shows its seed"


def test_nothing_can_be_done_in_a_place_that_is_not_there(known: HostPool, abroad: HostPool) -> None:
    guise = SpaceAdapter(home_of(known), abroad)

    masks = guise.masks

    assert masks.slot[:, Op.WAIT].all() and not masks.slot[:, Op.GERMINATE :, 2].any()
    assert guise.translate(act(*[germinate(2, 1)] * 3)).op.tolist() == [Op.WAIT] * 3
    assert abroad.masks.slot.shape[-1] == 2, "the hosts' own masks are as they were"


def test_what_grows_on_hosts_of_another_task_alone_does_not_count(known: HostPool) -> None:
    """A pool of several tasks lists the blueprints of all of them; only those that its own hosts can grow count."""
    task = Synthetic(shape=[6], classes=3, train=64, validation=32, test=32)
    config = replace(SMALL, actions=ActionConfig(tempos=SMALL.actions.tempos))
    common = SharedSpace(["place1", "place2"], ["conv_light", "lora"])
    pool = HostPool(
        task,
        task.load(),
        lambda shape, outputs: MLP(shape, outputs, width=4, layers=2),
        config=config,
        n_envs=2,
        device=CPU,
        shared_space=common,
    )
    stranger = TrainingSpaces(known.space._replace(blueprint=["conv_light"]), known.feature_names)

    with pytest.raises(ValueError, match=r"no blueprint of the policy \(conv_light\) grows here"):
        SpaceAdapter(stranger, pool)


def test_a_blind_policy_stays_blind(make_pool: MakePool) -> None:
    blind = make_pool(1, sight=ObservationConfig(shown=["progress"]))
    guise = SpaceAdapter(home_of(blind), make_pool(2, host=host_of_two, actions=FEW))

    assert guise.observation.features.shape == (2, 1)


def test_what_cannot_be_shown_is_refused_in_one_line(known: HostPool, abroad: HostPool, make_pool: MakePool) -> None:
    stranger = TrainingSpaces(known.space._replace(blueprint=["norm"]), known.feature_names)
    other_tempos = TrainingSpaces(known.space._replace(tempo=["ONE"]), known.feature_names)
    curious = TrainingSpaces(known.space, [*known.feature_names, "weather"])
    fewer = home_of(abroad)
    for home, pool, said in (
        (stranger, abroad, r"no blueprint of the policy \(norm\) grows here"),
        (other_tempos, abroad, r"chooses among \['ONE'\] with its tempo head"),
        (curious, abroad, "observes 'weather'"),
        (fewer, make_pool(1), "these hosts have 3 slots, the policy has 2"),
    ):
        with pytest.raises(ValueError, match=said):
            SpaceAdapter(home, pool)
    identity = {f"choices of the {head} head": choices for head, choices in known.space._asdict().items()}
    for key in ("observed features", "choices of the tempo head"):
        with pytest.raises(ValueError, match=r"spaces of its policy are damaged: \[\['x"):
            TrainingSpaces.from_identity(identity | {"observed features": ["a"]} | {key: [["x" * 500_000] * 20_000]})
    with pytest.raises(ValueError, match="does not contain the spaces of its policy"):
        TrainingSpaces.from_identity(identity)


def test_a_refusal_names_the_actions_of_the_training_if_they_are_known(known: HostPool, abroad: HostPool) -> None:
    spaces = TrainingSpaces(known.space._replace(tempo=["ONE"]), known.feature_names)

    for actions, said in (
        (ActionConfig(tempos={"ONE": 2}), r': \{"tempos": \{"ONE": 2\}\}$'),
        (ActionConfig(), "defaults$"),
    ):
        with pytest.raises(ValueError, match=f"set data.env.actions as in its training.*{said}"):
            SpaceAdapter(spaces, abroad, TrainingRules(LifecycleConfig(), actions))


def test_impossible_choices_of_a_policy_without_masks_are_waiting(known: HostPool, make_pool: MakePool) -> None:
    pool = make_pool(1, host=host_of_two, actions=FEW, sight=ObservationConfig(masks=False))
    guise = SpaceAdapter(home_of(known), pool)

    for decision in (decide(Op.FOSSILIZE, slot=2), germinate(0, known.space.blueprint.index("norm"))):
        assert guise.translate(act(decision)).op.tolist() == [Op.WAIT]
