"""Defects of test metrics and of what reports them."""

from tests.mutations.defect import Defect

TASK = "esper_lightning/tasks/task.py"
METRICS = "tests/tasks/test_metrics.py"
REPORTED = "tests/cli/test_evaluate.py::test_the_class_accuracies_of_a_host_make_up_its_accuracy_and_reach_tensorboard"

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
)
