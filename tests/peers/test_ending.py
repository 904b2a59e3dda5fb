"""Processes that end: in order, by an exception, by a signal; and what the others do then."""

import re
import signal
import time

import pytest

from tests.peers.ranks import processes, run

BUSY = """
me.ready()
if me.rank < 2:
    me.gather("the end of step 7")
time.sleep(600)  # in long code of its user
"""
RAISES = """
me.gather()
if me.rank == 1:
    me.take(me.mesh.num_ranks - 1)  # all have come out of the gather
    raise ValueError("bad")
me.mesh.send(1, 1)
"""
BAD = "rank 1, at the place of 1: ValueError: bad"


def lost(rank):
    return re.compile(
        rf"rank {rank}, at the place of {rank}: rank {rank} \(pid \d+ on .*\) is gone: its process ended .*"
    )


def test_in_order_ends_in_order(tmp_path):
    ends = run(tmp_path, 3, "me.gather()\nsys.stdout.write('done')")
    assert [(end.code, end.out, end.err) for end in ends] == [(0, "done", "")] * 3


def test_closing_twice_is_closing(tmp_path):
    program = "me.gather()\nhook = sys.excepthook\nme.ending.close()\nme.ending.close()\nassert sys.excepthook != hook"
    assert [(end.code, end.err) for end in run(tmp_path, 2, program)] == [(0, "")] * 2


@pytest.mark.parametrize("others", ["me.gather('step 7')", "time.sleep(600)", "me.inbox.get()"])
def test_an_uncaught_exception_ends_all_with_its_words(tmp_path, others):
    ends = run(tmp_path, 3, f"{RAISES}{others}")
    assert [(end.code, end.last_line) for end in ends] == [(1, BAD)] * 3
    assert ["in <module>" in end.err and "\nValueError: bad\n" in end.err for end in ends] == [True] * 3


def test_a_hook_that_was_there_is_still_called(tmp_path):
    program = (
        "me.ending.close()\nsys.excepthook = lambda *a: sys.stdout.write('mine')\nEnding(me.mesh, me.failures)\n1 / 0"
    )
    (end,) = run(tmp_path, 1, program)
    assert (end.code, end.out) == (1, "mine")
    assert end.last_line == "rank 0, at the place of 0: ZeroDivisionError: division by zero"


def test_a_killed_process_ends_all_within_two_seconds(tmp_path):
    with processes(tmp_path, 4, BUSY) as running:
        running.wait_until_ready()
        start_s = time.monotonic()
        running.signal(3, signal.SIGKILL)
        *ends, killed = running.ended()
    assert killed.code == -signal.SIGKILL
    assert [end.code for end in ends] == [1] * 3
    assert [bool(lost(3).fullmatch(end.last_line)) for end in ends] == [True] * 3, ends
    assert len({end.last_line for end in ends}) == 1
    assert max(end.at_s for end in ends) - start_s < 2


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_stopped_process_is_no_alarm(tmp_path, stopped):
    with processes(tmp_path, 2, "me.ready()\nme.gather()\ntime.sleep(1)\nme.gather()") as running:
        running.wait_until_ready()
        running.signal(stopped, signal.SIGSTOP)
        time.sleep(3)
        running.signal(stopped, signal.SIGCONT)
        assert [(end.code, end.err) for end in running.ended()] == [(0, "")] * 2


def test_an_early_end_is_told_to_who_waits(tmp_path):
    ends = run(tmp_path, 3, "me.gather()\nif me.rank: me.gather('step 7')")
    line = (
        r"rank 0, outside a step: rank 0 ended \(or closed its pipeline\) while rank [12] waits for step 7: "
        "the ranks do not run the same number of steps"
    )
    assert [end.code for end in ends] == [0, 1, 1]
    assert ends[1].last_line == ends[2].last_line
    assert re.fullmatch(line, ends[1].last_line)


def test_an_early_end_is_none_of_who_does_not_wait(tmp_path):
    ends = run(tmp_path, 2, "me.gather()\nif me.rank:\n    until(lambda: me.failures.ended)\n    time.sleep(1.5)")
    assert [(end.code, end.err) for end in ends] == [(0, "")] * 2


SURVIVED = """
from pipeloom.errors import PeerFailed
me.gather()
if me.rank == 0:
    me.failures.report(ValueError("caught"))
else:
    try:
        me.gather()
    except PeerFailed:
        sys.stdout.write("caught")
me.failures.forget()
me.collective.epoch = 1
time.sleep(1.5)
me.gather()
"""


def test_an_exception_that_is_caught_ends_nobody(tmp_path):
    ends = run(tmp_path, 2, SURVIVED)
    assert [(end.code, end.out, end.err) for end in ends] == [(0, "", ""), (0, "caught", "")]


@pytest.mark.parametrize(("pause_s", "saved"), [(2, "saved"), (600, "")])
def test_who_unwinds_has_time_to_save(tmp_path, pause_s, saved):
    program = f"{RAISES}try:\n    me.gather()\nfinally:\n    time.sleep({pause_s})\n    sys.stdout.write('saved')"
    first, second = run(tmp_path, 2, program)
    assert (first.code, first.out, first.last_line) == (1, saved, BAD)
    assert (second.code, second.last_line) == (1, BAD)


def test_what_was_printed_is_not_lost(tmp_path):
    first, _ = run(tmp_path, 2, f"{RAISES}sys.stdout.write('step 7')\ntime.sleep(600)")
    assert (first.code, first.out) == (1, "step 7")


@pytest.mark.parametrize("error", ["ValueError('bad')", "None"])
def test_closing_may_say_why(tmp_path, error):
    ends = run(tmp_path, 2, f"me.gather()\nif me.rank: me.ending.close({error})\nelse: me.gather('step 7')")
    assert [end.code for end in ends] == [1, 0]
    assert ends[0].last_line.startswith(BAD if "bad" in error else "rank 1, outside a step: rank 1 ended")


def test_a_second_death_is_not_the_cause(tmp_path):
    program = (
        f"{RAISES}if me.rank == 2:\n    until(lambda: me.failures.cause)\n    os.kill(os.getpid(), 9)\nme.gather()"
    )
    ends = run(tmp_path, 4, program)
    assert [end.code for end in ends] == [1, 1, -9, 1]
    assert [ends[rank].last_line for rank in (0, 1, 3)] == [BAD] * 3


def test_who_is_ended_names_the_cause_to_the_last(tmp_path):
    program = "if me.rank == 2:\n    try: me.gather()\n    except BaseException: pass\ntime.sleep(600)"
    ends = run(tmp_path, 3, f"{RAISES}{program}")
    assert [(end.code, end.last_line) for end in ends] == [(1, BAD)] * 3


def test_sigterm_ends_as_ever_if_all_is_well(tmp_path):
    with processes(tmp_path, 1, "me.ready()\ntime.sleep(600)") as running:
        running.wait_until_ready()
        running.signal(0, signal.SIGTERM)
        (end,) = running.ended()
    assert (end.code, end.err) == (-signal.SIGTERM, "")


TERMINATED = f"""{RAISES}
until(lambda: me.failures.cause)
os.kill(os.getpid(), signal.SIGTERM)  # as a launcher does that saw rank 1 die
time.sleep(600)
"""


def test_sigterm_after_a_failure_says_why(tmp_path):
    first, _ = run(tmp_path, 2, TERMINATED)
    assert (first.code, first.last_line) == (1, BAD)
    assert "pipeloom.errors.PeerFailed: rank 0 stops, because rank 1 failed" in first.err


def test_sigterm_does_not_cut_off_who_is_on_its_way_out(tmp_path):
    program = f"{RAISES}try:\n    me.gather()\nfinally:\n    os.kill(os.getpid(), 15)\n    sys.stdout.write('saved')"
    first, _ = run(tmp_path, 2, program)
    assert (first.code, first.out, first.last_line) == (1, "saved", BAD)


def test_a_handler_of_the_users_is_left_alone(tmp_path):
    program = (
        "me.ending.close()\nsignal.signal(signal.SIGTERM, handler := lambda *_: None)\n"
        "ending = Ending(me.mesh, me.failures)\nassert signal.getsignal(signal.SIGTERM) is handler\n"
        "ending.close()\nassert signal.getsignal(signal.SIGTERM) is handler"
    )
    assert [(end.code, end.err) for end in run(tmp_path, 1, program)] == [(0, "")]


@pytest.mark.parametrize(("end", "code"), [("sys.exit(0)", 0), ("raise ValueError('in a child')", 1)])
def test_a_forked_child_ends_for_itself(tmp_path, end, code):
    program = f"me.gather()\nchild = os.fork()\nif not child:\n    {end}\n"
    program += "_, status = os.waitpid(child, 0)\nassert status >> 8 == {code}\nme.gather()".replace(
        "{code}", str(code)
    )
    ends = run(tmp_path, 2, program)
    assert [end.code for end in ends] == [0, 0]
    assert [end.last_line for end in ends] == (["ValueError: in a child"] if code else [""]) * 2
