"""Pipeloom beside others that run the same stages: `python -m benchmarks.peers`."""
