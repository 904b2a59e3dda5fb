"""Who keeps everybody waiting: the chain, the text, and what ranks answer."""

import re
import signal
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeloom.peers import Failures, Stalls, State, stall
from pipeloom.peers.stall import chain_from, render
from tests.peers.ranks import meshes, processes, run

GOLDEN = Path(__file__).with_name("stall_reports.txt")
STACK = '  File "train.py", line 7, in forward\n    while True: pass\n'

CASES = {
    "a chain": [
        State(0, "the end of step 7", 1, 30.04),
        State(1, "stage 1, micro-batch 3, RECV_F of step 7", 2, 30.5),
        State(2, "stage 2, micro-batch 3, action 2F3 of step 7", None, 31.0, STACK),
        State(3, "the end of step 7", 2, 29.0),
    ],
    "itself": [State(0, "outside a step, after step 12", None, 40.0, STACK), State(1, "the end of step 13", 0, 30.0)],
    "a circle": [
        State(0, "stage 0, micro-batch 1, RECV_B", 1, 30.0, STACK),
        State(1, "stage 1, micro-batch 2, RECV_F", 2, 30.0, STACK),
        State(2, "stage 2, micro-batch 2, RECV_F", 1, 30.0, STACK),
    ],
    "silence": [State(0, "the end of step 7", 1, 30.0), State(1, "")],
}


def by_rank(states):
    return {state.rank: state for state in states}


def reports():
    """The text of each case."""
    cases = [(name, by_rank(states)) for name, states in CASES.items()]
    return "\n\n".join(f"# {name}\n{render(chain_from(0, states), states)}" for name, states in cases) + "\n"


def test_reports_are_as_reviewed():
    """`python -m tests.peers.test_stall` writes the file anew."""
    assert reports() == GOLDEN.read_text("utf-8")


@given(st.lists(st.none() | st.integers(0, 7), min_size=8, max_size=8))
def test_a_chain_ends_where_nobody_is_waited_for_or_in_a_circle(waits):
    states = by_rank([State(rank, "it", waits_for) for rank, waits_for in enumerate(waits)])
    chain = chain_from(0, states)
    assert all(states[one].waits_for == other for one, other in pairwise(chain))
    assert states[chain[-1]].waits_for is None or chain[-1] in chain[:-1]
    assert len(set(chain[:-1])) == len(chain) - 1


@pytest.fixture
def asking():
    """Rank 0 of 3, which may ask; rank 2 does not answer until it is started."""
    with meshes(3) as made:
        made_stalls = [Stalls(mesh, Failures(mesh, str), lambda r=mesh.rank: doing(r)) for mesh in made]
        made[0].start(), made[1].start()
        yield made_stalls[0], made[2]


def doing(rank):
    return State(99, f"the work of {rank}", None if rank == 1 else 1, 2.0 * rank)


def test_every_rank_answers(asking):
    stalls, last = asking
    last.start()
    states = stalls.ask()
    assert [(state.rank, state.doing, state.waits_for, state.since_s) for state in states.values()] == [
        (0, "the work of 0", 1, 0.0),
        (1, "the work of 1", None, 2.0),
        (2, "the work of 2", 1, 4.0),
    ]
    assert all("test_every_rank_answers" in state.stack for state in states.values())


def test_who_does_not_answer_is_not_waited_for(monkeypatch, asking):
    monkeypatch.setattr(stall, "_ANSWER_S", 0.1)
    states = asking[0].ask()
    assert [state.doing for state in states.values()] == ["the work of 0", "the work of 1", ""]
    assert states[2].line == "rank 2 does not answer: its process is stopped, or its Python is held"


def test_a_late_answer_is_none_to_the_next_question(monkeypatch, asking):
    stalls, _ = asking
    monkeypatch.setattr(stall, "_ANSWER_S", 0.1)
    stalls.ask()
    stalls._answers.put(State(2, "what it did long ago"))
    assert stalls.ask()[2].doing == ""


def test_the_cause_is_the_rank_at_the_end_of_the_chain(asking):
    asking[1].start()
    cause = asking[0].cause("the end of step 7", 30.0)
    assert (cause.rank, cause.kind, cause.place) == (1, "stalled", "the work of 1")
    assert cause.message == "keeps the others waiting; rank 0 has waited 30 s (the limit) for the end of step 7"
    assert "who waits for whom: rank 0 -> rank 1, which waits for nobody" in cause.traceback


STALLING = """
def spin():
    while True:
        {stuck}

me.ready()
if me.rank == 2:
    spin()
me.state = State(me.rank, "step 7", waits_for={peer})
me.collective._limit_s = 0.5
me.collective.on_stall = lambda _, what: me.stalls.cause(what, 0.5)
me.gather("step 7")
"""
LAST = r"rank 2, the work of 2: keeps the others waiting; rank [01] has waited 0\.5 s \(the limit\) for step 7"


@pytest.mark.parametrize("stuck", ["sum(range(1000))", "time.sleep(600)"])
def test_a_rank_that_is_stuck_is_found(tmp_path, stuck):
    program = STALLING.format(stuck=stuck, peer="me.rank + 1")
    ends = run(tmp_path, 3, program)
    assert [end.code for end in ends] == [1] * 3
    assert len({end.last_line for end in ends}) == 1
    assert re.fullmatch(LAST, ends[0].last_line)
    assert ["in spin\n" in end.err and "which waits for nobody\n" in end.err for end in ends] == [True] * 3


def test_a_stopped_rank_is_found(tmp_path):
    with processes(tmp_path, 3, STALLING.format(stuck="time.sleep(600)", peer="2")) as running:
        running.wait_until_ready()
        running.signal(2, signal.SIGSTOP)
        first, second = running.ended(2)
        running.signal(2, signal.SIGCONT)
        *_, third = running.ended()
    assert [end.code for end in (first, second, third)] == [1] * 3
    assert first.last_line == second.last_line == third.last_line
    assert "rank 2 does not answer: its process is stopped, or its Python is held" in first.err


if __name__ == "__main__":
    GOLDEN.write_text(reports(), "utf-8")


WAITING = {rank: State(rank, f"waits at {rank}", 1 - rank, 5.0) for rank in range(2)}
ONE_SECOND_LATER = {rank: replace(state, since_s=6.0) for rank, state in WAITING.items()}


def asked(monkeypatch, *answers):
    """Stalls that gets these answers, one after another, without waiting."""
    with meshes(2) as made:
        stalls = Stalls(made[0], Failures(made[0], str), lambda: WAITING[0])
    found = iter(answers)
    monkeypatch.setattr(stalls, "ask", lambda: next(found))
    monkeypatch.setattr("pipeloom.peers.stall.time.sleep", lambda _: None)
    return stalls.deadlock()


def test_ranks_that_wait_for_each_other_are_told_so(monkeypatch):
    cause = asked(monkeypatch, WAITING, ONE_SECOND_LATER)
    assert cause.message.startswith("all ranks wait for each other, and none does anything")
    assert "they wait for each other in a circle: rank 0 -> rank 1 -> rank 0" in cause.traceback


@pytest.mark.parametrize(
    "change", [{"waits_for": None}, {"is_busy": True}, {"doing": "waits for the next"}, {"since_s": 0.1}], ids=str
)
def test_ranks_of_which_one_goes_on_are_let_alone(monkeypatch, change):
    """A large tensor under way, a wait that has just begun, a rank that computes."""
    assert asked(monkeypatch, WAITING, ONE_SECOND_LATER | {1: replace(ONE_SECOND_LATER[1], **change)}) is None
