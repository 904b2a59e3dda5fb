"""The peers in real processes, as the benchmark starts them; how fast they are is no test's business."""

import signal
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

from benchmarks.peers import launch
from benchmarks.peers.by_hand import ByHand
from benchmarks.peers.contestants import CONTESTANTS
from benchmarks.peers.figures import loss_difference, losses_of
from benchmarks.peers.launch import TrialFailed, seen_by_processes
from benchmarks.peers.trial import Part, Trial, part
from benchmarks.peers.worker import peak_bytes

GPT = Trial("c", "gpt", "1f1b", 2, 4, ("pipeloom", "torch", "by_hand", "one_process"), 2, 1, 2)
VIRTUAL = Trial("b", "virtual", "gpipe", 2, 3, ("pipeloom", "torch", "by_hand"), 1, 2, 2)


def whole(schedule):
    """A model of one stage: what a peer does without anybody to talk to."""
    torch.manual_seed(0)
    model = nn.Linear(3, 3)
    return Part(schedule, 2, 0, 1, [model], nn.functional.mse_loss, None, (2, 3), {"lr": 0.1}), model


def test_all_peers_train_the_same_model():
    seen = seen_by_processes(GPT)
    losses = [losses_of(peer, seen) for peer in GPT.peers]
    assert {len(each) for each in losses} == {5}  # two to warm up, one before the timed, two timed
    assert loss_difference(losses) <= 1e-5
    assert all(len(each["steps_s"][peer]) == 2 for each in seen for peer in GPT.peers)


def test_peers_take_turns_on_virtual_devices():
    seen = seen_by_processes(VIRTUAL)
    assert len(seen) == VIRTUAL.num_processes
    assert [len(seen[0]["steps_s"][peer]) for peer in VIRTUAL.peers] == [4, 4, 4]
    assert all(0 < each["idle_peak_bytes"] <= each["peak_bytes"] for each in seen)


def test_a_failure_brings_its_own_cause():
    with pytest.raises(TrialFailed, match=r"(?s)^Traceback .*KeyError: 'nobody'$"):
        seen_by_processes(replace(VIRTUAL, num_processes=1, peers=("nobody",)))


@pytest.fixture
def started(monkeypatch):
    """The processes that were started."""
    started, popen = [], launch.subprocess.Popen

    def start(*args, **options):
        started.append(popen(*args, **options))
        return started[-1]

    monkeypatch.setattr(launch.subprocess, "Popen", start)
    return started


def lingering(meanwhile="pass"):
    """The command of a process that does something and stays."""
    return [sys.executable, "-c", f"import os, time; {meanwhile}; time.sleep(600)"]


def test_processes_that_do_not_end_are_ended(monkeypatch, started):
    monkeypatch.setattr(launch, "LIMIT_S", 0.5)
    with pytest.raises(TrialFailed, match=r"no end after 0\.5 s"):
        launch._run(lingering())
    assert [process.returncode for process in started] == [-signal.SIGTERM]


def test_sigterm_ends_the_processes_too(started):
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit, match="143"):
        launch._run(lingering(f"os.kill(os.getppid(), {int(signal.SIGTERM)})"))
    assert signal.getsignal(signal.SIGTERM) is before
    assert [process.returncode for process in started] == [-signal.SIGTERM]


def test_torchruns_own_traceback_is_cut_off():
    written = (
        "noise\n[rank0]: Traceback (most recent call last):\n[rank0]:   File\n[rank0]: ValueError: no\nTraceback\n  x"
    )
    assert launch._cause(written) == "Traceback (most recent call last):\n  File\nValueError: no"
    assert launch._cause("Killed") == "Killed"


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_the_loop_by_hand_accumulates_the_mean(schedule):
    made, model = whole(schedule)
    inputs, targets = torch.randn(4, 3), torch.randn(4, 3)
    loss = ByHand(made)(inputs, targets)
    expected = nn.functional.mse_loss(model(inputs), targets)
    assert torch.allclose(loss, expected)
    assert torch.allclose(model.weight.grad, torch.autograd.grad(expected, model.weight)[0])


def test_one_process_finishes_with_a_step():
    made, model = whole("1f1b")
    contestant = CONTESTANTS["one_process"](made)
    before = model.weight.clone()
    contestant.learn(torch.randn(4, 3), torch.randn(4, 3))
    contestant.finish()
    assert not torch.equal(model.weight, before)
    assert (model.weight.grad, contestant.num_threads) == (None, 2)


def test_a_process_keeps_its_own_stage_alone():
    made = part(VIRTUAL, rank=1, group=None)
    (own, other), taken = list(made.stages), made.own_stage()
    assert taken is other
    assert own not in made.stages
    assert (made.is_first, made.is_last, made.num_stages) == (False, True, 2)


def test_the_gpt_is_made_alike_for_everybody():
    (first, second), (again, _) = part(GPT, 0, None).stages, part(GPT, 1, None).stages
    assert all(map(torch.equal, first.state_dict().values(), again.state_dict().values()))
    assert {type(module).__name__ for module in (*first, *second)} == {"Embedding", "Block", "LayerNorm", "Linear"}


def test_peak_memory_only_grows():
    before = peak_bytes()
    held = torch.zeros(64 << 20, dtype=torch.uint8).fill_(1)
    assert peak_bytes() >= max(before, held.nbytes)
