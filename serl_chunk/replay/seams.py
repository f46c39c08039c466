"""How hard commanded joints accelerate where control passes between policy and human, and elsewhere."""

from __future__ import annotations

import numpy as np

from serl_chunk.types import RobotSpec


def accelerations(
    action: np.ndarray, segments: np.ndarray, gaps: np.ndarray, spec: RobotSpec
) -> tuple[float | None, float | None]:
    """Return the largest change of speed between two ticks at seams and at all other ticks, rad/s^2; None without any.

    Joints that are commanded by absolute targets count, grippers do not. Three executed targets in a row have one. It
    is at a seam where they are of both, a policy and a human.

    Args:
        action: executed, float32[T, A].
        segments: ticks on which a human had the robot, int64[K, 2], first and past-last.
        gaps: ticks of steps after a gap, int64[G]: across one, nothing is known.
    """
    joints = [k for k, joint in enumerate(spec.joint_of_action) if joint >= 0 and k not in spec.grippers]
    if not joints or len(action) < 3:
        return None, None
    change = np.abs(np.diff(action[:, joints].astype(np.float64), n=2, axis=0)).max(axis=1) / spec.dt**2
    tick = np.arange(1, len(action) - 1)  # the middle one of each three
    seam, unknown = (np.isin(tick, begins) | np.isin(tick + 1, begins) for begins in (segments.ravel(), gaps))
    return _largest(change[seam & ~unknown]), _largest(change[~seam & ~unknown])


def _largest(values: np.ndarray) -> float | None:
    return float(values.max()) if len(values) else None
