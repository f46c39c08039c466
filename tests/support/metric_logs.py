"""A clock and short ways to fill a metrics log."""

from serl_chunk.runs.metrics import MetricsLog


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def open_log(run, clock=None, **options):
    options = {"wandb_project": None, "wandb_name": "", "config": {}} | options
    return MetricsLog(run, clock=clock or Clock(), **options)


def add_episode(log, counters, **changes):
    fields = {"actor_id": "a", "ret": 1.0, "length": 40, "succeed": True, "intervention_steps": 3,
              "intervention_count": 1, "phase": "train", "number": 1, "q": [0.5, 0.7], "g": [0.6, 0.9]}  # fmt: skip
    log.episode(counters, **fields | changes)


def add_evaluation(log, counters, **changes):
    fields = {"success_rate": 0.9, "n": 100, "low": 0.83, "high": 0.94, "mode": "mean", "mean_time_s": 1.7,
              "mean_length": 85.0, "checkpoint": counters.step}  # fmt: skip
    log.evaluation(counters, **fields | changes)
