"""torch's own schedules beside the same ones of Pipeloom: `python -m benchmarks.torch_schedules`."""
