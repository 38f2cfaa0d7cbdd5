"""Defects of how the program ends."""

from tests.mutations.defect import Defect

DEFECTS: tuple[Defect, ...] = (
    Defect(
        "A reader that goes away ends a run before it is saved",
        "callbacks/preemption.py",
        "            sys.stdout.deferred = True\n",
        "            sys.stdout.deferred = False\n",
        "tests/faults/test_endings.py::test_a_reader_that_goes_away_in_training_ends_the_run_after_it_is_saved",
    ),
    Defect(
        "A run goes on although nothing reads its output",
        "callbacks/preemption.py",
        "output is not None and output.failure is not None",
        "False",
        "tests/faults/test_endings.py::test_a_reader_that_goes_away_in_training_ends_the_run_after_it_is_saved",
    ),
    Defect(
        "A closed output has the exit code of a full disk",
        "esper_lightning/process.py",
        "return EXIT_READER_GONE if isinstance(self.failure, BrokenPipeError) else EXIT_OUTPUT_FAILED",
        "return EXIT_OUTPUT_FAILED",
        "tests/test_process.py::test_an_output_that_fails_ends_the_program_in_a_line",
    ),
    Defect(
        "Text in the buffer of a closed output fails again when the program ends",
        "esper_lightning/process.py",
        "            os.dup2(null, descriptor)",
        "            pass",
        "tests/test_process.py::test_a_pipe_without_a_reader_fails_once_and_not_again_when_it_is_closed",
    ),
    Defect(
        "A checkpoint gets the number of a closed stderr, and messages are written into it",
        "esper_lightning/process.py",
        "            os.open(os.devnull, os.O_RDWR)",
        "            pass",
        "tests/test_process.py::test_no_file_gets_the_number_of_a_standard_stream_that_was_closed",
    ),
    Defect(
        "A closed terminal ends a run under nohup",
        "esper_lightning/process.py",
        "if signal.getsignal(number) not in (signal.SIG_IGN, None)]",
        "]",
        "tests/test_process.py::test_a_signal_that_is_ignored_stays_ignored",
    ),
    Defect(
        "A run whose terminal is closed is lost",
        "esper_lightning/process.py",
        "(signal.SIGTERM, signal.SIGINT, signal.SIGHUP)",
        "(signal.SIGTERM, signal.SIGINT)",
        "tests/test_process.py::test_a_signal_ends_the_process_in_a_line_whatever_would_catch_an_exception",
    ),
    Defect(
        "An error in code of the user is called an error in a setting",
        "esper_lightning/errors.py",
        "        if find_user_part(error) is not None:\n            raise\n",
        "",
        "tests/faults/test_endings.py::test_an_error_in_code_of_the_user_is_told_apart",
    ),
    Defect(
        "An error of this project is blamed on the user who calls it",
        "esper_lightning/user_code.py",
        "        if _package(frame) == OUR_PACKAGE:\n            return None\n",
        "",
        "tests/test_user_code.py::test_what_this_project_raises_is_its_own_even_if_a_user_calls_it",
    ),
    Defect(
        "An error in a loader's worker process is called one of this project",
        "esper_lightning/user_code.py",
        'if name == LOADER_PACKAGE or name.startswith(f"{LOADER_PACKAGE}."):',
        "if False:",
        "tests/test_user_code.py::test_what_a_loader_raises_is_of_the_user_even_from_a_worker_process",
    ),
    Defect(
        "A folder for results in which no file can be made is found after the work",
        "esper_lightning/serialization/replace.py",
        "        with TemporaryFile(dir=folder):\n            pass\n",
        "",
        "tests/serialization/test_replace.py::"
        "test_a_folder_in_which_no_file_can_be_made_is_refused_before_there_are_results",
    ),
    Defect(
        "A thread that the system does not start ends the program with a traceback",
        "esper_lightning/errors.py",
        "isinstance(cause, RuntimeError) and str(cause) == NO_THREAD_TEXT",
        "False",
        "tests/faults/test_disk.py::test_a_thread_that_the_system_does_not_start_is_told_with_the_limit",
    ),
    Defect(
        "A folder that may not be written to ends a run with a traceback",
        "esper_lightning/errors.py",
        " | NotADirectoryError | PermissionError",
        " | NotADirectoryError",
        "tests/faults/test_disk.py::test_a_run_whose_folder_is_removed_or_may_not_be_written_ends_in_one_line",
    ),
    Defect(
        "An export hides why its file cannot be written",
        "esper_lightning/growth/export.py",
        "torch.save(network.state_dict(), file)",
        "torch.save(network.state_dict(), path)",
        "tests/faults/test_disk.py::test_an_export_on_a_full_disk_names_the_reason_and_leaves_the_earlier_file",
    ),
    Defect(
        "A loader without an end takes all memory",
        "esper_lightning/tasks/datamodule.py",
        "if len(batches) > MAX_BATCHES or size > MAX_MEMORY_SHARE * main_memory():",
        "if len(batches) > MAX_BATCHES:",
        "tests/faults/test_endings.py::test_a_loader_that_never_ends_is_refused",
    ),
    Defect(
        "TensorBoard's thread prints its traceback beside the line about a full disk",
        "esper_lightning/process.py",
        '.partition(".")[0] != package:',
        '.partition(".")[0] != "":',
        "tests/test_process.py::test_of_a_package_whose_threads_are_silent_only_other_threads_are_heard",
    ),
)
