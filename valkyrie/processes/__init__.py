"""Child processes, connections between the processes of a run, file locks, signals and exit statuses."""
