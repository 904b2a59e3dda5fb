"""Running a schedule: executor, stages, transports, and what keeps their numbers exact."""
