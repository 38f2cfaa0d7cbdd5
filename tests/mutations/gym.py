"""Defects of hosts as Gymnasium environments."""

from tests.mutations.defect import Defect

ENVIRONMENTS = "esper_lightning/gym/environments.py"
SPACES = "esper_lightning/gym/spaces.py"
TEST = "tests/gym/test_environments.py::"
MASKED = "tests/gym/test_spaces.py::test_a_choice_is_masked_unless_a_possible_action_needs_it[four ops]"

DEFECTS: tuple[Defect, ...] = (
    Defect("Waiting makes every slot a possible choice", SPACES, "acting[:, Op.WAIT] = False", "pass", MASKED),
    Defect(
        "A head without an effect has no possible choice",
        SPACES,
        "return possible | (first & ~possible.any(1, keepdim=True))",
        "return possible",
        MASKED,
    ),
    Defect(
        "An impossible action of another algorithm ends the run",
        ENVIRONMENTS,
        "row if allowed else WAIT_ACTION for",
        "row for",
        f"{TEST}test_an_action_that_is_not_possible_is_executed_as_wait",
    ),
    Defect(
        "The end of one episode resets the neighbours",
        ENVIRONMENTS,
        "self.hosts.begin(ended, [self._generators[i] for i in ended])",
        "self.hosts.begin(range(self.num_envs), self._generators)",
        f"{TEST}test_a_host_that_is_rolled_back_begins_a_new_episode_and_its_neighbour_goes_on",
    ),
    Defect(
        "The horizon ends no episode",
        ENVIRONMENTS,
        "rolled_back | at_horizon if self.pool.config.reward.horizon_is_end else rolled_back",
        "rolled_back",
        f"{TEST}test_rewards_of_an_episode_sum_to_the_change_of_the_objective",
    ),
    Defect(
        "A seed has no effect on the environments of a vector",
        ENVIRONMENTS,
        "seeding.np_random(int(own))[0]",
        "seeding.np_random(None)[0]",
        f"{TEST}test_an_episode_depends_on_its_seed_and_its_actions_alone",
    ),
    Defect(
        "Other algorithms are trained on the hosts of evaluations",
        "esper_lightning/envs/seeding.py",
        "int(generator.integers(2**62)) << 1 | purpose",
        "int(generator.integers(2**62)) << 1 | 1 - purpose",
        f"{TEST}test_rewards_of_an_episode_sum_to_the_change_of_the_objective",
    ),
    Defect(
        "The Governor of a config does not watch the environment's hosts",
        "esper_lightning/gym/make.py",
        "built.data.oversee(built.governor)",
        "pass",
        "tests/gym/test_make.py::test_a_config_is_made_into_the_hosts_that_fit_would_train",
    ),
)
