import argparse

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeloom.cli.parser import Parser, count, number, per_stage


@pytest.fixture
def parser():
    made = Parser("weave", "NAME [OPTIONS]", "Weave a carpet.")
    made.add_argument("name", metavar="NAME", nargs="?", help="which one")
    made.add_argument("-k", "--knots", metavar="N", type=count, help="knots of a row")
    made.add_argument("--wool", action="store_true", help="of wool")
    return made


def refused(parser, capsys, *arguments):
    """The message with which a command ends at a wrong value."""
    with pytest.raises(SystemExit, match=r"^2$"):
        parser.parse(arguments)
    return capsys.readouterr().err


def test_options_are_parsed(parser):
    options = parser.parse(["kilim", "-k", "3", "--wool"])
    assert (options.name, options.knots, options.wool) == ("kilim", 3, True)


def test_help_does_not_depend_on_the_terminal(parser, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    with pytest.raises(SystemExit, match=r"^0$"):
        parser.parse(["--help"])
    shown = capsys.readouterr().out
    assert shown.startswith("usage: pipeloom weave NAME [OPTIONS]\n\nWeave a carpet.\n")
    assert "\n  -k, --knots N  knots of a row\n" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--knot", "3"], "--knot is no option\nhint: did you mean '--knots' or '--wool'?"),
        (["--knot=3"], "--knot is no option\nhint: did you mean '--knots' or '--wool'?"),
        (["-z"], "-z is no option\nhint: see pipeloom weave --help"),
        (["kilim", "sumak"], "'sumak' is one argument too many\nhint: see pipeloom weave --help"),
        (["--knots"], "argument -k/--knots: expected one argument\nhint: see pipeloom weave --help"),
        (["--knots", "x"], "argument -k/--knots: 'x' was given; a whole number is needed\n"),
        (["--wool=1"], "argument --wool: ignored explicit argument '1'\n"),
    ],
)
def test_wrong_arguments_end_with_one_message(parser, capsys, arguments, message):
    assert refused(parser, capsys, *arguments).startswith(f"pipeloom: error: {message}")


def test_shortened_options_are_refused(parser, capsys):
    """A shortened option would change its meaning with the next option that begins likewise."""
    assert "--woo is no option" in refused(parser, capsys, "--woo")


@given(st.integers(1))
def test_count_reads_whole_numbers(value):
    assert count(str(value)) == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0", "0 was given; at least 1 is needed"),
        ("-7", "-7 was given; at least 1 is needed"),
        ("1.0", "'1.0' was given; a whole number is needed"),
        ("", "'' was given; a whole number is needed"),
        ("9" * 5_000, "was given; a whole number is needed"),
    ],
)
def test_count_refuses_the_rest(text, message):
    with pytest.raises(argparse.ArgumentTypeError, match=message):
        count(text)


@given(st.lists(st.floats(allow_nan=False), min_size=2))
def test_list_is_read_back(values):
    assert per_stage(",".join(map(repr, values))) == values


@given(st.floats(allow_nan=False))
def test_number_is_read_back(value):
    assert number(repr(value)) == per_stage(repr(value)) == value


@pytest.mark.parametrize("text", ["one", "1;2", "1,two", "1,,2", ",", ""])
def test_what_is_no_number_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="was given; a number is needed"):
        per_stage(text)
