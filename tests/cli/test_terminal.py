import io
import os

import pytest

from pipeloom.cli.terminal import close_quietly, columns_of, is_coloured, print_error, write_anything


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in ("NO_COLOR", "FORCE_COLOR", "TERM", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("environment", "on_terminal", "in_file"),
    [
        ({}, True, False),
        ({"TERM": "xterm-256color"}, True, False),
        ({"TERM": "dumb"}, False, False),
        ({"NO_COLOR": "1"}, False, False),
        ({"NO_COLOR": ""}, True, False),
        ({"FORCE_COLOR": "1"}, True, True),
        ({"FORCE_COLOR": ""}, True, False),
        ({"FORCE_COLOR": "1", "TERM": "dumb"}, True, True),
        ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, False, False),
    ],
    ids=lambda value: " ".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else None,
)
def test_who_is_coloured(monkeypatch, environment, on_terminal, in_file):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert is_coloured(Terminal()) == on_terminal
    assert is_coloured(io.StringIO()) == in_file


def test_width_is_that_of_the_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "57")
    assert columns_of(Terminal()) == 57
    assert columns_of(io.StringIO()) is None


@pytest.mark.parametrize(
    ("hint", "text"),
    [(None, "pipeloom: error: no\n"), ("do", "pipeloom: error: no\nhint: do\n")],
)
def test_error_is_one_message(capsys, hint, text):
    print_error("no", hint)
    assert capsys.readouterr() == ("", text)


def test_what_the_encoding_lacks_becomes_a_question_mark():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    write_anything(stream)
    stream.write("F0 …")
    stream.flush()
    assert raw.getvalue() == b"F0 ?"


def test_stream_without_an_encoding_is_left_alone():
    stream = io.StringIO()
    write_anything(stream)
    stream.write("…")
    assert stream.getvalue() == "…"


def test_closed_pipe_swallows_what_is_left():
    """What is still in the buffer when a pipe breaks would raise again when Python exits."""
    reader, writer = os.pipe()
    stream = os.fdopen(writer, "w")
    os.close(reader)
    stream.write("nobody reads this")
    with pytest.raises(BrokenPipeError, match="Broken pipe"):
        stream.flush()
    close_quietly(stream)
    stream.close()
    assert stream.closed


def test_stream_without_a_file_is_left_alone():
    stream = io.StringIO()
    close_quietly(stream)
    assert not stream.closed
