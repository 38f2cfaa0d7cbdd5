"""Defects of the command line's first look, of configs by name, and of what large requests say."""

from tests.mutations.defect import Defect

CONFIGS = "esper_lightning/cli/configs.py"
FRONT = "esper_lightning/cli/front.py"
OPTIONS = "esper_lightning/cli/options.py"
TEST_FRONT = "tests/cli/test_front.py::test_"
TEST_MISTAKES = "tests/cli/test_mistakes.py::test_"

DEFECTS = (
    Defect(
        "A config of the package hides a file of the user",
        CONFIGS,
        "if path.exists() and not path.is_dir():",
        "if name not in config_names() and path.exists():",
        f"{TEST_FRONT}a_config_is_found_by_its_name_unless_a_file_has_it",
    ),
    Defect(
        "A folder beside the user hides a config of the package",
        CONFIGS,
        "if path.exists() and not path.is_dir():",
        "if path.exists():",
        f"{TEST_FRONT}a_config_is_found_by_its_name_unless_a_file_has_it",
    ),
    Defect(
        "A copy of a config replaces a file of the user",
        CONFIGS,
        "if target.exists():",
        "if False:",
        f"{TEST_FRONT}a_config_is_copied_once",
    ),
    Defect(
        "Every answer imports torch",
        FRONT,
        "from esper_lightning.console import exit_with_error",
        "from esper_lightning.errors import exit_with_error",
        f"{TEST_FRONT}answers_without_settings_import_neither_torch_nor_lightning",
    ),
    Defect(
        "A mistyped setting in a config is left to the parser, which takes seconds",
        FRONT,
        'raise ValueError(f"config {str(path)!r}: unknown setting {name!r}; {unknown_option(name, options)}")',
        "continue",
        f"{TEST_MISTAKES}a_mistyped_command_option_or_file_is_answered_before_torch_is_imported",
    ),
    Defect(
        "A number in place of a schedule is only its start",
        FRONT,
        'for end in ("start", "end")]',
        'for end in ("start",)]',
        f"{TEST_FRONT}other_options_reach_the_parser_as_they_are_meant",
    ),
    Defect(
        "A number in place of a schedule is refused in a config",
        OPTIONS,
        'parent[last] = {"start": value, "end": value}',
        "pass",
        "tests/cli/test_unique_keys.py::test_a_number_in_place_of_a_schedule_is_constant",
    ),
    Defect(
        "An option that only one command has is suggested last",
        OPTIONS,
        "key=lambda option: len(option.commands))",
        "key=lambda option: -len(option.commands))",
        f"{TEST_MISTAKES}a_mistyped_command_option_or_file_is_answered_before_torch_is_imported",
    ),
    Defect(
        "A new comparison removes the schedules of a search",
        "esper_lightning/evaluation/run.py",
        r'r"schedule\d*\.json',
        r'r".*schedule\d*\.json',
        "tests/evaluation/test_run.py::test_files_of_an_earlier_comparison_are_removed_and_those_of_the_user_and_of_a_"
        "search_stay",
    ),
    Defect(
        "The time of the first hosts is announced for all",
        "esper_lightning/envs/building.py",
        "seconds = (perf_counter() - begun) * share",
        "seconds = perf_counter() - begun",
        "tests/envs/test_building.py::test_hosts_that_take_long_are_announced",
    ),
    Defect(
        "The entropy of a head with one choice is plotted",
        "esper_lightning/ppo/losses.py",
        "number in by_head if choices > 1}",
        "number in by_head}",
        "tests/ppo/test_losses.py::test_a_head_with_one_choice_has_no_entropy_to_plot",
    ),
)
