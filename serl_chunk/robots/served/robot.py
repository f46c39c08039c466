"""A robot that a robot server moves, as an environment. This process imports no simulator and no driver."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from serl_chunk.config.robots import RobotConfig
from serl_chunk.io import Waiting
from serl_chunk.robots.base import AS_IS, Expert, InterventionSource, RobotEnv, StepResult
from serl_chunk.robots.served import connect, task
from serl_chunk.robots.served.cameras import HELD_S, REMIND_S, ServedCameras
from serl_chunk.types import ConfigError, Observation, RobotSpec
from serl_chunk_robot.client.client import RobotError

logger = logging.getLogger(__name__)

POLL_S = 0.2  # between two looks meanwhile; each renews the lease, which ends after 2 s
GO = "Look at the cell, then run: serl-chunk robot go, or press the console's or the page's key to go on"
REMEDIES = {
    "STOPPED": "Look at the cell, then run: serl-chunk robot clear",
    "HELD": GO,
    "": "See the log of its server",
}
"""State in which the robot is waited for -> what to do about it."""
WAIT_S = 0.01  # between two looks where an operator is waited for
# Characters: an HDF5 attribute holds 16384, and an actor adds how the episode began. Longer ones lack what was drawn.
MAX_CONDITIONS = 16000
STATE_WITHIN_S = 0.5  # of the server; it publishes at 50 Hz or more


class ServedRobot(RobotEnv):
    """The robot at `config.server`, whose lease this process holds.

    A tick's target is sent when it begins, and the result is the server's newest state when the next one does. Where
    the robot follows its targets, what was sent is what was executed; else `info["executed_action"]` is the set point
    that the safety gate reached by then, and `info["gate"]` says why.
    Between `reset` and the first `send` the robot stands in HOLD. Where it was stopped or held, `reset` waits until an
    operator clears it and lets it go on (`go`), which this never does. What lets it move is of the generation that was
    read last: what an operator did after it goes first.

    Args:
        spec: of `config`, with absolute joint targets in the order of the server's joints.
        served: what the server's robot is compared with, where actions are no such targets.
        name: of this client: one that comes back under its name gets the lease back.

    Raises:
        ConfigError: the server's robot differs from `spec`, or the file of keys cannot be read.
        RobotError: no server answers, or another client has the lease.
    """

    answers_late = True
    starts_repeat = False
    observes_again = True

    def __init__(
        self, config: RobotConfig, spec: RobotSpec, *, served: RobotSpec | None = None, name: str = "serl_chunk",
        images: str = "on_request",
    ) -> None:  # fmt: skip
        self._set_spaces(spec, images)
        self._config = config
        self._client = connect(config, name, "controller")
        try:
            there = self._client.hello()["spec"]
            if differing := differing_fields(served or spec, there):
                what = f"serves {there['name']!r}, which is not the robot {spec.name!r} of this experiment"
                raise ConfigError(f"{config.server} {what}: {'; '.join(differing)}", parameter="robot.server")
            # A simulated task draws its scene in each reset; a real one lies as it is, unless a person changes it.
            self.init_states = () if there["simulated"] else (AS_IS,)
            self._parts = [name for name, _ in there["state"] or [("q", 0)]]
            self._cameras = ServedCameras(self._client, spec, config.server)
            if images == "always":
                self.watch([camera.name for camera in spec.cameras])
        except BaseException:
            self._client.close()
            raise
        self.tick = self._seen = self._pass = self._episode = 0
        self._sent_at, self._number, self._drive = 0.0, 0, 0
        self._armed, self._held_for, self._refused = False, 0.0, ""
        self._new_arm = False  # in the last `send`
        self._pinged = 0.0
        self._state: dict[str, Any] = {}
        self._sent = np.zeros(0)  # the last target

    def make_expert(self) -> Expert:
        return task.make_expert(self._config, self)

    def make_scripted_human(self) -> InterventionSource:
        return task.make_scripted_human(self._config, self)

    def seen(self) -> task.Seen:
        """Return the state that the last observation is of. Its target is the last that was sent, if it was taken."""
        if not self._state:
            self._read_state(after_reply=True)
        state = self._state
        target = state["set_point"] if state["set_point"] is not None else state["q"]
        coming = self._armed and state["number"] < self._number and state["generation"] == self._client.generation
        return task.Seen(state["q"], self._sent if coming else target, state["extra"])

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Observation, dict[str, Any]]:
        """Let the server reset the robot, and return what it measures then. `info["draws"]`: what the reset drew.

        `options={"new_object": True}` takes the steps for a new object in addition.
        `conditions` are the profile at that moment, its digest and these draws.
        While the robot may not move it waits, until `stop` ends that.
        """
        super().reset(seed=seed)
        self._release()
        reply: dict[str, Any] | None = None  # to a reset that went as planned
        drawn: dict[str, Any] = {} if seed is None else {"seed": seed}
        if options and options.get("new_object"):
            drawn["new_object"] = True
        lines = Waiting(logger, REMIND_S)
        while reply is None and self._stand() and self.stop() is None:
            if not self.may_move():
                self.idle()
                time.sleep(WAIT_S)
                continue
            try:
                self._client.request("lease")  # it ended if nothing was requested for 2 s
                reply = self._client.request("reset", generation=self._generation, episode=self._episode, **drawn)
            except RobotError as e:
                lines.log(f"waiting for the robot, which was not reset: {e}", level=logging.WARNING)
                time.sleep(POLL_S)
                continue
            self._stand()
            if self._state["done"] != reply["motion"]:
                reply = None  # stopped or held before its end: once more
        draws = {} if reply is None else reply["draws"]
        self._wait_for_cameras()
        self._episode += 1
        self.tick, self._held_for, self._refused = 0, 0.0, ""
        self._cameras.begin()
        self._seen = 1 + max((e[0] for e in self._state["events"]), default=self._seen - 1)
        self.conditions = _conditions(self._state, draws)
        return self._first(), {"draws": draws}

    def send(self, command: np.ndarray) -> None:
        """Send the target of a tick, `float32[A]`; arms the robot first where it is not."""
        self._send_target(self._checked(command))

    def _send_target(self, target: np.ndarray) -> None:
        self._sent_at = time.monotonic()
        if not self._armed:
            try:
                self._client.request("lease")
                self._client.request("arm", generation=self._generation)
                self._armed = self._new_arm = True
                self._held_for, self._refused, self._number = 0.0, "", 0
            except RobotError as e:
                self._refused = str(e)
        if self._armed:
            self._number += 1
            self._sent = target.astype(np.float64)
            self._client.send_command(self._sent, self._number)

    def receive(self) -> StepResult:
        """Return the server's newest state as the result of the last tick, whose end it waits for if not `paced`."""
        if not self.paced:
            time.sleep(max(0.0, self._sent_at + self.robot_spec.dt - time.monotonic()))
        self.tick += 1
        info: dict[str, Any] = {"success": False}
        fault, reward = self._read_state(after_reply=self._new_arm), 0.0  # an older one does not show the arm
        self._new_arm = False
        for index, gained, success, failure in self._state["events"]:
            if index >= self._seen:
                self._seen, reward = index + 1, reward + gained
                info["success"] |= success
                info["failure"] = info.get("failure", False) or failure
        if not fault:
            fault = self._followed(info)
        blind = self._cameras.look_in_tick()
        if self._cameras.unseen:
            info["unseen"] = self._cameras.unseen
        cut = self._state["factor"] < 1 or self._state["reason"]  # a target beyond a limit is cut with factor 1
        follows = self._armed and not cut and self._state["number"] == self._number
        if not follows and self._state["set_point"] is not None:
            info["executed_action"] = self._state["set_point"].astype(np.float32)
            info["gate"] = self._state["reason"] or self._state["word"]
        if fault := fault or blind:
            info["fault"] = fault
        ended = info["success"] or info.get("failure", False)
        late = self.tick >= self.robot_spec.max_episode_steps
        if ended or late or fault:
            self._release()
        return self._observe(), reward, ended, bool(not ended and (late or fault)), info

    def step(self, action: np.ndarray) -> StepResult:
        self.send(action)
        return self.receive()

    def observe_again(self) -> Observation:
        self._read_state(after_reply=True)
        self._wait_for_cameras()
        return self._first()

    def _first(self) -> Observation:
        """Return the first observation of an episode."""
        return self._observe()

    def restart_limit(self) -> None:
        self.tick = 0

    def rest(self) -> None:
        self._release()

    def idle(self) -> None:
        self._cameras.look()
        if time.monotonic() - self._pinged > POLL_S:
            self._keep_lease()

    def drive_leaders(self, number: int, first: Mapping[str, int]) -> None:
        """Let the server drive leaders to the robot, which stands since its reset, for a moment.

        Args:
            number: of the drive, another one for each.
            first: device -> the first joint that it leads; empty: the drive ends.

        Raises RobotError: the server refuses it, or does not answer.
        """
        if first and number != self._drive:
            self._drive = number
            self._client.request("lease")  # it ended if nothing was requested for 2 s
            self._read_state(after_reply=True)
        self._client.request("drive", generation=self._generation, number=number, first=dict(first))

    def hindrances(self) -> Sequence[tuple[str, str]]:
        unseen = self._cameras.unseen
        return ((unseen, "look at its cable, and at the log of the robot's server"),) if unseen else ()

    def camera_ages(self) -> Mapping[str, float]:
        return self._cameras.ages()

    def close(self) -> None:
        """Release the robot and give the lease back. It is HELD then, with torque on."""
        self._release()
        self._client.close()

    @property
    def _generation(self) -> int:
        return int(self._state.get("generation", -1))

    def _keep_lease(self) -> None:
        """Renew the lease, and take it again where it ended: an operator lets go on whom the server shows."""
        self._pinged = time.monotonic()
        with contextlib.suppress(RobotError):
            state = self._client.newest_state() or self._state
            self._client.request("ping" if state.get("controller") else "lease")

    def _followed(self, info: dict[str, Any]) -> str:
        """Notice ticks that the robot did not follow; returns why the episode ends, or nothing."""
        state, now = self._state, time.monotonic()
        if self._armed and state["state"] == "RUN" and state["generation"] == self._client.generation:
            return ""
        self._armed, info["lost_ticks"] = False, 1
        self._held_for = self._held_for or now
        if state["state"] == "STOPPED":
            return str(state["word"])
        return self._refused or str(state["word"]) if now - self._held_for > HELD_S else ""

    def _wait_for_cameras(self) -> None:
        """Wait until every watched camera gives new pictures and the robot stands, or `stop` ends that."""
        lines = Waiting(logger, REMIND_S, late=HELD_S)
        while (unseen := self._cameras.look()) and self.stop() is None:
            lines.log(f"waiting for the robot's cameras: {unseen}", level=logging.WARNING)
            time.sleep(self.robot_spec.dt)
            self._stand()
        self._cameras.unseen = ""

    def _read_state(self, *, after_reply: bool = False) -> str:
        """Take the newest state, or one after the last reply; returns what is wrong with the server, or nothing."""
        state = None if after_reply else self._client.newest_state()
        if state is None or state["pass"] == self._pass:
            try:
                state = self._client.next_state(STATE_WITHIN_S)
            except RobotError as e:
                return str(e)
        if state["state"] == "STALLED":  # of the server's watchdog, which measures nothing
            return f"the robot's server is STALLED ({state['word']})"
        restarted = bool(self._state) and state["run"] != self._state["run"]
        self._state, self._pass = state, state["pass"]
        if restarted:
            self._seen = 0
        return "the robot server was started anew" if restarted else ""

    def _stand(self) -> bool:
        """Wait until the robot stands in HOLD, or `stop` ends that; returns True."""
        lines = Waiting(logger, REMIND_S)
        while True:
            wrong = self._read_state(after_reply=True)
            state = self._state.get("state", "")
            if (state == "HOLD" and not wrong) or (self._state and self.stop() is not None):
                return True
            if (wrong or state in REMEDIES) and lines.due():
                held = self._state["held"] if not wrong else None
                since = f"held by {held['by']} for {self._state['moment'] - held['since']:.0f} s" if held else ""
                why = wrong or since or str(self._state["word"])
                logger.warning(f"waiting for the robot ({why}). {REMEDIES['' if wrong else state]}")
            self._keep_lease()
            time.sleep(POLL_S if state in ("STOPPED", "") else self.robot_spec.dt)

    def _release(self) -> None:
        if self._armed:
            self._armed = False
            with contextlib.suppress(RobotError):  # it stands already, or its watchdog brakes it
                self._client.request("release")

    def _observe(self) -> Observation:
        q, captured = self._state["q"], self._cameras.captured()
        if self._config.joints_at == "capture" and captured is not None:
            then = self._client.joints_at(captured)
            q = q if then is None else then
        parts = [q if name == "q" else self._state["extra"][name] for name in self._parts]
        return self._observed(np.concatenate(parts).astype(np.float32))

    def watch(self, cameras: Sequence[str]) -> None:
        self._cameras.watch(cameras)

    def frame_numbers(self) -> Mapping[str, int]:
        return self._cameras.numbers()

    def _frame(self, camera: str) -> np.ndarray:
        image = self._cameras.image(camera)
        if image is not None:
            return image
        if self.stop() is None:
            raise RobotError(f"camera {camera!r}: no picture came. See the log of the robot's server")
        of = self.robot_spec.camera(camera)  # a reset that was stopped waits for none, and no action follows it
        return np.zeros((of.height, of.width, 3), np.uint8)


def _conditions(state: dict[str, Any], draws: dict[str, Any]) -> str:
    """Return JSON of the profile that the robot is under, with its digest, and of what its reset drew."""
    values = {name: state[name] for name in ("profile", "digest")}
    drawn = {step: [round(float(x), 6) for x in numbers] for step, numbers in draws.items()}
    text = json.dumps(values | {"draws": drawn})
    return text if len(text) <= MAX_CONDITIONS else json.dumps(values)


def differing_fields(spec: RobotSpec, served: dict[str, Any]) -> list[str]:
    """Return what differs between an experiment's robot and the spec of a server's hello, a phrase for each field."""
    parts = served["state"] or [["q", len(served["low"])]]
    size = len(served["low"])
    poses = served.get("targets", "joints") == "poses"
    # Poses need not be told where the state has them: deltas of poses are actions as well.
    commanded = [-1] * size if poses and set(spec.joint_of_action) == {-1} else [*range(size)]
    arms = [list(a) for a in served["arms"]]
    wanted = {
        "joints": (len(spec.action_low), size),
        "joints commanded by actions": (list(spec.joint_of_action), commanded),
        "grippers": (list(spec.grippers), list(served["grippers"])),
        "arms": ([list(a) for a in spec.arms] or arms, arms),  # need not be told
        "seconds of a tick": (round(spec.dt, 9), round(served["tick"], 9)),
        "numbers of a state": (spec.state_dim, sum(length for _, length in parts)),
    }
    differing = [f"{name} {ours}, the server has {theirs}" for name, (ours, theirs) in wanted.items() if ours != theirs]
    if not differing:
        # As float32, which actions are: rounded limits of the joints themselves reach beyond them by a hair.
        low, high, least, most = (
            np.array(x, np.float32) for x in (served["low"], served["high"], spec.action_low, spec.action_high)
        )
        beyond = np.flatnonzero((least < low) | (most > high)).tolist()
        differing = [f"actions {beyond} reach beyond the robot's joints"] if beyond else []
    return differing
