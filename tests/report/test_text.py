"""Drawings, compared with what a person would draw."""

from array import array
from importlib import import_module
from inspect import getdoc
from pathlib import Path
from textwrap import dedent

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeloom.cost import Costs
from pipeloom.ir import Timeline
from pipeloom.ir.notation import parse_csv
from pipeloom.passes import add_transfers
from pipeloom.report import draw, shortest_action_s
from pipeloom.schedules import GENERATORS, schedule
from pipeloom.sim import simulate

GOLDEN = Path(__file__).parent / "golden"


def in_ticks(name, num_ranks, num_microbatches, **options):
    made = schedule(name, num_ranks=num_ranks, num_microbatches=num_microbatches, **options)
    return simulate(made, Costs.unit(made.num_stages))


def of_csv(text, **costs):
    made = parse_csv(text)
    units = {"forward_s": 1.0, "input_grad_s": 1.0, "weight_grad_s": 1.0}
    return simulate(made, Costs.uniform(made.num_stages, **{**units, **costs}))


def picture(text):
    return dedent(text).strip("\n")


@pytest.mark.parametrize("name", GENERATORS)
def test_docstring_shows_the_drawing(name):
    """The picture in a generator's docstring, the golden file and the drawing are one text."""
    golden = (GOLDEN / f"{name}_p4_m8.txt").read_text(encoding="utf-8").rstrip("\n")
    document = getdoc(import_module(GENERATORS[name].__module__)) or ""
    lines = [line.strip() for line in document.splitlines() if line.strip().startswith("GPU ")]
    assert draw(in_ticks(name, 4, 8), 1.0) == golden
    assert "\n".join(lines) == golden


def test_noise_of_floats_moves_nothing():
    """Nine times 0.05 is a hair less than 4.5 times 0.1."""
    made = schedule("gpipe", num_ranks=1, num_microbatches=10, forward_only=True)
    half, twentieth = (
        Costs.uniform(1, forward_s=forward_s, input_grad_s=0.0, weight_grad_s=0.0) for forward_s in (0.5, 0.05)
    )
    assert draw(simulate(made, twentieth), 0.1) == draw(simulate(made, half), 1.0)


def test_forward_only():
    assert draw(in_ticks("gpipe", 4, 6, forward_only=True), 1.0) == picture("""
        GPU 0: F0 F1 F2 F3 F4 F5  .  .  .
        GPU 1:  . F0 F1 F2 F3 F4 F5  .  .
        GPU 2:  .  . F0 F1 F2 F3 F4 F5  .
        GPU 3:  .  .  . F0 F1 F2 F3 F4 F5
        """)


def test_cells_grow_with_the_widest_label():
    lines = draw(in_ticks("1f1b", 2, 11), 1.0).splitlines()
    assert lines[0].startswith("GPU 0:  F0  F1   .   .  B0----  F2  B1----")
    assert lines[1].endswith(" F10 B10----   .   .")


def test_rank_numbers_are_aligned():
    lines = draw(in_ticks("gpipe", 11, 1, forward_only=True), 1.0).splitlines()
    assert [lines[0][:11], lines[10][:11]] == ["GPU  0: F0 ", "GPU 10:  . "]
    assert {len(line) for line in lines} == {len("GPU 10: ") + 11 * 3 - 1}


def test_labels_name_the_stage_where_a_rank_holds_several():
    drawn = draw(of_csv("0F0,3F0\n1F0,2F0\n"), 1.0)
    assert drawn == picture("""
        GPU 0: 0F0   .   . 3F0
        GPU 1:   . 1F0 2F0   .
        """)


def test_split_backward_and_recomputation():
    assert draw(of_csv("0F0,0R0,0I0,0W0\n"), 1.0) == "GPU 0: F0 R0 I0 W0"


def test_transfers_are_not_drawn():
    timeline = in_ticks("1f1b", 3, 4)
    lowered = simulate(add_transfers(timeline.schedule), Costs.unit(3))
    assert draw(lowered, 1.0) == draw(timeline, 1.0)


def test_width_follows_cost():
    timeline = of_csv("0F0,0F1\n1F0,1F1\n", forward_s=[1.0, 3.0])
    assert draw(timeline, 1.0) == picture("""
        GPU 0: F0 F1  .  .  .  .  .
        GPU 1:  . F0------ F1------
        """)


def test_halves_keep_their_width():
    """An action that begins between two columns is drawn as wide as one that does not."""
    timeline = of_csv("0F0,0F1\n1F0,1F1\n", transfer_s=0.5)
    assert draw(timeline, 1.0) == picture("""
        GPU 0: F0 F1  .
        GPU 1:  .   F0 F1
        """)


def test_action_without_time_is_not_drawn():
    assert draw(of_csv("0F0,0I0,0W0\n", weight_grad_s=0.0), 1.0) == "GPU 0: F0 I0"


def test_narrow_action_loses_its_label_not_its_place():
    timeline = of_csv("0F0,0F1\n1F0,1F1\n", forward_s=[0.3, 2.0])
    assert draw(timeline, 2.0) == "GPU 0: F   .\nGPU 1: F0 F1"


def test_measured_timelines_begin_when_they_begin():
    """A measured timeline does not start at second 0."""
    timeline = of_csv("0F0,0F1\n")
    later = Timeline(timeline.schedule, (array("d", [7.0, 8.0]),), (array("d", [8.0, 9.0]),))
    assert draw(later, 1.0) == "GPU 0: F0 F1"


@pytest.mark.parametrize("is_coloured", [False, True])
@given(width=st.integers(8, 60))
def test_cut_lines_have_the_width(is_coloured, width):
    timeline = in_ticks("1f1b", 4, 8)
    plain = draw(timeline, 1.0, width=width)
    assert {len(line) for line in plain.splitlines()} == {width}
    assert all(line.endswith("…") for line in plain.splitlines())
    assert all(
        full.startswith(cut[:-1])
        for full, cut in zip(draw(timeline, 1.0).splitlines(), plain.splitlines(), strict=True)
    )
    assert without_colour(draw(timeline, 1.0, width=width, is_coloured=is_coloured)) == plain


@pytest.mark.parametrize("width", [33, 34, 1_000, None])
def test_lines_that_fit_are_not_cut(width):
    timeline = in_ticks("gpipe", 4, 6, forward_only=True)
    assert draw(timeline, 1.0, width=width) == draw(timeline, 1.0)


def without_colour(text):
    for code in (0, 2, 32, 33, 34, 35, 36):
        text = text.replace(f"\x1b[{code}m", "")
    return text


def test_colour_is_added_to_the_same_text():
    timeline = of_csv("0F0,0R0,0I0,0W0,0F1,0B1\n1F0,1B0,1F1,1B1\n")
    coloured = draw(timeline, 1.0, is_coloured=True)
    assert without_colour(coloured) == draw(timeline, 1.0)
    assert all(code in coloured for code in ("34mF0", "35mR0", "36mI0", "33mW0", "32mB1---"))


def test_shortest_action_is_the_finest_tick():
    timeline = of_csv("0F0,0I0,0W0\n", forward_s=3.0, input_grad_s=0.5, weight_grad_s=0.0)
    assert shortest_action_s(timeline) == 0.5


def test_nothing_to_draw():
    timeline = of_csv("0F0\n", forward_s=0.0)
    assert (draw(timeline, 1.0), shortest_action_s(timeline)) == ("GPU 0:", 1.0)
