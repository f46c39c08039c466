"""Run folders: configuration, checkpoints, metrics, episodes, evaluations, report."""
