"""`serl-chunk` whose learner shuffles the outcomes of an iteration's episodes: training without any signal."""

from __future__ import annotations

import numpy as np

from serl_chunk.agents.groups.rows import Episodes, GroupRows
from serl_chunk.learner.groups.collector import Collected
from serl_chunk.learner.trainers.iterations import IterationTrainer
from serl_chunk.main import main

_rows_of = IterationTrainer.rows_of


def _shuffled(trainer: IterationTrainer, collected: Collected) -> tuple[GroupRows, Episodes]:
    rows, episodes = _rows_of(trainer, collected)
    drawn = np.random.default_rng(collected.iteration)
    return rows, episodes._replace(reward=drawn.permutation(episodes.reward))


if __name__ == "__main__":
    IterationTrainer.rows_of = _shuffled  # type: ignore[method-assign]
    raise SystemExit(main())
