"""Texts of others are printed without markup, and advertisements are dropped."""

import logging

import pytest

from esper_lightning.runtime.console import NOISY_LOGGERS, print_status, quieter_lightning, wide_console


def test_a_text_of_others_is_printed_without_markup(capsys: pytest.CaptureFixture[str]) -> None:
    print_status("plain [old] x [/x] :warning:")
    wide_console().print("plain [old] x [/x] :warning:")
    assert capsys.readouterr().out == 2 * "plain [old] x [/x] :warning:\n"


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

    assert {record.getMessage() for record in caplog.records} == {"val_acc did not improve", "Tip: buy that"}
    assert {name: logging.getLogger(name).filters for name in NOISY_LOGGERS} == before
