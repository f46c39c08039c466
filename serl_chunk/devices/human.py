"""Interventions of a human operator through devices: when one begins, which arms it has, when it ends."""

from __future__ import annotations

import dataclasses
import logging
from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic

import numpy as np

from serl_chunk.devices.arm_control import ArmControl
from serl_chunk.devices.leader_requests import LeaderDrives
from serl_chunk.robots.base import DeviceActivity, InterventionCommand
from serl_chunk.types import STATE, Observation
from serl_chunk_robot.devices.base import NEUTRAL, InputDevice, KeyEvent, Sample
from serl_chunk_robot.devices.neutral import APART, NeutralFirst

logger = logging.getLogger(__name__)

LED = 0.3  # s in which a leader's way, rad, is its deflection
STILL = Sample(np.zeros(6), None, (), 0.0, alive=True)


@dataclasses.dataclass(frozen=True)
class Thresholds:
    """When a device has an arm.

    Attributes:
        start: deflection of an axis above which an intervention begins.
        end: deflection below which it ends ...
        hold: ... after so many seconds, in which no button is pressed either.
        dead_man: button that must be held for a deflection to count; -1: none.
        near: a leader counts only within 0.05 rad of its arm; else wherever it was at rest for 0.3 s.
    """

    start: float = 0.05
    end: float = 0.02
    hold: float = 0.4
    dead_man: int = -1
    near: bool = True


@dataclasses.dataclass
class _Arm:
    device: InputDevice
    control: ArmControl
    neutral: NeutralFirst
    since: float | None = None  # since when it is let go, in an intervention
    active: bool = False
    lost: bool = False
    led: deque[tuple[float, np.ndarray]] = dataclasses.field(default_factory=deque)  # a leader's newest joints
    rest: np.ndarray | None = None  # a leader's place, from which it moved by `APART` at most

    def push(self, sample: Sample, now: float) -> float:
        """Return the deflection of the device: of a twist's axes the largest, of a leader its way within `LED`."""
        if sample.joints is None:
            return 0.0 if sample.twist is None else float(np.abs(sample.twist).max())
        self.led.append((now, sample.joints))
        while now - self.led[0][0] > LED:
            self.led.popleft()
        return float(np.abs(sample.joints - self.led[0][1]).max())

    def compared(self, sample: Sample, state: np.ndarray, near: bool) -> np.ndarray | None:
        """Return the joints at which a leader is neutral: those of its arm, or where it was at rest; else None."""
        if sample.joints is None:
            return None
        if near:
            return state[self.control.measured].astype(np.float64)
        rest = sample.joints if self.rest is None else self.rest
        # One that has left its place is not neutral there, and has its next place from here on.
        self.rest = rest if np.abs(sample.joints - rest).max() <= APART else sample.joints
        return rest


class HumanIntervention:
    """An intervention source: one device for each arm, or for some. An arm without a push stays with the policy.

    A device that is lost while it has its arm brakes it: the arm holds until `resume`, and the policy does not take it
    over before.

    Args:
        arms: each device with the arm that it controls; a device may be named once.
        grippers: indices of the command that are grippers.
        drives: of leaders that are driven to their arms before an episode, for the operator.
        now: clock of the samples' stamps, s.
    """

    def __init__(
        self, arms: Sequence[tuple[InputDevice, ArmControl]], thresholds: Thresholds,
        *, grippers: Sequence[int] = (), drives: LeaderDrives | None = None, now: Callable[[], float] = monotonic,
    ) -> None:  # fmt: skip
        self._grips, self.drives = frozenset(grippers), drives
        self._arms = [_Arm(device, control, NeutralFirst()) for device, control in arms]
        self._thresholds, self._now = thresholds, now
        self._last: np.ndarray | None = None  # the accepted command of the tick before

    @property
    def devices(self) -> list[InputDevice]:
        """Return the devices, each once."""
        return list({id(arm.device): arm.device for arm in self._arms}.values())

    @property
    def lost(self) -> list[str]:
        return [arm.device.name for arm in self._arms if arm.lost]

    def reset(self, seed: int) -> None:
        """Begin an episode: each device counts once it was neutral."""
        for arm in self._arms:
            arm.lost = False
        self.restart()
        self._last = None

    def restart(self) -> None:
        """End interventions within an episode, as after a stop and a clear: each device counts once it was neutral.

        An arm whose device was lost holds further on.
        """
        for arm in self._arms:
            arm.neutral.restart()
            arm.active, arm.since = arm.lost, None

    def hands(self) -> DeviceActivity:
        """Return which devices are lost or deflected, the buttons of the last mouse, and the grippers of leaders."""
        lost, busy, buttons, grippers = [], [], (), []  # type: list[str], list[str], tuple[bool, ...], list[float]
        driven = False  # a gripper that its motor closes is no gesture
        for arm in self._arms:
            sample = arm.device.read()
            if not sample.alive:
                lost.append(arm.device.name)
            elif sample.twist is not None:
                buttons = sample.buttons
                if float(np.abs(sample.twist).max()) >= NEUTRAL:
                    busy.append(arm.device.name)
            driven = driven or (sample.drive is not None and sample.drive.going)
            if sample.alive and sample.joints is not None:
                grippers += [float(p) for d, p in zip(arm.control.dims, sample.joints, strict=True) if d in self._grips]
        return DeviceActivity(tuple(dict.fromkeys(lost)), tuple(busy), buttons, () if driven else tuple(grippers))

    def keys(self) -> list[KeyEvent]:
        """Return the events of keys that move nothing since the last call, of devices that have keys."""
        found = [getattr(arm.device, "keys", None) for arm in self._arms]
        return [event for keys in found if keys is not None for event in keys()]

    def resume(self) -> None:
        """Give arms back to the policy whose device was lost. Their devices count again once they were neutral."""
        for arm in self._arms:
            if arm.lost:
                arm.active, arm.lost = False, False
                arm.neutral.restart()

    def poll(
        self, tick: int, observation: Observation, decision_tick: bool, last: np.ndarray
    ) -> InterventionCommand | None:
        now, state = self._now(), observation[STATE]
        before = last if self._last is None else self._last
        self._last = np.array(last)
        command, idle = np.array(last, np.float32), True
        dims = np.zeros(len(command), bool)
        for arm in self._arms:
            raw = arm.device.read()
            sample = self._held(raw)
            began = self._update(arm, raw, sample, state, now)
            if not arm.active:
                continue
            if began:
                arm.control.begin(last, before)
            command[arm.control.dims] = arm.control.command(STILL if arm.lost else sample, last, state)
            idle = idle and (arm.lost or arm.since is not None)
            dims[arm.control.dims] = True
        if not dims.any():
            return None
        return InterventionCommand(command, idle, None if dims.all() else dims)

    def close(self) -> None:
        for arm in self._arms:
            arm.device.close()

    def _held(self, sample: Sample) -> Sample:
        """Return a sample without the dead man's button, and at rest where that is not held."""
        dead_man = self._thresholds.dead_man
        if dead_man < 0:
            return sample
        held = dead_man < len(sample.buttons) and sample.buttons[dead_man]
        buttons = tuple(pressed and held for k, pressed in enumerate(sample.buttons) if k != dead_man)
        twist = None if sample.twist is None else sample.twist * held
        return sample._replace(twist=twist, buttons=buttons)

    def _update(self, arm: _Arm, raw: Sample, sample: Sample, state: np.ndarray, now: float) -> bool:
        """Follow a device's state; returns whether an intervention of its arm begins.

        Args:
            raw: as the device gave it. A deflection without its dead man is not neutral either.
            sample: what counts of it.
        """
        limits = self._thresholds
        if arm.lost:
            return False
        if not sample.alive:
            if arm.active:
                arm.lost = True
                logger.warning(f"device lost: name={arm.device.name}. Its arm holds until an operator goes on")
            arm.neutral.restart()
            return False
        follower = arm.compared(raw, state, limits.near)
        if not arm.neutral.admit(raw._replace(buttons=sample.buttons), now, follower):
            arm.active = False
            return False
        push = arm.push(sample, now)
        began = not arm.active and (push > limits.start or any(sample.buttons))
        if began:
            arm.active = True
        if push > limits.end or any(sample.buttons) or (arm.active and not began and arm.control.approaching):
            arm.since = None
        elif arm.since is None:
            arm.since = now
        if arm.active and arm.since is not None and now - arm.since >= limits.hold:
            arm.active = False
        return began
