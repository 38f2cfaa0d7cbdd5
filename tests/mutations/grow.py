"""Defects of the callback that grows a user's own network."""

from tests.mutations.defect import Defect

CALLBACK = "tests/callbacks/grow/test_callback.py::"

DEFECTS: tuple[Defect, ...] = (
    Defect(
        "The slots of a checkpoint are not there when its weights are loaded",
        "callbacks/grow/callback.py",
        "self._attach_saved(checkpoint)",
        "pass",
        f"{CALLBACK}test_a_resumed_run_equals_one_that_never_stopped",
    ),
    Defect(
        "A resumed run forgets the validation that no decision has followed",
        "callbacks/grow/callback.py",
        "None if self._pending is None else list(self._pending)",
        "None",
        f"{CALLBACK}test_a_resumed_run_equals_one_that_never_stopped",
    ),
    Defect(
        "A resumed run leaves out a step of a scheduler on a plateau",
        "callbacks/grow/callback.py",
        "config.scheduler.step(value)",
        "pass",
        f"{CALLBACK}test_a_run_is_resumed_bit_for_bit_under_every_scheduler",
    ),
    Defect(
        "Seeds and host are clipped by one norm",
        "callbacks/grow/fitting.py",
        "for part in (host_groups(raw), *([seed] for seed in seed_groups(raw))):",
        "for part in (groups,):",
        f"{CALLBACK}test_a_host_is_clipped_as_if_its_seed_were_not_there",
    ),
    Defect(
        "Each process trains its seeds by its own gradients",
        "callbacks/grow/fitting.py",
        "parameter.grad = part.view_as(parameter).clone()",
        "pass",
        "tests/callbacks/grow/test_ddp.py::test_two_processes_grow_the_same_network",
    ),
    Defect(
        "A seed is compared with itself",
        "callbacks/grow/scoring.py",
        "SeedSlot.active_output if name in variant else _without_seed",
        "SeedSlot.active_output",
        f"{CALLBACK}test_contributions_are_those_of_switching_each_seed_off",
    ),
    Defect(
        "Measuring seeds spoils what the module collects in an epoch",
        "callbacks/grow/scoring.py",
        "copy.copy(value) if isinstance(value, dict | list | set) else value",
        "value",
        f"{CALLBACK}test_a_loss_is_a_metric_too_and_what_an_epoch_collects_stays_clean",
    ),
    Defect(
        "Measuring seeds draws from the random numbers of the training",
        "callbacks/grow/scoring.py",
        "    with isolate_rng():\n        return list(islice(loaders, int(limit)))",
        "    return list(islice(loaders, int(limit)))",
        f"{CALLBACK}test_a_training_in_which_nothing_grows_is_bit_for_bit_that_without_the_callback",
    ),
    Defect(
        "Seeds are judged by the gradients of the first step after a decision",
        "callbacks/grow/callback.py",
        "is_due = may_be_last_step(trainer) or (self._may_skip_steps and self._gradients is None)",
        "is_due = self._gradients is None",
        f"{CALLBACK}test_seeds_are_judged_by_the_gradients_of_the_last_step_before_a_validation",
    ),
    Defect(
        "Gradients of seeds are measured at every step",
        "callbacks/grow/callback.py",
        "is_due = may_be_last_step(trainer) or (self._may_skip_steps and self._gradients is None)",
        "is_due = True",
        f"{CALLBACK}test_gradients_are_measured_at_the_last_step_of_a_tick_alone",
    ),
    Defect(
        "Seeds of a training that a timer stopped seem to learn nothing",
        "callbacks/grow/callback.py",
        "if self._gradients is None and not self._may_skip_steps:",
        "if False:",
        f"{CALLBACK}test_a_training_that_a_timer_stops_within_an_epoch_knows_the_gradients_of_its_last_step",
    ),
    Defect(
        "A decision is made by what was observed before the last one",
        "esper_lightning/envs/single_pool.py",
        "if not (last_op is self.subject.last_op is Op.WAIT):",
        "if False:",
        f"{CALLBACK}test_deciders_and_callbacks_see_the_network_as_it_is",
    ),
    Defect(
        "A policy decides by an observation of an earlier tick",
        "esper_lightning/envs/single_pool.py",
        "self._builder.update_masks()\n        self._is_observed = False",
        "self._builder.update_masks()",
        f"{CALLBACK}test_deciders_and_callbacks_see_the_network_as_it_is",
    ),
    Defect(
        "Networks of an earlier, larger comparison stay",
        "esper_lightning/evaluation/networks.py",
        "(rank / name).unlink(missing_ok=True)",
        "pass",
        "tests/evaluation/test_run.py::"
        "test_networks_of_an_earlier_comparison_are_removed_and_what_was_exported_beside_them_stays",
    ),
    Defect(
        "An export into a folder that cannot be written to names no way out",
        "esper_lightning/cli/export.py",
        "        make_folder(path.parent)\n",
        "",
        "tests/cli/test_export.py::test_mistakes_are_answered_in_one_line",
    ),
    Defect(
        "A decider continues from the state of another one",
        "callbacks/grow/deciders.py",
        'if saved["class"] != type(decider).__name__:',
        "if False:",
        f"{CALLBACK}test_a_checkpoint_of_other_growth_is_refused",
    ),
    Defect(
        "A run is resumed without some of the slots of its checkpoint",
        "callbacks/grow/callback.py",
        "slots = [name for name in slots_of(self.network) if name in self._own_slots]",
        "slots = list(slots_of(self.network))",
        f"{CALLBACK}test_a_checkpoint_of_other_growth_is_refused",
    ),
    Defect(
        "A comparison replaces an earlier one without a word",
        "esper_lightning/evaluation/run.py",
        "if (folder / RESULTS_FILE).is_file():",
        "if False:",
        "tests/cli/test_evaluate.py::test_a_line_says_that_an_earlier_comparison_will_be_replaced",
    ),
    Defect(
        "The file of another network is refused with the shape of the wrong side",
        "esper_lightning/growth/saving.py",
        "is {_shape_of(found, first)} in the file",
        "is {_shape_of(expected, first)} in the file",
        "tests/growth/test_saving.py::test_a_spoilt_file_is_refused_in_one_line_and_the_network_stays_as_it_was",
    ),
    Defect(
        "A disturbed minibatch decides the cost of an epoch",
        "benchmarks/grow.py",
        "np.median(part, axis=0) for part in parts",
        "np.mean(part, axis=0) for part in parts",
        "tests/test_benchmarks.py::"
        "test_the_cost_of_an_epoch_counts_each_minibatch_with_its_share_and_ignores_disturbed_ones",
    ),
    Defect(
        "A network that has its slots already is refused beside another one",
        "callbacks/grow/refusals.py",
        "missing = [name for name in slots if name not in existing]",
        "missing = slots",
        "tests/callbacks/grow/test_refusals.py::test_of_two_networks_the_one_that_has_the_slots_already_is_found",
    ),
)
