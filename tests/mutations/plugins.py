"""Defects of parts by name, of work in processes, and of the functions for Python programs."""

from tests.mutations.defect import Defect

PLUGINS, TRUST = "esper_lightning/plugins.py", "esper_lightning/cli/trust.py"
T = "tests/test_plugins.py"
REFUSED = "tests/cli/test_trust.py::test_a_config_beside_a_checkpoint_is_refused_in_a_line"

DEFECTS: tuple[Defect, ...] = (
    Defect(
        "The import path of a reward, blueprint, executor or controller beside a checkpoint is not checked",
        TRUST,
        "            if last in PLUGIN_SETTINGS:",
        "            if last in ():",
        REFUSED,
    ),
    Defect(
        "The config beside a checkpoint may import any module",
        TRUST,
        'if self._trusted_package(f"{name}.") is None:',
        "if not name:",
        REFUSED,
    ),
    Defect(
        "A checkpoint may import modules by the names of its blueprints",
        "esper_lightning/datamodules/hosts.py",
        "                check_blueprint_name(str(name))  # a name",
        "                name = name  # a name",
        f"{T}::test_a_further_blueprint_changes_no_run_that_exists",
    ),
    Defect(
        "A resumed run offers blueprints that were registered since",
        "esper_lightning/datamodules/hosts.py",
        "blueprints=config.blueprints or self.saved_blueprints)",
        "blueprints=config.blueprints)",
        f"{T}::test_a_further_blueprint_changes_no_run_that_exists",
    ),
    Defect(
        "Blueprints that no setting names are offered",
        "esper_lightning/blueprints/registry.py",
        " and is_of_this_package(b.build)]",
        "]",
        f"{T}::test_what_no_setting_names_is_not_offered",
    ),
    Defect(
        "A reward may leave out terms that it has declared",
        "esper_lightning/rewards/modes.py",
        "if set(terms) != set(declared):",
        "if set(terms) > set(declared):",
        f"{T}::test_parts_that_are_not_what_they_should_be_are_refused_in_a_sentence",
    ),
    Defect(
        "The name of a part may be taken twice",
        PLUGINS,
        "        if name in self and not is_same_definition(",
        "        if name is None and not is_same_definition(",
        f"{T}::test_parts_that_are_not_what_they_should_be_are_refused_in_a_sentence",
    ),
    Defect(
        "A part that is defined again is refused",
        PLUGINS,
        " and not is_same_definition(self.registered.get(name), made_from):",
        ":",
        f"{T}::test_a_part_that_is_defined_again_replaces_the_first",
    ),
    Defect(
        "A module that fails is taken for one that is missing",
        PLUGINS,
        'if error.name is None or not f"{name}.".startswith(f"{error.name}."):',
        "if error.name is None:",
        f"{T}::test_a_module_that_fails_is_told_from_one_that_is_missing",
    ),
    Defect(
        "A reward may be NaN on a healthy host",
        "esper_lightning/rewards/modes.py",
        "if not isfinite(number) and all(",
        "if number is None and all(",
        f"{T}::test_parts_that_are_not_what_they_should_be_are_refused_in_a_sentence",
    ),
    Defect(
        "A reward of the user is blamed for the NaN of a host",
        "esper_lightning/rewards/modes.py",
        "all(isfinite(part) for part in step if isinstance(part, float)):",
        "step.op:",
        f"{T}::test_a_term_may_be_a_tensor_of_one_number_and_is_nan_where_the_host_is",
    ),
    Defect(
        "Actions of a controller of the user are first looked at after the training",
        "esper_lightning/cli/main.py",
        "        comparison.check_controllers(self.datamodule)\n",
        "",
        "tests/cli/test_own_parts.py::test_a_part_that_cannot_be_used_is_refused_in_a_line_before_a_run_begins",
    ),
    Defect(
        "A blueprint may declare other parameters than it has",
        "esper_lightning/blueprints/registry.py",
        "if declared != counted:",
        "if declared is None:",
        "tests/cli/test_own_parts.py::test_a_part_that_cannot_be_used_is_refused_in_a_line_before_a_run_begins",
    ),
    Defect(
        "The last layer of a seed within a Sequential is not zeroed",
        "esper_lightning/blueprints/residual.py",
        "return _last_layer(body[-1]) if",
        "return body[-1] if",
        "tests/blueprints/test_residual.py::test_the_last_layer_may_stand_within_a_sequential",
    ),
    Defect(
        "A run of Python does not record its software",
        "esper_lightning/api.py",
        "            RunRecord(),\n",
        "",
        "tests/test_api.py::test_a_run_of_python_records_its_software_and_names_the_way_to_compare_it",
    ),
    Defect(
        "Installed packages bring no parts",
        PLUGINS,
        "            point.load()",
        "            point.name",
        f"{T}::test_an_installed_package_brings_parts",
    ),
    Defect(
        "An item whose worker has died is not tried again",
        "esper_lightning/parallel.py",
        "ATTEMPTS = 2",
        "ATTEMPTS = 1",
        "tests/test_parallel.py::test_a_worker_that_dies_is_replaced_once",
    ),
    Defect(
        "Workers do not import the modules of the setting",
        "esper_lightning/parallel.py",
        "    import_modules(modules)",
        "    pass",
        "tests/test_parallel.py::test_workers_import_the_modules_of_the_setting",
    ),
    Defect(
        "Workers of a sweep that was killed go on",
        "esper_lightning/parallel.py",
        "    watch_parent(_end_worker)\n",
        "",
        "tests/test_parallel.py::test_a_worker_ends_with_the_process_that_started_it",
    ),
    Defect(
        "A policy is trained without the Governor",
        "esper_lightning/api.py",
        "*([] if governor is None else [Governor(governor)]),",
        "",
        "tests/test_api.py::test_python_and_the_command_line_train_the_same_policy",
    ),
)
