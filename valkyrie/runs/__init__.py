"""Run folders: their files, the metrics logged to them and to W&B, and the wall time of runs."""
