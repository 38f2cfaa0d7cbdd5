"""Defects of PPO: advantages, losses, normalisation, rollouts, the policy and its heads, the update."""

from tests.mutations.defect import Defect

P = "esper_lightning/ppo"
T = "tests/ppo"

ROLLOUT = "esper_lightning/ppo/collector.py"
POLICY = "esper_lightning/tamiyo/policy.py"
HEADS = "esper_lightning/tamiyo/heads.py"
MODULE = "esper_lightning/module.py"

SUMMARY = "tests/ppo/test_collector.py::test_the_summary_judges_the_critic_on_the_scale_of_the_returns"

GUARDED_ROLLOUT = (
    "tests/ppo/test_guard.py::test_a_rollout_with_a_number_that_is_none_is_learned_from_without_its_environment"
)
EXPLAINED = "tests/test_module.py::test_the_explained_variance_tells_a_perfect_critic_from_a_useless_one"

UPDATE_BY_HAND = "tests/test_module.py::test_an_update_is_adam_on_the_loss_of_one_minibatch_after_the_other"

DEFECTS: tuple[Defect, ...] = (
    # Advantages.
    Defect(
        "Credit crosses a time limit into the next episode",
        f"{P}/gae.py",
        "running * ~ended[t]",
        "running * ~terminated[t]",
        f"{T}/test_gae.py::test_gae_matches_its_definition",
    ),
    Defect(
        "What a time limit cuts off is worth nothing",
        f"{P}/gae.py",
        "next_values * ~terminated",
        "next_values * ~(terminated | truncated)",
        f"{T}/test_gae.py::test_only_a_time_limit_keeps_the_value_of_the_last_state",
    ),
    Defect(
        "Lambda has no effect",
        f"{P}/gae.py",
        "gamma * lam * running",
        "gamma * running",
        f"{T}/test_gae.py::test_gae_matches_a_hand_computed_rollout",
    ),
    Defect(
        "Noise is blown up when all returns are alike",
        f"{P}/gae.py",
        "sample.std(correction=0).clamp(min=floor)",
        "sample.std(correction=0)",
        f"{T}/test_gae.py::test_advantages_that_are_alike_stay_small",
    ),
    Defect(
        "Steps without a choice shift the mean of the advantages",
        f"{P}/gae.py",
        "(advantages - sample.mean())",
        "(advantages - advantages.mean())",
        f"{T}/test_gae.py::test_forced_steps_have_no_say_in_the_normalisation",
    ),
    Defect(
        "A critic that is wrong by a constant explains less of the returns",
        MODULE,
        "import ExplainedVariance,",
        "import R2Score as ExplainedVariance,",
        EXPLAINED,
    ),
    Defect(
        "The explained variance of returns far from zero is rounding noise",
        MODULE,
        "offset = targets.mean()",
        "offset = 0.0",
        EXPLAINED,
    ),
    Defect(
        "The critic's metrics are those of all rollouts together",
        MODULE,
        "        self.critic_metrics.reset()\n",
        "",
        EXPLAINED,
    ),
    Defect(
        "Callbacks cannot monitor the critic",
        MODULE,
        "        self.log_dict(self.critic_metrics, on_step=False, on_epoch=True, logger=False)\n",
        "",
        "tests/test_module.py::test_the_critics_metrics_are_those_of_the_last_rollout_and_can_be_monitored",
    ),
    # Losses.
    Defect(
        "A bad action that has become rare is made rarer without end",
        f"{P}/losses.py",
        "ratio.clamp(1.0 - clip, 1.0 + clip)",
        "ratio.clamp(max=1.0 + clip)",
        f"{T}/test_losses.py::test_the_surrogate_is_pessimistic",
    ),
    Defect(
        "A clipped value is judged by the better of two errors",
        f"{P}/losses.py",
        "torch.max(error,",
        "torch.min(error,",
        f"{T}/test_losses.py::test_the_value_loss_is_half_the_squared_error_and_clipped_on_request",
    ),
    Defect(
        "The KL estimate is that of the opposite direction",
        f"{P}/losses.py",
        "torch.expm1(log_ratio) - log_ratio",
        "torch.expm1(-log_ratio) + log_ratio",
        f"{T}/test_losses.py::test_the_kl_estimate_is_right_on_average",
    ),
    Defect(
        "Steps without a choice dilute the policy's gradient",
        f"{P}/losses.py",
        "unforced = ~rollout.masks.forced",
        "unforced = ~rollout.masks.ended",
        f"{T}/test_losses.py::test_forced_steps_carry_no_policy_gradient_and_no_entropy",
    ),
    Defect(
        "The critic learns nothing from steps without a choice",
        f"{P}/losses.py",
        "config.value_clip), ~rollout.masks.ended\n",
        "config.value_clip), unforced\n",
        f"{T}/test_losses.py::test_the_critic_learns_from_forced_steps_too",
    ),
    Defect(
        "Entropy of a head that hardly ever matters is rewarded in full",
        f"{P}/losses.py",
        "entropy * relevance * head_weights",
        "entropy * head_weights",
        f"{T}/test_losses.py::test_a_head_that_hardly_ever_matters_earns_hardly_any_bonus",
    ),
    Defect(
        "The weights of the heads' entropies change places",
        f"{P}/losses.py",
        "for head in distribution.heads]",
        "for head in reversed(distribution.heads)]",
        f"{T}/test_losses.py::test_the_bonus_weighs_each_heads_entropy",
    ),
    Defect(
        "Entropy is punished",
        f"{P}/losses.py",
        "- entropy_coefficient * self.entropy",
        "+ entropy_coefficient * self.entropy",
        f"{T}/test_losses.py::test_ppo_terms_measure_how_far_the_policy_has_moved",
    ),
    Defect(
        "An anneal goes on beyond its end",
        f"{P}/losses.py",
        "done = min(1.0, progress)",
        "done = progress",
        f"{T}/test_ppo_config.py::test_an_anneal_is_linear_and_stops_at_its_end",
    ),
    # Normalisers.
    Defect(
        "A normaliser takes a mean that moves for no variance",
        "esper_lightning/ppo/running_norm.py",
        " + weight * (1.0 - weight) * shift.square()",
        "",
        "tests/ppo/test_running_norm.py::test_momentum_lets_the_past_fade_and_counts_the_shift_of_the_mean",
    ),
    Defect(
        "A constant feature is blown up to noise",
        "esper_lightning/ppo/running_norm.py",
        "torch.where(self.var > 1e-8, self.var, 1.0)",
        "self.var.clamp(min=1e-12)",
        "tests/ppo/test_running_norm.py::test_a_constant_stream_becomes_0_and_not_noise",
    ),
    Defect(
        "Observations are normalised twice before their statistics are taken",
        ROLLOUT,
        "self.observation_norm.update(self.raw_features[active])",
        "self.observation_norm.update(buffer.observation.features[active])",
        "tests/ppo/test_collector.py::test_normalisers_change_at_the_end_of_a_rollout_and_never_within",
    ),
    Defect(
        "The normaliser of observations learns within a rollout",
        ROLLOUT,
        "self.raw_features[length].copy_(self.pool.observation.features)",
        "self.raw_features[length].copy_(self.pool.observation.features)\n"
        "            self.observation_norm.update(self.raw_features[length])",
        "tests/ppo/test_collector.py::test_normalisers_change_at_the_end_of_a_rollout_and_never_within",
    ),
    Defect(
        "What is seen after an episode's end moves the value targets",
        ROLLOUT,
        "self.value_norm.update(returns[active])",
        "self.value_norm.update(returns)",
        "tests/ppo/test_collector.py::test_what_comes_after_an_end_counts_for_nothing",
    ),
    # Rollouts.
    Defect(
        "The LSTM remembers the host that was rolled back",
        ROLLOUT,
        "self.starts.copy_(step.terminated)",
        "self.starts.zero_()",
        f"{T}/test_recurrent.py::test_an_end_in_mid_rollout_resets_the_recurrent_state_of_that_environment_alone",
    ),
    Defect(
        "The LSTM remembers the game before, where the clock ended it",
        ROLLOUT,
        "self.starts.logical_or_(step.truncated)",
        "pass",
        f"{T}/test_reference.py::test_log_probabilities_values_and_gae_are_those_of_the_reference",
    ),
    Defect(
        "Where the clock ended a game it is worth what the next one's first state is",
        ROLLOUT,
        "self._normalise_observation(ended.observation)",
        "self._normalise_observation(self.pool.observation)",
        f"{T}/test_reference.py::test_log_probabilities_values_and_gae_are_those_of_the_reference",
    ),
    Defect(
        "What follows the last step is worth its normalised value",
        ROLLOUT,
        "self.value_norm.inverse(last_value)[None]",
        "last_value[None]",
        f"{T}/test_reference.py::test_log_probabilities_values_and_gae_are_those_of_the_reference",
    ),
    Defect(
        "A rollback is no end where the horizon is one",
        ROLLOUT,
        "terminated = terminated | truncated",
        "terminated = truncated",
        "tests/ppo/test_collector.py::test_credit_never_crosses_a_rollback",
    ),
    Defect(
        "An action that the Governor refused is what is learned from",
        ROLLOUT,
        "action=step.action,\n                    log_prob=distribution.log_prob(step.action)",
        "action=action,\n                    log_prob=distribution.log_prob(action)",
        "tests/ppo/test_collector.py::test_a_vetoed_action_is_stored_as_the_wait_that_was_done",
    ),
    Defect(
        "Hosts of evaluation are among those of training",
        "esper_lightning/envs/seeding.py",
        ">> 2 << 1 | purpose",
        ">> 2 << 1",
        "tests/ppo/test_collector.py::test_seeds_of_training_and_of_evaluation_have_nothing_in_common",
    ),
    Defect(
        "A rollout that goes on in mid-game is learned from as if nothing were remembered",
        "esper_lightning/ppo/rollout_buffer.py",
        "stored.copy_(new)",
        "stored.zero_()",
        f"{T}/test_reference.py::test_the_ratio_is_1_before_any_update",
    ),
    Defect(
        "A sequence begins with the state that another one began with",
        "esper_lightning/ppo/rollout_buffer.py",
        "self.length // self.sequence_length - 1]",
        "self.length // self.sequence_length - 2]",
        f"{T}/test_reference.py::test_the_ratio_is_1_before_any_update",
    ),
    Defect(
        "Shorter sequences are made of every so many ticks",
        "esper_lightning/ppo/rollout_buffer.py",
        "field.unflatten(0, (-1, sequence_length)).transpose(0, 1)",
        "field.unflatten(0, (sequence_length, -1))",
        f"{T}/test_sequences.py::test_shorter_sequences_hold_the_same_steps",
    ),
    Defect(
        "A minibatch begins with the recurrent states of other environments",
        "esper_lightning/ppo/rollout_buffer.py",
        "RecurrentState(*(part[envs] for part in self.state))",
        "RecurrentState(*(part[: len(envs)] for part in self.state))",
        "tests/ppo/test_rollout_buffer.py::test_the_sequences_of_some_environments_are_those_columns_of_everything",
    ),
    Defect(
        "Minibatches meet some environments twice and others never",
        "esper_lightning/ppo/rollout_buffer.py",
        "torch.randperm(n, generator=generator, device=device)",
        "torch.randint(n, (n,), generator=generator, device=device)",
        "tests/ppo/test_rollout_buffer.py::test_the_minibatches_of_an_epoch_hold_every_environment_once",
    ),
    Defect(
        "The critic's error is reported in normalised units",
        ROLLOUT,
        "values=values[active]",
        "values=buffer.values[active]",
        SUMMARY,
    ),
    Defect(
        "The spread of the advantages is reported after they were normalised",
        ROLLOUT,
        "advantages[unforced].std(correction=0).item()",
        "normalised[unforced].std(correction=0).item()",
        SUMMARY,
    ),
    Defect(
        "What the critic alone sees is never normalised",
        ROLLOUT,
        "self.privileged_norm.update(self.raw_privileged[active])",
        "pass",
        f"{T}/test_reference.py::test_what_the_critic_alone_sees_is_normalised_by_all_that_it_saw",
    ),
    # The policy and its heads.
    Defect(
        "A sequence that begins an episode begins with the state of the one before",
        POLICY,
        "part * ~starts[0, :, None]",
        "part",
        "tests/tamiyo/test_policy.py::test_a_reset_begins_with_the_initial_state",
    ),
    Defect(
        "A reset in one environment makes others forget",
        POLICY,
        "segments.initial_states(part).unsqueeze(0)",
        "torch.zeros_like(segments.initial_states(part)).unsqueeze(0)",
        "tests/tamiyo/test_policy.py::test_environments_do_not_see_each_other",
    ),
    Defect(
        "A new LSTM lets go of what it holds",
        POLICY,
        "bias[self.width : 2 * self.width]",
        "bias[: self.width]",
        "tests/tamiyo/test_policy.py::test_a_new_memory_lets_go_slowly",
    ),
    Defect(
        "What is impossible may be drawn",
        HEADS,
        "torch.where(mask, bounded, MASKED_LOGIT)",
        "bounded",
        "tests/tamiyo/test_heads.py::test_an_impossible_action_has_probability_0_exactly",
    ),
    Defect(
        "Choices that did not matter are part of a decision's probability",
        HEADS,
        " * self._relevance(head, action.op)",
        "",
        f"{T}/test_losses.py::test_a_decision_teaches_only_the_heads_that_mattered_for_it",
    ),
    Defect(
        "The speed of a change is chosen for another slot",
        HEADS,
        'chosen["op"] * self.n_slots + chosen["slot"]',
        'chosen["op"] * self.n_slots',
        "tests/tamiyo/test_heads.py::test_a_decision_is_as_likely_as_its_choices_one_after_the_other",
    ),
    Defect(
        "A head with a single choice left passes for one that is free",
        HEADS,
        "        has_choice, relevance = self._mean_over_contexts(lambda head: (self.mask_tables[head].sum(-1) "
        "> 1).float()",
        "        has_choice, relevance = self._mean_over_contexts(lambda head: (self.mask_tables[head].sum(-1) "
        "> 0).float()",
        "tests/tamiyo/test_heads.py::test_entropy_is_that_of_each_head_averaged_over_what_may_come_before_it",
    ),
    Defect(
        "Entropy is compared with that of choices that are impossible",
        HEADS,
        "count.clamp(min=2).log()",
        "math.log(mask.shape[-1])",
        "tests/tamiyo/test_heads.py::test_entropy_is_that_of_each_head_averaged_over_what_may_come_before_it",
    ),
    Defect(
        "A choice does not depend on what was chosen before it",
        HEADS,
        "self.input(hidden).unsqueeze(-2) + self.context",
        "self.input(hidden).unsqueeze(-2) + 0.0 * self.context",
        "tests/tamiyo/test_heads.py::test_untrained_heads_find_every_choice_about_as_likely",
    ),
    Defect(
        "A policy whose numbers are none draws impossible actions",
        HEADS,
        "mask + SMALLEST_WEIGHT",
        "torch.ones_like(log_probs)",
        "tests/tamiyo/test_heads.py::test_whatever_the_logits_are_only_possible_actions_are_drawn",
    ),
    Defect(
        "An impossible choice is likelier than possible ones with very low logits",
        HEADS,
        "logits.float().clamp(-LARGEST_LOGIT, LARGEST_LOGIT)",
        "logits.float()",
        "tests/tamiyo/test_heads.py::test_whatever_the_logits_are_only_possible_actions_are_drawn",
    ),
    # Numbers that are not finite.
    Defect(
        "The policy learns from an environment whose reward is not finite",
        ROLLOUT,
        "rollout = rollout.select_envs(rest)",
        "pass",
        GUARDED_ROLLOUT,
    ),
    Defect(
        "A number that is not finite stays in the recurrent state",
        ROLLOUT,
        "part.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)",
        "part",
        GUARDED_ROLLOUT,
    ),
    Defect(
        "A reward of 1e38 is learned from",
        f"{P}/guard.py",
        "values.abs() <= LARGEST_NUMBER  #",
        "values.isfinite()  #",
        GUARDED_ROLLOUT,
    ),
    Defect(
        "A normaliser takes in a number that is not finite",
        f"{P}/running_norm.py",
        "torch.where(finite, new_var, self.var)",
        "new_var",
        f"{T}/test_running_norm.py::test_a_batch_whose_statistics_are_not_finite_changes_nothing",
    ),
    Defect(
        "A minibatch that is not finite changes the policy",
        f"{P}/guard.py",
        "elif not finite:",
        "elif False:",
        f"{T}/test_guard.py::test_a_skipped_step_changes_neither_weights_nor_moments_nor_step_counts",
    ),
    Defect(
        "A minibatch that is not finite changes the policy on a GPU",
        f"{P}/guard.py",
        "(~finite).float()",
        "torch.zeros(())",
        f"{T}/test_guard.py::test_a_skipped_step_changes_neither_weights_nor_moments_nor_step_counts",
    ),
    Defect(
        "A gradient that is not finite passes if the loss is finite",
        f"{P}/guard.py",
        "(loss.detach() + grad_norm.detach().square()).isfinite()",
        "loss.detach().isfinite()",
        f"{T}/test_guard.py::test_a_step_needs_a_finite_loss_and_a_gradient_whose_square_is_finite",
    ),
    Defect(
        "Skipped minibatches in a row are not counted from one update to the next",
        MODULE,
        "count_skips(finite, self.skips_in_a_row)",
        "count_skips(finite, 0)",
        "tests/test_module.py::test_three_skipped_minibatches_in_a_row_end_the_run",
    ),
    Defect(
        "A policy whose weights are not finite goes on",
        MODULE,
        "        check_change(weight_change)\n",
        "",
        "tests/test_module.py::test_an_update_that_makes_the_weights_overflow_ends_the_run",
    ),
    # The update, and what is made of the settings.
    Defect(
        "The policy's gradient is not clipped",
        MODULE,
        "self.ppo.max_grad_norm)",
        'float("inf"))',
        UPDATE_BY_HAND,
    ),
    Defect(
        "The gradients of a minibatch are added to those of the one before",
        MODULE,
        "optimizer.zero_grad()",
        "pass",
        UPDATE_BY_HAND,
    ),
    Defect(
        "The weights of the value loss and of the entropy change places",
        MODULE,
        "self.ppo.value_coefficient, entropy_coefficient)",
        "entropy_coefficient, self.ppo.value_coefficient)",
        UPDATE_BY_HAND,
    ),
    Defect(
        "The largest ratio that is watched is the one of the last minibatch",
        f"{P}/losses.py",
        'stacked("ratio_high").max()',
        "last.ratio_high",
        UPDATE_BY_HAND,
    ),
    Defect(
        "The learning rate never comes to its end",
        MODULE,
        "max(1, self.trainer.max_epochs - 1)",
        "self.trainer.max_epochs",
        UPDATE_BY_HAND,
    ),
    Defect(
        "An update goes on however far the policy has moved",
        MODULE,
        "terms.kl.item() > self.ppo.kl_slack * self.ppo.target_kl",
        "terms.kl.item() > self.ppo.kl_slack",
        UPDATE_BY_HAND,
    ),
    Defect(
        "The bound on normalised features is ignored",
        MODULE,
        "settings.momentum, settings.clip)",
        "settings.momentum)",
        "tests/test_module.py::test_what_is_seen_is_normalised_as_was_asked_for",
    ),
    Defect(
        "Tamiyo is shown raw features after training",
        MODULE,
        "LearnedController(self.policy, self.observation_norm)",
        "LearnedController(self.policy, nn.Identity())",
        "tests/test_module.py::test_what_is_seen_is_normalised_as_was_asked_for",
    ),
)
