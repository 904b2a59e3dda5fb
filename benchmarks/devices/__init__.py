"""What `benchmarks.virtual_devices` holds a step against, threads that do the same with less; and the sizes of runs."""
