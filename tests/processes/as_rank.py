"""A pytest plugin: this process is one of several that run the same tests together, under torchrun.

A test whose pipeline has another number of ranks than there are processes is skipped, by all of them alike.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pipeloom.errors import PeerFailed, ProcessError


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    """Run a test, if it is for this many processes."""
    if pyfuncitem.get_closest_marker("in_one_process"):
        pytest.skip("is about one process")
    try:
        return (yield)
    except (ProcessError, PeerFailed) as error:
        # Which of the two depends on who comes first: a rank that has found it tells the others.
        if "each rank is one process" in str(error):
            pytest.skip(str(error).splitlines()[0])
        raise
