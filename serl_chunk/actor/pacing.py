"""How well a session keeps its rate: the lateness of its ticks, and warnings of what keeps them late."""

from __future__ import annotations

import array
import logging
from collections.abc import Sequence

import numpy as np

from serl_chunk.actor.clock import Deadlines, Lateness
from serl_chunk.actor.stats import EpisodeSummary

logger = logging.getLogger(__name__)

RATE_TICKS = 10  # steps of the environment are judged after an episode with so many
OWN_RATE_SHARE = 0.9  # of a tick: an environment whose steps take more leaves too little for the policy


class Pacing:
    """Real-time ticks of a session. `period`: seconds of a tick."""

    def __init__(self, period: float) -> None:
        self._period = period
        self._late = array.array("d")  # seconds, every tick
        self._missed_periods = 0
        self._rate_judged = False

    def add(self, deadlines: Deadlines) -> None:
        """Add an episode's ticks."""
        self._late.extend(deadlines.lateness)
        self._missed_periods += deadlines.missed_periods

    def lateness(self) -> Lateness:
        return Lateness.of(self._late, self._missed_periods)

    def warn(self, episode_id: str, stats: EpisodeSummary, deadlines: Deadlines, step_seconds: Sequence[float]) -> None:
        """Warn of an episode's stalls, and once of an environment whose steps, in seconds, fill the tick."""
        if not self._rate_judged and len(step_seconds) >= RATE_TICKS:
            self._rate_judged = True
            if warning := _slow_step_warning(step_seconds, self._period):
                logger.warning(warning)
        if stats.gaps:
            logger.warning(
                f"the control loop stalled in episode {episode_id} (gaps={stats.gaps}, longest "
                f"{max(deadlines.lateness):.2f} s): the plan was dropped, and training sees no window across a gap"
            )


def _slow_step_warning(seconds: Sequence[float], period: float) -> str:
    """Warning where steps of the environment, in seconds, fill the tick's `period`; empty where they do not."""
    if len(seconds) == 0 or (p50 := float(np.median(seconds))) < OWN_RATE_SHARE * period:
        return ""
    return (
        f"a step of the environment takes {p50 * 1e3:.1f} ms (median) of a tick of {period * 1e3:.1f} ms: too little "
        "is left for the policy, so ticks begin late and the robot may run below robot.control_hz. If step() sleeps to "
        "keep a rate of its own, let it sleep less (docs/your_robot.md, section 7). Otherwise lower "
        "robot.control_hz"
    )
