"""Texts of others are printed as they are: no markup, no codes that control a terminal."""

import logging

import pytest

from esper_lightning.console import NOISY_LOGGERS, print_status, quieter_lightning, wide_console

FOREIGN = {
    "markup": ("plain [old] x [/x] [red]", "plain [old] x [/x] [red]"),
    "emoji codes": (":warning: [link=http://x]", ":warning: [link=http://x]"),
    "a terminal's title": ("\x1b]0;owned\x07", r"\x1b]0;owned\x07"),
    "a cleared screen": ("\x1b[2J\x9b2J", r"\x1b[2J\x9b2J"),
    "a line that replaces another": ("bad\rgood\b", r"bad\rgood\x08"),
    "a changed direction": ("a\u202eb", r"a\u202eb"),
    "half a character": ("\udc80", r"\udc80"),
    "letters": ("größer – 数", "größer – 数"),
}


@pytest.mark.parametrize(("text", "shown"), FOREIGN.values(), ids=list(FOREIGN))
def test_a_text_of_others_is_printed_as_it_is(text: str, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    print_status(text)
    assert capsys.readouterr().out == f"{shown}\n"

    wide_console().print(text) if text.isprintable() else None
    assert capsys.readouterr().out == (f"{shown}\n" if text.isprintable() else "")


def test_advertisements_are_dropped_within_the_block_and_other_messages_are_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def say(*messages: str) -> None:
        for message in messages:
            logging.getLogger(NOISY_LOGGERS[0]).warning(message)

    before = {name: list(logging.getLogger(name).filters) for name in NOISY_LOGGERS}
    with caplog.at_level(logging.WARNING, logger=NOISY_LOGGERS[0]):
        logging.getLogger(NOISY_LOGGERS[0]).addHandler(caplog.handler)
        with quieter_lightning():
            say("Tip: buy this", "val_acc did not improve")
        say("Tip: buy that")
        logging.getLogger(NOISY_LOGGERS[0]).removeHandler(caplog.handler)

    # A process that drops them for good, as the command line does, goes on to drop them.
    expected = {"val_acc did not improve"} | (set() if before[NOISY_LOGGERS[0]] else {"Tip: buy that"})
    assert {record.getMessage() for record in caplog.records} == expected
    assert {name: logging.getLogger(name).filters for name in NOISY_LOGGERS} == before
