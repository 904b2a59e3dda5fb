"""`pipeloom convert`: schedules to torch's CSV and back; torch's own runtime runs ours, and ours runs torch's."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import pipeloom as pl
from pipeloom import cli
from pipeloom.ir.notation import format_csv, parse_csv
from pipeloom.ir.verify import verify
from pipeloom.passes import add_transfers, without_transfers
from pipeloom.schedules.registry import ENTRIES, schedule
from pipeloom.testing import sequential_step
from tests.numerics.asserts import assert_bit_equal, assert_same_gradients
from tests.processes.ranks import start

torch_schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
visualizer = pytest.importorskip("torch.distributed.pipelining._schedule_visualizer")


def convert(capsys, *arguments):
    code = cli.main(["convert", *arguments])
    captured = capsys.readouterr()
    assert (code, captured.err) == (0, "")
    return captured.out


@pytest.mark.parametrize("name", [name for name, entry in ENTRIES.items() if not entry.is_asynchronous])
def test_a_schedule_comes_back_from_its_csv(capsys, name):
    made = schedule(name, num_ranks=4, num_microbatches=8)
    shape = ("-p", "4", "-v", str(ENTRIES[name].stages_per_rank), "-m", "8")
    assert parse_csv(convert(capsys, name, *shape)) == made
    lowered = parse_csv(convert(capsys, name, *shape, "--transfers"))
    assert without_transfers(lowered) == made
    assert verify(lowered) == []
    assert lowered == add_transfers(made) or made.overlaps  # a pair is one word, with no place for a transfer inside


@pytest.mark.parametrize("name", [name for name, entry in ENTRIES.items() if entry.is_asynchronous])
def test_updates_of_weights_are_nothing_that_torch_could_read(capsys, tmp_path, name):
    assert cli.main(["convert", name, "-p", "4", "-m", "8"]) == 2
    assert f"schedule {name!r} updates weights inside its programs; torch's CSV has no word" in capsys.readouterr().err
    assert cli.main(["show", name, "-p", "4", "-m", "8", "--csv"]) == 0
    text = capsys.readouterr().out
    assert parse_csv(text) == schedule(name, num_ranks=4, num_microbatches=8)
    (tmp_path / "own.csv").write_text(text)
    assert cli.main(["show", "--from", str(tmp_path / "own.csv")]) == 0
    assert "Versions of weights held, at most: " in capsys.readouterr().out


def test_what_a_file_has_is_left_out_or_added(capsys, tmp_path):
    path = tmp_path / "lowered.csv"
    assert "wrote" in convert(capsys, "1f1b", "-p", "2", "-m", "2", "--transfers", "--reduce", "--to", str(path))
    assert "0SEND_F0" in path.read_text()
    assert "0REDUCE_GRAD" in path.read_text()
    plain = format_csv(schedule("1f1b", num_ranks=2, num_microbatches=2))
    assert convert(capsys, "--from", str(path)).split() == plain.split()
    assert "0UNSHARD" in convert(capsys, "--from", str(path), "--unshard", "1")


def test_receives_are_posted_ahead(capsys):
    rows = convert(capsys, "1f1b", "-p", "2", "-m", "2", "--transfers", "--receive-slots", "2").splitlines()
    assert rows[0] == "0RECV_B0,0RECV_B1,0F0,0SEND_F0,0F1,0SEND_F1,0B0,0B1"
    assert rows[1] == "1RECV_F0,1RECV_F1,1F0,1B0,1SEND_B0,1F1,1B1,1SEND_B1"


def test_a_place_that_cannot_be_written_is_named(capsys, tmp_path):
    assert cli.main(["convert", "1f1b", "-p", "2", "-m", "2", "--to", str(tmp_path / "no" / "file.csv")]) == 2
    assert "no/file.csv cannot be written: No such file or directory" in capsys.readouterr().err


def layers(num_stages):
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(num_stages)]


def square(output, target):
    return (output - target).square().mean()


TORCHS = {"Interleaved1F1B": 2, "LoopedBFS": 2, "InterleavedZeroBubble": 2, "ZBVZeroBubble": 2, "DualPipeV": 2}


@pytest.mark.parametrize("name", TORCHS)
def test_torchs_tables_run_here(name):
    table = visualizer.get_schedule_ops(name, 2, 8, num_stages_per_rank=TORCHS[name])
    text = "\n".join(",".join("" if cell is None else str(cell) for cell in row) for row in table)
    theirs = parse_csv(text)
    model, x, target = nn.Sequential(*layers(4)), torch.randn(16, 8), torch.randn(16, 8)
    reference = copy.deepcopy(model)
    with pl.Pipeline(model, num_stages=4, schedule=theirs, loss_fn=square) as pipe:
        loss = pipe.step(x, target=target)
        options = {"num_microbatches": 8, "loss_fn": square, "schedule": theirs}
        assert_bit_equal(loss, sequential_step(reference, x, target=target, **options), "loss")
        assert_same_gradients(pipe, reference)


def in_torchs_words(name):
    """Whether torch's runtime has the schedule's actions, and one replica of each stage."""
    made = schedule(name, num_ranks=4, stages_per_rank=ENTRIES[name].stages_per_rank, num_microbatches=8)
    return not made.placement.opposed and {action.kind for action in made} <= {*map(pl.Kind, "FBIW")}


def test_torchs_runtime_runs_ours(tmp_path):
    names = [name for name in ENTRIES if in_torchs_words(name)]
    assert len(names) >= 17
    ranks = start(in_torch, 4, tmp_path, str(tmp_path), names)
    codes = ranks.wait()
    assert set(codes) == {0}, "\n".join(ranks.output(rank) for rank in range(4))


def in_torch(folder, names):
    """One rank of torch's own runtime, with one program after another, each from a file, as torchtitan loads it."""
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    for name in names:
        text = format_csv(
            schedule(name, num_ranks=4, stages_per_rank=ENTRIES[name].stages_per_rank, num_microbatches=8)
        )
        path = Path(folder) / f"{name} {dist.get_rank()}.csv"
        path.write_text(text, newline="")
        step_in_torch(path, dist.get_rank())
    dist.destroy_process_group()


def step_in_torch(path, rank):
    from torch.distributed.pipelining import PipelineStage

    placement = parse_csv(path.read_text()).placement
    num_stages = placement.num_stages
    modules = layers(num_stages)
    reference = copy.deepcopy(nn.Sequential(*modules))
    stages = [PipelineStage(modules[s], s, num_stages, torch.device("cpu")) for s in placement.stages_of(rank)]
    runtime = torch_schedules._PipelineScheduleRuntime(stages, 8, loss_fn=square)
    runtime._load_csv(str(path))
    x, target = torch.randn(2, 16, 8, generator=torch.Generator().manual_seed(1)).unbind()
    first = [x] if placement.rank_of(0) == rank else []
    runtime.step(*first, **({"target": target} if placement.rank_of(num_stages - 1) == rank else {}))
    for part, aim in zip(x.chunk(8), target.chunk(8), strict=True):
        (square(reference(part), aim) / 8).backward()
    for s in placement.stages_of(rank):
        for own, other in zip(modules[s].parameters(), reference[s].parameters(), strict=True):
            torch.testing.assert_close(own.grad, other.grad, rtol=1e-5, atol=1e-7)
