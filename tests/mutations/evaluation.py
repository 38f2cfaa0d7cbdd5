"""Defects of the comparison of controllers, of test metrics and of what reports them."""

from tests.mutations.defect import Defect

TASK = "esper_lightning/tasks/task.py"
METRICS = "tests/tasks/test_metrics.py"
REPORTED = "tests/cli/test_evaluate.py::test_the_class_accuracies_of_a_host_make_up_its_accuracy_and_reach_tensorboard"

RULES_ALONE = "tests/cli/test_evaluate.py::test_without_a_policy_rules_and_schedules_are_compared_on_the_same_hosts"
RIVALS = (
    "tests/cli/test_evaluate.py::"
    "test_rivals_of_other_trainings_meet_the_hosts_of_the_policy_and_observe_them_as_in_their_training"
)
FOREIGN = (
    "tests/cli/test_evaluate.py::test_a_rival_of_other_hosts_is_refused_in_one_line_that_names_the_difference"
    "[choices of the tempo head-]"
)

FLOPS_OF_A_STEP = "tests/evaluation/test_flops_meter.py::test_a_step_with_seeds_in_all_stages_costs_what_pytorch_counts"

DEFECTS: tuple[Defect, ...] = (
    Defect(
        "Logits between 0 and 1 are taken for probabilities",
        TASK,
        "probabilities = outputs.softmax(-1)",
        "probabilities = outputs",
        f"{METRICS}::test_the_calibration_error_is_the_gap_between_confidence_and_accuracy",
    ),
    Defect(
        "A class without samples is never recognised",
        TASK,
        "accuracies.masked_fill(is_absent, torch.nan).tolist()",
        "accuracies.tolist()",
        f"{METRICS}::test_a_class_is_measured_by_the_share_of_its_samples_that_are_recognised",
    ),
    Defect(
        "Perplexity is computed from probabilities as if they were logits",
        TASK,
        "perplexity(outputs, targets)",
        "perplexity(outputs.softmax(-1), targets)",
        f"{METRICS}::test_the_perplexity_of_text_is_the_exponential_of_its_loss",
    ),
    Defect(
        "Test metrics include seeds that were dropped",
        "esper_lightning/envs/execution/loop.py",
        "fossilized = [fossilized_only(env.network)]",
        "fossilized = [frozenset(env.growing.slots)]",
        REPORTED,
    ),
    Defect(
        "The policy's test metrics do not reach TensorBoard",
        "callbacks/evaluation.py",
        "for logger in trainer.loggers:",
        "for logger in ():",
        REPORTED,
    ),
    Defect(
        "An undefined metric is written as a number",
        "esper_lightning/evaluation/report.py",
        '"" if math.isnan(number) else f"{number:.9g}"',
        'f"{number:.9g}"',
        "tests/evaluation/test_report.py::test_a_metric_that_is_undefined_on_a_host_is_an_empty_cell",
    ),
    Defect(
        "Rules are compared with the first one of the project's list, not of the user's",
        "esper_lightning/evaluation/comparison.py",
        "(self.against or [UNGROWN_HOST])[0]",
        "UNGROWN_HOST",
        RULES_ALONE,
    ),
    Defect(
        "A checkpoint that a config replaces is forgotten without a word",
        "esper_lightning/cli/main.py",
        'if option_value("--ckpt_path", args) is not None:',
        "if False:",
        "tests/cli/test_evaluate.py::test_bad_input_ends_in_one_line[a checkpoint that the config replaces]",
    ),
    Defect(
        "A comparison without a policy and without rules begins",
        "esper_lightning/evaluation/comparison.py",
        "if self.against == []:",
        "if False:",
        "tests/cli/test_evaluate.py::test_bad_input_ends_in_one_line[nothing to compare]",
    ),
    Defect(
        "A rival observes what the policy observes",
        "esper_lightning/evaluation/comparison.py",
        "if rival.sight != pool.config.sight:",
        "if False:",
        RIVALS,
    ),
    Defect(
        "A rival meets other hosts than the policy",
        "esper_lightning/evaluation/comparison.py",
        "rival.greedy(), rng_seeds=rng_seeds)",
        "rival.greedy(), rng_seeds=[seed + 2 for seed in rng_seeds])",
        RIVALS,
    ),
    Defect(
        "Threads play episodes side by side with the same hosts and random numbers",
        "esper_lightning/evaluation/work.py",
        "if (PROCESS, os.getpid()) == origin:",
        "if False:",
        "tests/test_api.py::test_an_executor_of_threads_is_refused",
    ),
    Defect(
        "A rival's actions are masked although none were in its training",
        "esper_lightning/evaluation/checkpoints.py",
        "model.observation_norm, sight=sight)",
        "model.observation_norm, sight=ObservationConfig(shown=sight.shown, hidden=sight.hidden))",
        RIVALS,
    ),
    Defect(
        "A rival of other hosts takes part",
        "esper_lightning/evaluation/checkpoints.py",
        'check_identity(identity, hosts, "a rival must have been trained on these hosts, with these actions")',
        "pass",
        FOREIGN,
    ),
    Defect(
        "Rivals of one file name are one row",
        "esper_lightning/evaluation/checkpoints.py",
        '"/".join([*reversed(telling), file.name])',
        "file.name",
        "tests/evaluation/test_checkpoints.py::"
        "test_a_rival_is_named_by_its_file_and_by_the_folders_that_tell_it_from_others[paths1-names1]",
    ),
    Defect(
        "A policy is its own rival",
        "esper_lightning/cli/main.py",
        "                    check_distinct(paths)",
        "                    check_distinct(paths[: 1 + len(config.more)])",
        "tests/cli/test_evaluate.py::test_bad_input_ends_in_one_line[a policy as its own rival]",
    ),
    Defect(
        "A trial pass costs no compute",
        "esper_lightning/evaluation/flops_meter.py",
        "flops += PASSES_PER_TRIAL * compute.behind[name]",
        "pass",
        FLOPS_OF_A_STEP,
    ),
    Defect(
        "Blended seeds behind a trial cost nothing",
        "esper_lightning/evaluation/flops_meter.py",
        "flops += compute.seed_flops(other) * (1 if detached else PASSES_PER_TRIAL)",
        "pass",
        FLOPS_OF_A_STEP,
    ),
    Defect(
        "What lies before a slot counts as what lies behind it",
        "esper_lightning/envs/flops.py",
        "{name: total - flops for name, flops in before.items()}",
        "before",
        FLOPS_OF_A_STEP,
    ),
)
