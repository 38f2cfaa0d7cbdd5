"""Standard streams and signals: a program ends in one line and with its exit code, whatever happens to them."""

import errno
import io
import os
import signal
import sys
import threading
from pathlib import Path
from signal import SIGHUP, SIGINT, SIGTERM

import pytest

from esper_lightning.process import Output, exits_on_signals, silent_threads, watched_streams
from tests.processes import forked, run_in_fork


class Failing(io.StringIO):
    """Stream that accepts some lines and then fails."""

    def __init__(self, error: OSError, lines: int = 0) -> None:
        super().__init__()
        self.error = error
        self.lines = lines

    def write(self, text: str) -> int:
        if len(self.getvalue().splitlines()) >= self.lines:
            raise self.error
        return super().write(text)


GONE = BrokenPipeError(errno.EPIPE, "Broken pipe")
FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(("error", "code"), [(GONE, 141), (FULL, 1)])
def test_an_output_that_fails_ends_the_program_in_a_line(
    error: OSError, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    output = Output(Failing(error, lines=1))
    output.write("first\n")
    with pytest.raises(SystemExit) as ended:
        output.write("second\n")

    assert ended.value.code == code
    assert len(capsys.readouterr().err.splitlines()) == 1
    output.write("third\n")  # by what runs while the program ends


def test_a_failure_is_noted_and_ends_nothing_while_it_is_deferred(capsys: pytest.CaptureFixture[str]) -> None:
    output = Output(Failing(GONE), deferred=True)
    output.write("first\n")
    output.flush()

    assert output.failure is GONE and output.exit_code == 141
    assert capsys.readouterr().err == ""
    output.deferred = False
    with pytest.raises(SystemExit):
        output.flush()


def test_a_failure_in_another_thread_ends_the_main_thread(capsys: pytest.CaptureFixture[str]) -> None:
    output = Output(Failing(GONE))
    thread = threading.Thread(target=output.write, args=("first\n",))
    thread.start()
    thread.join()

    assert output.failure is GONE and capsys.readouterr().err == ""
    with pytest.raises(SystemExit):
        output.write("second\n")


def test_a_pipe_without_a_reader_fails_once_and_not_again_when_it_is_closed() -> None:
    reading, writing = os.pipe()
    stream = os.fdopen(writing, "w")
    output = Output(stream, deferred=True)
    output.write("in the buffer\n")
    os.close(reading)
    output.flush()

    assert isinstance(output.failure, BrokenPipeError)
    output.write("more\n")
    stream.close()


def test_a_closed_terminal_is_no_failure() -> None:
    terminal, side = os.openpty()
    stream = os.fdopen(side, "w")
    output = Output(stream)
    os.close(terminal)
    output.write("a line\n")
    output.flush()

    assert output.failure is None
    stream.close()


@pytest.mark.parametrize("number", [SIGTERM, SIGINT, SIGHUP])
def test_a_signal_ends_the_process_in_a_line_whatever_would_catch_an_exception(number: signal.Signals) -> None:
    def run() -> None:
        signal.signal(number, signal.SIG_DFL)  # a shell's background job ignores SIGINT
        with exits_on_signals(lambda: "in a test"):
            try:
                os.kill(os.getpid(), number)
            except BaseException:
                os._exit(9)

    assert run_in_fork(run) == (128 + number, f"error: stopped by {number.name} in a test\n")


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    def run() -> None:
        signal.signal(SIGHUP, signal.SIG_IGN)  # as nohup does
        with exits_on_signals(lambda: ""):
            os.kill(os.getpid(), SIGHUP)

    assert run_in_fork(run) == (0, "")


def test_handlers_are_those_of_before_behind_the_context() -> None:
    before = [signal.getsignal(number) for number in (SIGTERM, SIGINT, SIGHUP)]
    with exits_on_signals(lambda: ""):
        assert signal.getsignal(SIGTERM) not in before
    assert [signal.getsignal(number) for number in (SIGTERM, SIGINT, SIGHUP)] == before


def test_no_file_gets_the_number_of_a_standard_stream_that_was_closed(tmp_path: Path) -> None:
    def run() -> None:
        for descriptor in range(3):
            os.close(descriptor)
        sys.stdout = sys.stderr = None
        with watched_streams():
            opened = os.open(tmp_path / "file", os.O_WRONLY | os.O_CREAT)
            print("out")
            print("err", file=sys.stderr)
            os.write(2, b"from a library")
            assert opened > 2

    with forked(run) as fork:
        assert fork.wait() == 0
    assert (tmp_path / "file").read_bytes() == b""


def test_a_character_that_an_encoding_lacks_is_written_as_an_escape(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    with watched_streams():
        print("0.5 ± 0.1 \udcff")

    assert written.getvalue() == b"0.5 \\xb1 0.1 \\udcff\n"


def test_a_line_is_in_a_log_file_as_soon_as_it_is_printed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("w") as file:
        monkeypatch.setattr(sys, "stdout", file)
        with watched_streams():
            print("rollout 1")
            assert log.read_text() == "rollout 1\n"


@pytest.mark.parametrize(("ended_with", "code"), [(0, 141), (2, 2), (None, 141)])
def test_an_output_that_fails_at_the_end_is_the_reason_unless_there_is_another(
    ended_with: int | None, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class FailsAtTheEnd(io.StringIO):
        def flush(self) -> None:
            raise GONE

    monkeypatch.setattr(sys, "stdout", FailsAtTheEnd())
    with pytest.raises(SystemExit) as ended, watched_streams():
        if ended_with is not None:
            raise SystemExit(ended_with)
    assert ended.value.code == code


def test_of_a_package_whose_threads_are_silent_only_other_threads_are_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    class Writer(threading.Thread):
        __module__ = "tensorboard.writer"

    heard: list[object] = []
    monkeypatch.setattr(threading, "excepthook", lambda error: heard.append(error.exc_value))
    with silent_threads("tensorboard"):
        for kind in (Writer, threading.Thread):
            thread = kind(target=int, args=("x",))
            thread.start()
            thread.join()
    assert len(heard) == 1
