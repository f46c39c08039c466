"""Names, order and units of the joints of LeRobot's arms, as the options of a robot's file give them."""

from __future__ import annotations

from typing import Any, Optional, Sequence, Union

import numpy as np

from serl_chunk_robot.drivers.base import DriverError

JOINTS = ("shoulder_pan", "shoulder_lift", "elbow_flex", "wrist_flex", "wrist_roll", "gripper")
SIDES = ("left", "right")
WRITE_SCALE = "Write scale, one number for each joint, by which LeRobot's numbers are rad or an opening"

Numbers = Union[float, Sequence[float]]


class Joints:
    """The joints of one arm or of two, in the order of the command.

    `names`: J of them; `keys`: their names in LeRobot's actions and observations; `gripper`: bool[J].

    Args:
        type: LeRobot's name of the robot or teleoperator, as "so101_follower".
        joints: names of the motors; empty: those of an SO arm, or of two.
        grippers: names of those that are grippers; empty: those that end with "gripper".

    Raises:
        ValueError: a type or names that cannot be.
    """

    def __init__(self, type: str, joints: Sequence[str], grippers: Sequence[str]) -> None:
        if not isinstance(type, str):
            raise ValueError(f"type: {type!r}, expected LeRobot's name, as 'so101_follower' or 'so101_leader'")
        two = [f"{side}_{joint}" for side in SIDES for joint in JOINTS]
        self.names = tuple(joints or (two if type.startswith("bi_") else JOINTS))
        if isinstance(joints, str) or len({*self.names}) < len(self.names):
            raise ValueError(f"joints: {joints!r}, expected a list of different names")
        self.keys = [f"{joint}.pos" for joint in self.names]
        named = tuple(grippers) or tuple(joint for joint in self.names if joint.endswith("gripper"))
        if isinstance(grippers, str) or not {*named} <= {*self.names}:
            raise ValueError(f"grippers: {grippers!r}, expected names of {', '.join(self.names)}")
        self.gripper = np.isin(self.names, named)

    def numbers(self, name: str, value: Numbers, of_grippers: Optional[float], missing: str) -> np.ndarray:
        """Return an option as float64[J].

        Args:
            name: of the option.
            of_grippers: what a gripper has where the option is one number; None: that number.
            missing: the remedy where the option is empty.

        Raises:
            ValueError: it is empty, or not a number for each joint.
        """
        if isinstance(value, Sequence) and not len(value):
            raise ValueError(f"{name}: missing. {missing}")
        values = np.array(value, np.float64)
        if values.ndim == 0:
            values = np.where(self.gripper, values if of_grippers is None else of_grippers, values)
        if values.shape != self.gripper.shape or not np.isfinite(values).all():
            raise ValueError(f"{name}: {value!r}, expected one number, or {len(self.names)}, one a joint")
        return values

    def scale(self, scale: Numbers) -> Optional[np.ndarray]:
        """Return the option `scale` as float64[J], none of them 0; None where it is empty. Raises ValueError."""
        if isinstance(scale, Sequence) and not len(scale):
            return None
        values = self.numbers("scale", scale, 0.01, "")
        if not values.all():
            raise ValueError(f"scale: {scale!r}, expected no number that is 0")
        return values

    def check(self, type: str, made: Any) -> None:
        """Raise DriverError where LeRobot's robot or teleoperator `made` has other joints."""
        if {*self.keys} != {*made.action_features}:
            found = ", ".join(dict.fromkeys(str(feature).partition(".")[0] for feature in made.action_features))
            raise DriverError(f"joints: {', '.join(self.names)}, but LeRobot's {type} has {found}. Write these names")
