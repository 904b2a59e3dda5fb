"""The benchmark of cutting: it compares like with like; how fast anything is, is no test's business."""

import json
import sys

import pytest
import torch

from benchmarks import splitting

LLAMA = splitting.LLAMA_12_256 | {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "vocab_size": 32}
SPREAD = {"median": 1.0123, "low": 0.998, "high": 1.03}
RATIOS = {"step_ratio": SPREAD, "cpu_ratio": SPREAD, "uncut_cpu_ratio": SPREAD}
STEP = {"row": "gpt", "num_stages": 2, "by_hand_step_s": 0.6, "is_met": True} | RATIOS
LARGE = {"row": "large", "num_parameters": 70_553_706_496, "num_stages": 8, "build_s": 0.6, "cut_s": 3.0}
PLAN = {"row": "plans", "model": "GPT", "again_s": SPREAD, "new_form_s": 0.5}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    sizes = {"NUM_LAYERS": 4, "WIDTH": 16, "VOCABULARY": 32, "LENGTH": 8, "NUM_STAGES": (2,), "LLAMA_12_256": LLAMA}
    for name, size in sizes.items():
        monkeypatch.setattr(splitting, name, size)


@pytest.fixture(params=splitting.MODELS)
def name(request):
    if request.param == "llama":
        pytest.importorskip("transformers")
    return request.param


def test_what_is_written_by_hand_is_the_same_model(name):
    make, by_hand = splitting.MODELS[name]
    model, tokens = make(), torch.randint(32, (2, 8))
    assert torch.equal(by_hand(model)(tokens), model(tokens))
    assert {id(each) for each in by_hand(model).parameters()} == {id(each) for each in model.parameters()}


def test_a_row_says_whether_the_bar_is_met(name):
    row = splitting.compare(name, num_stages=2, num_steps=2)
    assert row["step_ratio"]["low"] <= row["step_ratio"]["median"] <= row["step_ratio"]["high"]
    expected = None if name == "llama" else row["step_ratio"]["median"] <= 1.03
    assert row["is_met"] is expected


def test_another_model_by_hand_is_void(monkeypatch):
    monkeypatch.setitem(splitting.MODELS, "gpt", (splitting.Gpt, lambda _: splitting.gpt_by_hand(splitting.Gpt())))
    with pytest.raises(RuntimeError, match=r"the losses of gpt differ.* don't compute the same"):
        splitting.compare("gpt", num_stages=2, num_steps=2)


@pytest.mark.parametrize(("model", "looks"), list(zip(splitting.PLANNED, (False, True, True), strict=True)))
def test_plans_are_of_models_that_look_at_numbers_or_not(model, looks):
    if "Llama" in model:
        pytest.importorskip("transformers")
    row = splitting.plan_times(model, num_times=2)
    assert row["looks_at_numbers"] is looks
    assert row["again_s"]["low"] <= row["again_s"]["median"] <= row["again_s"]["high"]


def test_a_large_model_is_cut_without_its_weights():
    pytest.importorskip("transformers")
    row = splitting._cut_large_here(LLAMA | {"vocab_size": 50_000_000}, num_stages=2)
    assert row["num_parameters"] > 1.6e9  # 6 GiB
    assert row["num_stages"] == 2
    assert row["peak_bytes"] is None or row["peak_bytes"] < 2 * 2**30


@pytest.mark.parametrize(
    ("row", "text"),
    [
        (STEP, "gpt     2 stages  0.60 s  1.012 [0.998, 1.030]  CPU 1.012 [0.998, 1.030], uncut 1.012: met"),
        (STEP | {"row": "llama", "is_met": None}, ", uncut 1.012"),
        (STEP | {"is_met": False}, ": MISSED"),
        (LARGE | {"peak_bytes": 3 * 2**30, "is_met": False}, "in 0.6 s, cut in 3.0 s, peak 3072 MiB: MISSED"),
        (LARGE | {"peak_bytes": None, "is_met": True}, "peak ? MiB: met"),
        (
            {"row": "plans", "model": "GPT", "again_s": SPREAD, "new_form_s": 0.5},
            "1012300 µs [998000, 1030000], new 0.50",
        ),
    ],
)
def test_rows_are_read(row, text):
    assert text in splitting.line(row)


def test_what_needs_transformers_is_left_out_without_it(monkeypatch):
    monkeypatch.setattr(splitting.importlib.util, "find_spec", lambda _: None)
    rows = list(splitting.rows_of(splitting.ROWS, num_steps=2))
    assert [row["row"] for row in rows] == ["gpt", "tied", "plans", "plans"]
    assert not any("Llama" in row.get("model", "") for row in rows)


@pytest.mark.parametrize("is_json", [True, False])
def test_the_command_prints_rows(monkeypatch, capsys, is_json):
    arguments = ["splitting", "--rows", "gpt", "--steps", "2", *(["--json"] if is_json else [])]
    monkeypatch.setattr(sys, "argv", arguments)
    splitting.main()
    printed = capsys.readouterr().out
    found = [row["row"] for row in json.loads(printed)] if is_json else [printed.splitlines()[1].split()[0]]
    assert found == ["gpt"]
