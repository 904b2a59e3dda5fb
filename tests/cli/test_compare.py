"""`pipeloom compare`: each row is what `simulate` says, sorted, with the papers' formulas beside."""

import json

import pytest

from pipeloom import cli
from pipeloom.cli.compare import num_messages, spread
from pipeloom.cost import Costs
from pipeloom.passes import add_transfers
from pipeloom.schedules.registry import ENTRIES, schedule
from pipeloom.sim import simulate


@pytest.fixture
def run(capsys):
    """Run the command: exit code, stdout and stderr."""

    def run(*arguments):
        try:
            code = cli.main(["compare", *arguments])
        except SystemExit as end:
            code = end.code
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_every_schedule_is_a_row_and_the_shortest_comes_first(run):
    code, out, _ = run("-p", "4", "-m", "8", "--json")
    figures = json.loads(out)
    assert code == 0
    assert {row["name"] for row in figures["schedules"]} == ENTRIES.keys()
    assert figures["left_out"] == {}
    makespans = [row["makespan_s"] for row in figures["schedules"]]
    assert makespans == sorted(makespans)


@pytest.mark.parametrize("name", ENTRIES)
def test_a_row_is_what_is_simulated(run, name):
    _, out, _ = run("-p", "4", "-m", "8", "--forward", "2", "--input-grad", "2", "--weight-grad", "1", "--json")
    row = next(row for row in json.loads(out)["schedules"] if row["name"] == name)
    per_rank = row["stages_per_rank"]
    share = Costs.uniform(4, forward_s=2, input_grad_s=2, weight_grad_s=1)
    made = schedule(name, num_ranks=4, num_microbatches=8)
    costs = spread(share, made.placement)
    assert costs.forward_s == (2 / per_rank,) * made.num_stages
    if "costs" in ENTRIES[name].takes:
        made = schedule(name, num_ranks=4, num_microbatches=8, costs=costs)
    timeline = simulate(made, costs)
    assert row["makespan_s"] == timeline.makespan_s
    assert row["bubble_fraction"] == timeline.bubble_fraction
    assert row["peak_held_to_input_grad"] == max(timeline.peak_held_to_input_grad) / per_rank
    assert row["num_messages"] == sum(action.kind.is_send for action in add_transfers(made))
    if row["bubble_fraction_by_formula"] is not None:
        assert row["bubble_fraction"] == pytest.approx(row["bubble_fraction_by_formula"], abs=1e-9)


def test_what_never_drains_idles_nothing_in_the_long_run_and_holds_versions(run):
    _, out, _ = run("-p", "4", "-m", "16", "--json")
    rows = {row["name"]: row for row in json.loads(out)["schedules"]}
    updating = {name: row for name, row in rows.items() if row["bubble_fraction_in_the_long_run"] is not None}
    assert updating.keys() == {name for name, entry in ENTRIES.items() if entry.is_asynchronous}
    assert all(row["bubble_fraction_in_the_long_run"] == pytest.approx(0, abs=1e-9) for row in updating.values())
    copies = {name: row["num_weight_copies"] for name, row in updating.items()}
    assert copies == {"pipedream": 4, "pipedream-vertical-sync": 4, "pipedream-2bw": 2}
    assert (rows["1f1b"]["num_weight_copies"], rows["chimera"]["num_weight_copies"]) == (1, 2)
    assert rows["zb-v"]["num_weight_copies"] == 1


def test_replicas_hold_the_weights_twice_and_send_as_often():
    made = schedule("dualpipe", num_ranks=4, num_microbatches=8)
    assert made.placement.num_replicas == 2
    assert num_messages(made) == num_messages(schedule("1f1b", num_ranks=4, num_microbatches=8)) == 48


def test_what_does_not_exist_for_a_shape_is_left_out_with_its_reason(run):
    code, out, _ = run("-p", "3", "-m", "7")
    assert code == 0
    assert "left out: dualpipe: " in out
    assert " ".join(out.splitlines()[0].split()).startswith(
        "schedule stages makespan idle by formula no barrier held to I"
    )


def test_bytes_and_uneven_ranks_count(run):
    forward, held = "1,2,1,1", "100"
    _, out, _ = run("-p", "4", "-m", "8", "--forward", forward, "--bytes-held-to-input-grad", held, "--json")
    rows = {row["name"]: row for row in json.loads(out)["schedules"]}
    assert rows["1f1b"]["peak_activation_bytes"] == 400
    assert rows["gpipe"]["peak_activation_bytes"] == 800
    assert all(row["bubble_fraction_by_formula"] is None for row in rows.values())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-m", "8"], "the following arguments are required: -p/--ranks"),
        (["-p", "4", "-m", "8", "--forward", "1,2"], "forward_s has 2 values for 4 stages"),
        (["-p", "4", "-m", "8", "--costs", "none.json"], "none.json"),
    ],
)
def test_wrong_values_end_with_two(run, arguments, message):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert message in err
