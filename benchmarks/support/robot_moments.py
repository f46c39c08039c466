"""Moments at which the actor of a served robot in motion is killed or stopped: processes, and what the driver got.

The robot's server, a learner and an actor are the programs that users run. The driver is the simulated arms of
`serl_chunk_robot.drivers.fake`; it appends each set point to a file, with the moment at which it got it. All moments
are of this machine's monotonic clock, s.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import zmq

from serl_chunk.devices.recorded import save_interventions
from serl_chunk_robot.client.client import Keys, RobotClient, RobotError
from serl_chunk_robot.drivers.fake import HOME, viperx_arms
from serl_chunk_robot.robot_file.profiles import built_in
from serl_chunk_robot.safety.motion import stopping_distance
from serl_chunk_robot.wire import arrays
from serl_chunk_robot.wire.curve import Pair
from serl_chunk_robot.wire.protocol import MAX_STATE, STATE_PORT
from serl_chunk_robot.wire.sockets import connect, make_socket

HERE, J = "127.0.0.1", 14
COMMAND = ("-m", "serl_chunk")
SERVER = (*COMMAND, "robot")
VALIDITY = 0.08  # s, of a command at 50 Hz
P50, MOST = 0.015, 0.060  # s beyond it, within which a robot brakes
STOPPED_FOR = 5.0  # s between SIGSTOP and SIGCONT
WATCHED_FOR = 2.0  # s after SIGCONT
IN_MOTION = 0.1  # rad/s
EPISODE = 1500  # ticks of a recorded intervention
PATIENCE = 180.0  # s; JAX compiles
STOOD_STILL = "stood still"  # of the word of a loop that the machine kept from running

DRIVER = '''
import struct, time
import numpy as np
from serl_chunk_robot.drivers.aloha_arms import HIGH, LOW
from serl_chunk_robot.drivers.fake import HOME, SAG, FakeArms, viperx_arms

class Logged(FakeArms):
    """Simulated arms of an ALOHA that append each set point to a file."""

    def __init__(self, log):
        spec = viperx_arms().spec()._replace(simulated=True, home=HOME * 2, low=LOW * 2, high=HIGH * 2)
        super().__init__(spec, np.array(HOME * 2), rest=np.array(HOME * 2) + np.array(SAG * 2))
        self._file = open(log, "ab", buffering=0)

    def command(self, target, dt):
        self._file.write(struct.pack("<15d", time.monotonic(), *target))
        super().command(target, dt)
'''

EXPERIMENT = """
from serl_chunk import AcfqlConfig, AlohaConfig, ChunkConfig, ExperimentConfig, LearnerConfig, NormaliserConfig
from serl_chunk import CriticConfig, FlowConfig, ReplayConfig

def experiment() -> ExperimentConfig:
    return ExperimentConfig(
        name="served_arms",
        robot=AlohaConfig(server="127.0.0.1", cameras=(), max_episode_steps=20000),
        agent=AcfqlConfig(
            critic=CriticConfig(hidden=(16,), ensemble=2),
            flow=FlowConfig(hidden=(16,), steps=2), candidates=2,
        ),
        chunk=ChunkConfig(horizon=5),
        normaliser=NormaliserConfig(actions="absolute_range"),
        replay=ReplayConfig(capacity=50_000, demo_capacity=100, human_capacity=50_000),
        learner=LearnerConfig(
            batch_size=16, max_steps=1000, pretrain_steps=0, warmup_episodes=10_000, checkpoint_period=0
        ),
        discount=0.99,
    )
"""


class Moment(NamedTuple):
    """What became of the robot after one kill or stop. Seconds are from the last command that the server took."""

    how: str  # "kill" or "stop"
    speed: float  # rad/s, of the fastest joint at the last command
    signalled: float  # s until the signal
    braking: float  # s until the driver got the first set point of a pass that braked
    still: float  # s until the set point changed no more
    travel: float  # rad, of the joint that went furthest
    bound: float  # rad, of that joint: v x validity, and the profile's braking distance
    within: bool  # whether each joint stayed within its bound
    moved_after: int  # set points that differ from the one at which the robot came to rest
    word: str  # why the robot braked
    end: str  # and why it is stopped


def press_on(operator: RobotClient, state: Mapping[str, Any]) -> None:
    """Press the keys of a human operator who is shown `state`: clear a stopped robot, and let a held one go on.

    A stand-in for `serl-chunk robot clear` and `go` at a terminal, for rigs that no one watches.
    """
    with contextlib.suppress(RobotError):
        if state.get("state") == "STOPPED" and state.get("answered"):
            operator.request("clear", generation=state["generation"])
        elif state.get("state") == "HELD" and state["controller"]:
            lease = {name: state[name] for name in ("controller", "process")}
            operator.request("go", generation=state["generation"], **lease)


def make_keys(folder: Path) -> dict[str, Keys]:
    """Make a folder of keys; returns those of the operator and the actor."""
    server, clients = Pair.new(), {"operator": Pair.new(), "actor": Pair.new()}
    (folder / "allowed").mkdir(mode=0o700, parents=True)
    folder.chmod(0o700)
    files = {f"allowed/{name}.json": {"public": pair.public} for name, pair in clients.items()}
    files["allowed/operator.json"]["role"] = "operator"
    for name, values in {**files, "server.json": {"public": server.public, "secret": server.secret}}.items():
        (folder / name).write_text(json.dumps(values))
        (folder / name).chmod(0o600)
    return {name: Keys(server.public, pair) for name, pair in clients.items()}


def recording(path: Path, episodes: int) -> None:
    """Write interventions that move all joints but the grippers along sines, for as long as an episode lasts."""
    tick = np.arange(EPISODE)
    t, phase = tick[:, None] * 0.02, np.arange(J) * 0.9
    wave = 0.15 * (np.sin(np.pi * t + phase) - np.sin(phase)) * np.minimum(t, 1.0)
    wave[:, [6, 13]] = 0.0
    action = np.array(HOME * 2) + wave
    save_interventions(
        path, episode=np.repeat(np.arange(episodes), EPISODE), tick=np.tile(tick, episodes),
        action=np.tile(action, (episodes, 1)).astype(np.float32), idle=np.zeros(episodes * EPISODE, bool),
    )  # fmt: skip


class Cell:
    """A served robot, its learner and the actor of the moment.

    Args:
        folder: new, for all files.
        ports: of the robot's server, whose next one is free too, and of the learner.
        episodes: moments at most.
        environment: of all processes.
        program: of the actor: arguments of Python before those of the command.
        settings: of actor and learner; default: the recorded interventions.
        demos: demonstrations of the learner.
        server: arguments of Python before those of the robot's server.
    """

    def __init__(
        self, folder: Path, ports: tuple[int, int], episodes: int, environment: Mapping[str, str],
        program: Sequence[str] = COMMAND, settings: Sequence[str] = (), demos: Path | None = None,
        server: Sequence[str] = SERVER,
    ) -> None:  # fmt: skip
        self._folder, (self._port, learner) = folder, ports
        self._program, self._server = program, server
        self._log, self._state = folder / "set_points", folder / "state"
        cache = str(folder / "compiled")
        self._environment = {
            "JAX_COMPILATION_CACHE_DIR": cache, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1", **environment, "XDG_STATE_HOME": str(self._state),
        }  # fmt: skip
        (folder / "logged.py").write_text(DRIVER)
        (folder / "served_arms.py").write_text(EXPERIMENT)
        (folder / "robot.toml").write_text(
            f'name = "moments"\nstart = "evaluating"\nport = {self._port}\n'
            f'[driver]\nname = "logged.py:Logged"\nlog = "{self._log}"\n'
        )
        recording(folder / "sines.npz", episodes)
        self.limits = built_in(viperx_arms().spec())["evaluating"]
        self._processes: list[subprocess.Popen[bytes]] = []
        self.run = folder / "run"
        shared = [
            "--exp_name", str(folder / "served_arms.py"), "--port", str(learner), "--config.actor.clock=realtime",
            *(settings or [f"--config.actor.intervention={folder / 'sines.npz'}"]),
        ]  # fmt: skip
        self._actor_arguments = [*shared, "--actor", f"--config.robot.server={HERE}:{self._port}"]
        shown = [] if demos is None else ["--demo_path", str(demos)]
        self._learner_arguments = [*shared, "--learner", "--debug", "--checkpoint_path", str(self.run), *shown]
        self.actor: subprocess.Popen[bytes] | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._states = make_socket(self._context, zmq.SUB, MAX_STATE)
        self._states.rcvhwm = 100_000  # the state of every pass
        self._states.setsockopt(zmq.SUBSCRIBE, b"")
        connect(self._states, HERE, self._port + STATE_PORT)
        self.operator = RobotClient(f"{HERE}:{self._port}", name="operator", role="operator", answer=20.0)
        self.state: dict[str, Any] = {}

    def start(self) -> None:
        """Start the robot's server, which stands, and the learner."""
        self._start("server", [*self._server, "serve", str(self._folder / "robot.toml")])
        self.until("STOPPED")

    def learn(self) -> None:
        self._start("learner", [*COMMAND, *self._learner_arguments])

    def act(self) -> None:
        """Start an actor, of the same name as the one before it."""
        self.actor = self._start("actor", [*self._program, *self._actor_arguments])

    def _start(self, what: str, program: list[str]) -> subprocess.Popen[bytes]:
        with (self._folder / f"{what}_{len(self._processes)}.txt").open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, *program], env=self._environment, stdin=subprocess.DEVNULL, stdout=out,
                stderr=subprocess.STDOUT, start_new_session=True, cwd=self._folder,
            )  # fmt: skip
        self._processes.append(process)
        return process

    def close(self) -> None:
        self.operator.close()
        self._context.destroy(linger=0)
        for process in self._processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # of a group of its own
                process.wait()

    def lateness(self, seconds: float = 6.0) -> dict[str, float]:
        """Lateness of the server's passes, s, of the last 1000 at the end of so many seconds."""
        self.watch(seconds)
        return dict(self.state["late"])

    # The published state.

    def watch(self, seconds: float) -> list[dict[str, Any]]:
        """Return the states that come within so many seconds; 0: those that are there."""
        ends, found = time.monotonic() + seconds, []
        while True:
            left = max(int(1e3 * (ends - time.monotonic())), 0)
            if not self._states.poll(left):
                return found
            self.state = arrays.unpack(self._states.recv(copy=False), MAX_STATE)
            found.append(self.state)
            if not left and len(found) > 10_000:
                return found

    def until(self, state: str) -> None:
        ends = time.monotonic() + PATIENCE
        while self.state.get("state") != state:
            self.watch(0.02)
            self._check(ends, f"the robot is {self.state.get('state')}, not {state}: {self.state.get('word')}")

    def in_motion(self, seconds: float, name: str = "RUN") -> None:
        """Wait until the robot has been in a state and in motion for so long; clear it, and let it go on."""
        ends, since, moves = time.monotonic() + PATIENCE, time.monotonic(), False
        before: dict[str, Any] | None = None
        while True:
            for state in self.watch(0.01):
                moves = False
                if state["state"] == name and before is not None and before["state"] == name:
                    way = np.abs(state["set_point"] - before["set_point"]).max()
                    moves = bool(way > IN_MOTION * max(state["moment"] - before["moment"], 1e-9))
                since = since if moves else time.monotonic()
                before = state
            fresh = before is not None and time.monotonic() - before["moment"] < 0.05
            if moves and fresh and time.monotonic() - since >= seconds:
                return
            press_on(self.operator, self.state)
            self._check(ends, f"the robot does not move: {self.state.get('state')}, {self.state.get('word')}")

    def _check(self, ends: float, otherwise: str) -> None:
        ended = any(process.poll() not in (None, -signal.SIGKILL) for process in self._processes)
        if ended or time.monotonic() > ends:
            logs = [f"{path.name}:\n{path.read_text()[-2000:]}" for path in sorted(self._folder.glob("*_*.txt"))]
            raise RuntimeError("\n".join([otherwise, *logs]))

    def set_points(self) -> tuple[np.ndarray, np.ndarray]:
        """The moments at which the driver got set points, float64[N], and these, float64[N, J]."""
        rows = np.frombuffer(self._log.read_bytes(), np.float64)
        rows = rows[: len(rows) // (J + 1) * (J + 1)].reshape(-1, J + 1)
        return rows[:, 0], rows[:, 1:]

    # Moments.

    def moment(self, how: str, waits: float) -> Moment:
        """Kill the actor ("kill") or stop it for 5 s ("stop"), once it has moved the robot for `waits` seconds."""
        return self.measured(how, *self.interrupted(how, waits, STOPPED_FOR))

    def interrupted(self, how: str, waits: float, stopped_for: float) -> tuple[float, list[dict[str, Any]]]:
        """Return when the actor got the signal, and the states from then on."""
        actor = self.actor
        assert actor is not None
        self.in_motion(waits)
        begins = time.monotonic()
        os.kill(actor.pid, signal.SIGKILL if how == "kill" else signal.SIGSTOP)
        states = [self.state, *self.watch(1.5)]
        if how == "kill":
            actor.wait()
        else:
            states += self.watch(max(0.0, begins + stopped_for - time.monotonic()))
            os.kill(actor.pid, signal.SIGCONT)
            states += self.watch(WATCHED_FOR)
        return begins, states

    def measured(self, how: str, begins: float, states: list[dict[str, Any]]) -> Moment:
        """Return what became of the robot, which has come to rest."""
        run = [s for s in states if s["state"] == "RUN"]
        after = [s for s in states if s["moment"] > run[-1]["moment"]]
        if not after:
            raise RuntimeError(f"the robot did not brake after {how}: {states[-1]['word']}")
        number, generation = run[-1]["number"], run[-1]["generation"]
        last = min(s["moment"] for s in run if (s["number"], s["generation"]) == (number, generation))
        braked = after[0]["moment"]
        moments, targets = self.set_points()
        at, braking = (int(np.searchsorted(moments, m)) for m in (last, braked))
        end = int(np.searchsorted(moments, begins + 1.2))  # it has come to rest by then
        changes = np.flatnonzero((targets[at + 1 : end] != targets[at : end - 1]).any(axis=1))
        still = at + 1 + int(changes[-1]) if len(changes) else at
        velocity = np.diff(targets[at - 6 : still + 1], axis=0) * 200.0  # of 200 passes a second
        acceleration = np.diff(velocity, axis=0) * 200.0
        v, a = np.abs(velocity).max(axis=0), np.abs(acceleration[: braking - at + 5]).max(axis=0, initial=0.0)
        bound = v * VALIDITY + stopping_distance(v, a, self.limits.rates, 1 / 200)
        travel = np.abs(targets[still] - targets[at])
        furthest = int(travel.argmax())
        return Moment(
            how, float(np.abs(velocity[5]).max()), begins - last, float(moments[braking] - last),
            float(moments[still] - last), float(travel[furthest]), float(bound[furthest]),
            bool((travel <= bound + 1e-9).all()), int((targets[still:] != targets[still]).any(axis=1).sum()),
            str(after[0]["word"]), str(states[-1]["word"]),
        )  # fmt: skip
