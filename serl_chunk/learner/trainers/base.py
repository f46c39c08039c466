"""What a learner asks of its trainer, the part that decides what is trained when."""

# ruff: noqa: B027 - a trainer may have nothing to do in some of these
from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from serl_chunk.learner.offline_data import InitialData
from serl_chunk.runs.status_line import StatusFields

if TYPE_CHECKING:
    from serl_chunk.learner.learner import Learner


class Trainer(abc.ABC):
    """Decides what its learner does next, and changes the learner's `state` and `updates`.

    Args:
        learner: whose agent is trained; its counters are 0, and its replay holds no step yet.
        data: what there is to train on before any actor sends steps.
        threaded: whether it may work on threads of its own; False reproduces a run bit for bit.
        step: of the checkpoint that the run resumes from; None for a fresh run.
    """

    phase = "train"  # shown by the status line

    def __init__(self, learner: Learner, data: InitialData, *, threaded: bool, step: int | None) -> None:
        self._learner = learner

    @property
    @abc.abstractmethod
    def done(self) -> bool:
        """Whether nothing is left to do."""

    @property
    def pretrained(self) -> bool:
        """Whether the critic has seen no failure yet."""
        return False

    @property
    def policy_trained(self) -> bool:
        """Whether episodes count as those of training, no longer of a warm-up."""
        return True

    @property
    def counts_steps(self) -> bool:
        """Whether a final checkpoint is that of its step."""
        return True

    @property
    def resumable(self) -> bool:
        """Whether a checkpoint of the state as it is now would be one to go on from."""
        return True

    @abc.abstractmethod
    def work(self) -> bool:
        """Do one piece of work; False where there is none until more steps arrive."""

    def steps_allowed(self) -> int | None:
        """Steps that lockstep actors may record now; None without a limit."""
        return None

    @property
    def steps_missing(self) -> int:
        """Steps without which there is no work; 0 where it waits for the end of an episode, or for nothing."""
        return 0

    def status(self) -> StatusFields:
        """Progress within the phase, and how many steps and updates the two sides wait for."""
        return {}

    def check_data(self) -> None:
        """Raise ConfigError where the data are of no use for what comes first."""

    def log_if_empty(self) -> None:
        """Log that a resumed run has no online steps to train on, as where no journal was kept."""

    def progress(self, env_steps: int) -> dict[str, Any]:
        """Plain values that a checkpoint keeps, for `resume`; `env_steps` of the checkpoint."""
        return {}

    def resume(self, progress: Mapping[str, Any], *, missed_evaluation: bool) -> None:
        """Go on from a checkpoint, whose counters the learner has; `missed_evaluation`: a stop cut one short."""

    def close(self) -> None:
        """Stop what runs in the background."""
