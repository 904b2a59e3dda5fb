"""Contract 1 between processes: the tests of the numbers, run by several processes together."""

import re

import pytest

from tests.processes.launch import torchrun

PYTEST = ("-m", "pytest", "tests/numerics", "-q", "-p", "tests.processes.as_rank", "-p", "no:cacheprovider")


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("num_processes", "num_passed"), [(2, 110), (4, 80)])
def test_every_number_is_that_of_one_process(num_processes, num_passed, tmp_path):
    found = torchrun(num_processes, tmp_path, PYTEST, timeout_s=800.0)
    assert found.code == 0, found.outputs[0]
    for output in found.outputs:
        assert int(re.search(r"(\d+) passed", output)[1]) >= num_passed
