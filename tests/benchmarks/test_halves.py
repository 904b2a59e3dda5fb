"""`python -m benchmarks.halves`, small."""

import json

import pytest

from benchmarks import halves


def test_stack_compares_three(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(halves, "keep_memory", lambda: None)
    halves.main(["--rows", "stack", "--width", "32", "--layers", "1", "--rounds", "2", "--json"])
    found = json.loads(capsys.readouterr().out)["stack"]
    assert {"halves: (I + W) ÷ whole", "torch: (I + W) ÷ whole"} <= found.keys()


def test_functions_are_all_split(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(halves, "keep_memory", lambda: None)
    monkeypatch.setattr(halves, "SIZES", ((2, 32),))
    monkeypatch.setattr(halves.functions, "MIN_MULTIPLICATIONS", 1 << 16)
    halves.main(["--rows", "functions", "--rounds", "2", "--json"])
    found = json.loads(capsys.readouterr().out)["functions"]
    assert found["2 × 32: I ÷ whole"] < found["2 × 32: (I + W) ÷ whole"]
    assert halves.functions.MIN_MULTIPLICATIONS == 1 << 16


def test_contestants_find_the_same_gradients() -> None:
    import torch

    value, grad = torch.randn(2, 4, 32), torch.randn(2, 4, 32)
    found = []
    for run in halves.CONTESTANTS.values():
        model = halves.blocks(1, 32)
        run(model, model, value.clone().requires_grad_(), grad)
        found.append([each.grad for each in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(found[0], found[1], strict=True))
    assert all(torch.allclose(one, other) for one, other in zip(found[0], found[2], strict=True))


def test_lines_say_whether_it_is_met(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(halves, "keep_memory", lambda: None)
    monkeypatch.setattr(halves, "stack", lambda *_: {"halves: (I + W) ÷ whole": 1.2})
    halves.main(["--rows", "stack"])
    assert "missed" in capsys.readouterr().out
