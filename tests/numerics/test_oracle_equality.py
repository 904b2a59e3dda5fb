"""Contract 1: loss and gradients equal the sequential oracle's to the bit, whatever the cut and the schedule."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.numerics.asserts import assert_pipeline_equals_oracle
from tests.numerics.models import CASES, NUM_PROCESSES, every_other, stages

SCHEDULES = ("gpipe", "1f1b")


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("case", CASES)
def test_every_model_every_cut(case, schedule, num_stages, recompute):
    assert_pipeline_equals_oracle(
        CASES[case],
        num_rows=10,
        num_microbatches=4,
        num_stages=num_stages,
        schedule=schedule,
        recompute=recompute,
        num_steps=2,
    )


@st.composite
def _runs(draw):
    case = draw(st.sampled_from(sorted(CASES)))
    num_layers = len(CASES[case].build())
    num_cuts = {"min_size": NUM_PROCESSES - 1, "max_size": stages(4) - 1}
    cuts = sorted(draw(st.sets(st.integers(1, num_layers - 1), **num_cuts)))
    num_microbatches = draw(st.integers(1, 9))
    recompute = draw(st.lists(st.booleans(), min_size=len(cuts) + 1, max_size=len(cuts) + 1))
    return {
        "case": CASES[case],
        "cuts": cuts,
        "num_microbatches": num_microbatches,
        "num_rows": draw(st.integers(max(2, num_microbatches), 20)),
        "recompute": recompute,
        "schedule": draw(st.sampled_from(SCHEDULES)),
    }


@settings(max_examples=40)
@given(run=_runs())
def test_any_cut_any_batch(run):
    assert_pipeline_equals_oracle(**run)


@pytest.mark.parametrize(
    "make_optimizer",
    [
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1),
        lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, nesterov=True),
    ],
    ids=["adamw", "sgd-momentum"],
)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("case", ["convolution", "transformer-dropout"])
def test_weights_after_several_optimizer_steps(case, schedule, make_optimizer):
    assert_pipeline_equals_oracle(
        CASES[case],
        num_rows=7,
        num_microbatches=3,
        num_stages=stages(3),
        schedule=schedule,
        recompute=every_other(stages(3)),
        num_steps=5,
        make_optimizer=make_optimizer,
    )


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("recompute", [False, True])
def test_bfloat16_autocast(schedule, recompute):
    with torch.autocast("cpu", torch.bfloat16):
        assert_pipeline_equals_oracle(
            CASES["transformer-dropout"],
            num_rows=9,
            num_microbatches=4,
            num_stages=stages(3),
            schedule=schedule,
            recompute=recompute,
            num_steps=2,
        )
