"""Defects of the policy over sets: its observation in rows, its network and its normaliser."""

from tests.mutations.defect import Defect

ROWS = "esper_lightning/envs/spaces/rows.py"
POLICY = "esper_lightning/tamiyo/set_policy.py"
T_ROWS = "tests/envs/spaces/test_rows.py"
T_POLICY = "tests/tamiyo/test_set_policy.py"
T_ZERO_SHOT = "tests/test_zero_shot.py"
T_CONTEXTS = "tests/envs/context/test_distribution.py"

PERMUTED = f"{T_POLICY}::test_permuting_slots_and_blueprints_permutes_the_choices"
PADDED = f"{T_POLICY}::test_slots_and_blueprints_that_a_host_lacks_change_nothing"
NORMALISED = f"{T_POLICY}::test_rows_are_normalised_by_the_statistics_of_the_present_ones_of_all_slots"
HOLD = f"{T_ROWS}::test_rows_hold_what_their_names_say"

DEFECTS: tuple[Defect, ...] = (
    Defect(
        "Slots that a host lacks count in the mean over slots",
        POLICY,
        "present.sum(-1, keepdim=True).clamp(min=1)",
        "rows.shape[-2]",
        PADDED,
    ),
    Defect(
        "The tables of pairs of op and slot are in the order of slots",
        POLICY,
        ".transpose(-3, -2).flatten(-3, -2)",
        ".flatten(-3, -2)",
        PERMUTED,
    ),
    Defect(
        "A decision chooses among the blueprints of another slot",
        POLICY,
        "            hidden.of_slot(slot),",
        "            hidden.of_slot(slot * 0),",
        f"{T_POLICY}::test_the_decision_is_the_most_likely_action_though_most_slots_are_left_out_of_it",
    ),
    Defect(
        "Absent rows count in the statistics",
        "esper_lightning/ppo/running_norm.py",
        "norm.update(rows[rows[..., 0] > 0][..., 1:], ranks)",
        "norm.update(rows[..., 1:], ranks)",
        NORMALISED,
    ),
    Defect(
        "The mark of presence is normalised away",
        "esper_lightning/ppo/running_norm.py",
        'self._of_rows("mean", number, of_mark=0.0)',
        'self._of_rows("mean", number, of_mark=0.5)',
        NORMALISED,
    ),
    Defect(
        "Rent is that of a seed alone, not in addition to the fossilized ones",
        ROWS,
        "torch.log1p((grown + added) / host) - torch.log1p(grown / host)",
        "torch.log1p(added / host)",
        HOLD,
    ),
    Defect(
        "A fossilized seed is charged again",
        ROWS,
        "return rent[..., 0] * torch.tensor(live), rent[..., 1:]",
        "return rent[..., 0] + 0.1, rent[..., 1:]",
        HOLD,
    ),
    Defect(
        "A seed that was culled is forgotten",
        "esper_lightning/envs/subject.py",
        "            if slot.blended and slot.blueprint is not None:\n",
        "            trials.clear()\n            if slot.blended and slot.blueprint is not None:\n",
        f"{T_ROWS}::test_a_culled_seed_is_remembered_by_what_it_has_shown_even_after_a_checkpoint",
    ),
    Defect(
        "A slot without a blueprint on offer can be chosen",
        "esper_lightning/envs/spaces/observation_builder.py",
        "mask[:, Op.GERMINATE] &= self.masks_on_cpu.blueprint.any(-1)",
        "pass",
        f"{T_ROWS}::test_an_episode_offers_as_many_slots_and_blueprints_as_its_context_says",
    ),
    Defect(
        "All episodes offer the same slots and blueprints",
        "esper_lightning/envs/context/distribution.py",
        'random.Random(f"offer {rng_seed}")',
        'random.Random("offer")',
        f"{T_ROWS}::test_an_episode_offers_as_many_slots_and_blueprints_as_its_context_says",
    ),
    Defect(
        "A shorter episode goes on until those of the other hosts end",
        "esper_lightning/envs/host_env.py",
        "return self.stopped or (self.horizon < self.longest and self.tick >= self.horizon)",
        "return self.stopped",
        f"{T_CONTEXTS}::test_a_shorter_episode_is_that_of_a_pool_with_its_horizon_and_then_idle",
    ),
    Defect(
        "A shorter episode is not over for the reward",
        "esper_lightning/envs/host_pool.py",
        "[env.tick >= env.horizon for env in self.envs]",
        "[env.tick >= self.horizon for env in self.envs]",
        f"{T_CONTEXTS}::test_a_shorter_episode_is_that_of_a_pool_with_its_horizon_and_then_idle",
    ),
    Defect(
        "The gates of a shorter episode are those of the longest ones",
        "esper_lightning/envs/host_env.py",
        "self.growing.horizon = self.horizon",
        "pass",
        f"{T_CONTEXTS}::test_a_shorter_episode_is_that_of_a_pool_with_its_horizon_and_then_idle",
    ),
    Defect(
        "Settings with many hosts weigh more in the mean over held-out settings",
        "benchmarks/zero_shot.py",
        "lead[:seeds] * hosts / (len(leads) * lead.shape[1])",
        "lead[:seeds]",
        f"{T_ZERO_SHOT}::test_every_setting_weighs_the_same_in_the_mean_over_settings",
    ),
    Defect(
        "A schedule keeps the names of the slots of other hosts",
        "benchmarks/zero_shot.py",
        "entry._replace(slot=slots[entry.slot], tick=",
        "entry._replace(tick=",
        f"{T_ZERO_SHOT}::test_a_schedule_is_fitted_to_hosts_with_other_slots_and_seeds",
    ),
    Defect(
        "A policy file does not tell the settings of its training",
        "esper_lightning/checkpointing/policy_file.py",
        "DESCRIBED = (SCHEMA_KEY, IDENTITY_KEY, MODULE_KEY, SETTINGS_KEY, RULES_KEY)",
        "DESCRIBED = (SCHEMA_KEY, IDENTITY_KEY, MODULE_KEY, RULES_KEY)",
        "tests/cli/test_policy_over_sets.py::"
        "test_a_policy_as_safetensors_acts_as_that_of_its_checkpoint_and_is_found_by_name",
    ),
    Defect(
        "Grow does not take the lifecycle of a policy's training",
        "callbacks/grow/callback.py",
        "self.lifecycle: LifecycleConfig = lifecycle or rules.lifecycle",
        "self.lifecycle: LifecycleConfig = lifecycle or LifecycleConfig()",
        "tests/cli/test_policy_over_sets.py::"
        "test_a_policy_as_safetensors_acts_as_that_of_its_checkpoint_and_is_found_by_name",
    ),
)
