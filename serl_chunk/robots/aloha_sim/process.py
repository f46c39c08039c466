"""gym-aloha's tasks in real time, in a process of their own: `python -m serl_chunk.robots.aloha_sim.process`.

The arms keep their last target whatever becomes of the robot server, and the next server finds them there. Messages
are datagrams on loopback, maps of `serl_chunk_robot.wire.arrays`; the sender of the last one but an "inject" gets the
state every 5 ms.

    hello, ping          nothing
    target               target (float64[14])
    scene                seed, number (one that was done is not repeated)
    torque               on (bool)
    clear                removes a fault, and switches torque on with the arms where they are; entangled arms are put
                         to their home first, as an operator takes them apart
    inject               faults, for tests and rehearsals: see `Simulation.inject`
"""

from __future__ import annotations

import argparse
import contextlib
import select
import socket
from collections import deque
from collections.abc import Sequence
from time import monotonic
from typing import Any

import numpy as np

from serl_chunk.config.robots import AlohaSimConfig
from serl_chunk.robots.aloha_sim.env import CONTROL_HZ, HOME, SUCCESS_STAGE, AlohaSimEnv
from serl_chunk_robot.server.serve import prioritise
from serl_chunk_robot.wire import arrays
from serl_chunk_robot.wire.codec import WireError

HERE = "127.0.0.1"
CONTROL_TICK = 1 / CONTROL_HZ  # s between two judgements of the task
PERIOD = 0.005  # s between two states
BEHIND = 0.1  # s: a process that stood still for longer does not make up for it
ENDS = 60.0  # s without a message of a server
LARGEST = 8192  # bytes of a message
EVENTS = 16  # the newest that a state repeats
HANGS = 0.03  # rad, or of an opening: how far arms at rest are from their target
# Arms that were driven into one another do not get free again: so far from a target, or that fast at one that stands,
# or fingers so far beyond their ends, for so many seconds.
STUCK, RESTLESS, BEYOND, STUCK_FOR = 0.3, 0.5, 0.1, 1.0  # rad, rad/s, of an opening, s


class Simulation:
    """The simulated task and its faults; it is given the time, s."""

    def __init__(self, env: AlohaSimEnv, now: float) -> None:
        self._env, self._began, self._steps = env, now, 0
        self._step = env.model.opt.timestep
        env.reset(seed=0)
        self.target = np.array(HOME)
        self._arms = ~np.isin(np.arange(len(HOME)), env.robot_spec.grippers)
        self._gains = env.model.actuator_gainprm.copy(), env.model.actuator_biasprm.copy()
        self._torque, self._succeeded = True, False
        self._pinned: np.ndarray | None = None  # objects' poses until the arms are commanded to move
        self._scene = -1
        self._events: deque[list[Any]] = deque(maxlen=EVENTS)
        self._judged = 0
        self._lag, self._fault = 0.0, ""
        self._stuck = self._still = 0  # control ticks; of a target that stands
        self._left = {"minus_pi": 0, "frozen": 0, "dropped": 0}  # states that are yet to have these faults
        self._past: deque[dict[str, Any]] = deque()
        self._repeated: dict[str, Any] = {}

    def take(self, message: dict[str, Any]) -> None:
        op = message.get("op")
        if op == "target":
            target = np.array(message["target"], np.float64)
            if target.shape == self.target.shape and np.isfinite(target).all():
                if not np.array_equal(target, self.target):
                    self._pinned, self._still = None, 0
                self.target = target
        elif op == "scene" and message["number"] != self._scene:
            self._scene, self._succeeded = int(message["number"]), False
            self._pinned = self._env.reset_objects(int(message["seed"]))
        elif op == "torque":
            self._switch(bool(message["on"]))
        elif op == "clear":
            self._fault = ""
            if self._stuck * CONTROL_TICK >= STUCK_FOR:
                self._stuck = 0
                self._env.place_arms(np.array(HOME))
            self._switch(True)
        elif op == "inject":
            self.inject(**{key: value for key, value in message.items() if key != "op"})

    def inject(
        self, *, lag: float | None = None, fault: str | None = None, dropped: int = 0, minus_pi: int = 0,
        frozen: int = 0, torque: bool = True,
    ) -> None:  # fmt: skip
        """Let faults happen.

        Args:
            lag: seconds by which states come late from now on.
            fault: reported until it is cleared.
            dropped, minus_pi, frozen: the next states that are not sent, that read -pi, or that repeat the last one.
            torque: False: the arms lose it.
        """
        self._lag = self._lag if lag is None else lag
        self._fault = self._fault if fault is None else fault
        for name, n in (("dropped", dropped), ("minus_pi", minus_pi), ("frozen", frozen)):
            self._left[name] += n
        if not torque:
            self._switch(False)

    def run_until(self, now: float) -> None:
        if now - self._began - self._steps * self._step > BEHIND:
            self._began = now - self._steps * self._step - PERIOD
        due = int((now - self._began) / self._step)
        while self._steps < due:
            until = min(due, (self._steps // self._env.substeps + 1) * self._env.substeps)
            self._advance(until - self._steps)
            self._steps = until
            if self._steps % self._env.substeps == 0:
                success = self._env.stage() == SUCCESS_STAGE
                if success and not self._succeeded:
                    self._events.append([self._judged, 1.0, True])
                    self._judged += 1
                self._succeeded |= success
                self._notice_stuck()

    def state(self, now: float) -> dict[str, Any] | None:
        """Return the state to send at `now`; None where a fault keeps it."""
        env = self._env
        state: dict[str, Any] = {
            "q": env.joints, "dq": env.speeds, "effort": env.forces, "stamp": now, "target": self.target,
            "objects": env.object_poses.reshape(-1), "events": list(self._events), "torque": self._torque,
            "scene": self._scene, "faults": [self._fault] if self._fault else [],
        }  # fmt: skip
        if self._take("dropped"):
            return None
        if self._take("minus_pi"):
            state |= {"q": np.full(len(self.target), -np.pi), "dq": np.zeros(len(self.target))}
        elif self._take("frozen"):
            state |= {key: self._repeated[key] for key in ("q", "dq", "effort") if key in self._repeated}
        self._repeated = state
        self._past.append(state)
        sent = None
        while self._past and self._past[0]["stamp"] <= now - self._lag:
            sent = self._past.popleft()
        return sent

    def _notice_stuck(self) -> None:
        if self._stuck * CONTROL_TICK >= STUCK_FOR:  # until an operator takes them apart
            return
        q, fast = self._env.joints, np.abs(self._env.speeds)[self._arms].max()
        apart, fingers = np.abs(q - self.target)[self._arms].max(), q[~self._arms]
        self._still += 1
        stuck = apart > STUCK or max(-fingers.min(), fingers.max() - 1) > BEYOND
        stuck |= self._still * CONTROL_TICK > STUCK_FOR and fast > RESTLESS
        self._stuck = self._stuck + 1 if self._torque and stuck else 0
        if self._stuck * CONTROL_TICK >= STUCK_FOR:
            self._fault = f"the simulated arms are entangled ({apart:.1f} rad from their target)"
            self._switch(False)

    def _take(self, name: str) -> bool:
        self._left[name] -= (some := self._left[name] > 0)
        return some

    def _advance(self, steps: int) -> None:
        env = self._env
        if self._torque:
            env.command(np.clip(self.target, env.robot_spec.action_low, env.robot_spec.action_high))
        if self._pinned is None:
            env.advance(steps)
            return
        # Until the arms move, time stands still: for all, once the arms are at home but for what they hang below it.
        if np.abs(env.joints - HOME).max() < HANGS:
            env.place_arms(np.array(HOME))
            return
        for _ in range(steps):
            env.advance(1)
            env.place_objects(self._pinned)

    def _switch(self, on: bool) -> None:
        """Switch torque; the arms are where they are when it comes back."""
        if on and not self._torque:
            self.target = self._env.joints
        gain, bias = self._gains
        self._env.model.actuator_gainprm[:] = gain * on
        self._env.model.actuator_biasprm[:] = bias * on
        self._torque = on


def serve(env: AlohaSimEnv, port: int, ends: float) -> None:
    """Simulate until no server has sent anything for `ends` seconds. Raises OSError where the port is in use."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.bind((HERE, port))
        s.setblocking(False)
        began = monotonic()
        simulation, peer, heard_at, due = Simulation(env, began), None, began, began
        name = env.robot_spec.name
        while (now := monotonic()) - heard_at < ends:
            if select.select([s], [], [], max(due - now, 0.0))[0]:
                with contextlib.suppress(OSError, WireError, KeyError, TypeError, ValueError):
                    data, sender = s.recvfrom(LARGEST)
                    message = arrays.unpack(data, LARGEST)
                    simulation.take(message)
                    if message.get("op") != "inject":
                        peer, heard_at = sender, monotonic()
            now = monotonic()
            if now >= due:
                simulation.run_until(now)
                state = simulation.state(now)
                if peer is not None and state is not None:
                    with contextlib.suppress(OSError):  # a server that was killed
                        s.sendto(arrays.pack({**state, "task": name}), peer)
                due = max(due + PERIOD, now)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the process of a driver."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--env_name", default="transfer_cube")
    parser.add_argument("--ends", type=float, default=ENDS, help="seconds after the last message of a server")
    arguments = parser.parse_args(argv)
    prioritise()  # a robot's own controllers are not delayed by what its PC does
    serve(AlohaSimEnv(AlohaSimConfig(env_name=arguments.env_name)), arguments.port, arguments.ends)


if __name__ == "__main__":
    main()
