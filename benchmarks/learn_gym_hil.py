"""LeRobot's tutorial task, gym-hil's PandaPickCube, as it is: three demonstrations, interventions by its own keyboard.

Needs `pip install gym-hil==0.1.14` in addition to this package. Three scripted demonstrations are recorded; one process
trains from them, while an operator who watches presses the keys of gym-hil's own input wrapper (a keyboard is
simulated, there is no display); then 50 held-out starts are evaluated without the operator, of the clone that training
begins with and of the last checkpoint. A finished run is not run again, an interrupted one is resumed:

    python benchmarks/learn_gym_hil.py --json gym_hil.json

The environment draws the cube's place from numpy's global generator and ignores `reset(seed=...)`: the wrapper
`Watched` makes its starts repeatable.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import functools
import importlib.metadata
import sys
import types
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from support import learning
from support.cli_args import settings
from support.results import Run, write

from serl_chunk.config.agents.acfql import AcfqlConfig
from serl_chunk.config.experiment import (
    ActorConfig,
    ChunkConfig,
    ExperimentConfig,
    LearnerConfig,
    NormaliserConfig,
    ReplayConfig,
)
from serl_chunk.config.overrides import apply_overrides
from serl_chunk.config.robots import GymConfig
from serl_chunk.runs.metrics import read_metrics
from serl_chunk.types import EVAL_SEED_BASE

N_DEMOS = 3
MAX_STEPS = 100  # ticks, gym-hil's own limit
STEP = 0.025  # metres, the greatest move of an axis on one tick
CLOSE, STAY, OPEN = 2.0, 1.0, 0.0  # the gripper's action; gym-hil's key "open" sends 2, which closes it
GRASP = 0.02  # metres between grip point and cube, along each axis, at which fingers are closed
CLOSING_TICKS = 3  # until the fingers hold the cube

QUICK = ("learner.max_steps=40", "learner.pretrain_steps=20",
         "learner.warmup_episodes=2", "learner.batch_size=16", "learner.steps_per_update=20", "learner.log_period=20",
         "agent.critic.hidden=16", "agent.flow.hidden=16")  # fmt: skip


class Key(enum.Enum):
    """The keys of `pynput.keyboard.Key` that gym-hil listens to."""

    up, down, left, right, shift, shift_r, ctrl_l, ctrl_r, enter, esc, space = range(11)


class Keyboard:
    """Stands in for `pynput.keyboard`: its listeners receive the keys that are pressed here."""

    Key = Key

    def __init__(self) -> None:
        self._listeners: list[Any] = []
        self._held: set[Key] = set()

    def Listener(self, on_press: Callable[[Key], None], on_release: Callable[[Key], None]) -> Any:
        """pynput's class of the same name."""
        listener = types.SimpleNamespace(on_press=on_press, on_release=on_release)
        listener.start = lambda: self._listeners.append(listener)
        listener.is_alive = lambda: listener in self._listeners
        listener.stop = lambda: self._listeners.remove(listener)
        return listener

    def hold(self, keys: set[Key]) -> None:
        """Release what is held and is not among `keys`, press what is not held yet."""
        for key in self._held - keys:
            for listener in self._listeners:
                listener.on_release(key)
        for key in keys - self._held:
            for listener in self._listeners:
                listener.on_press(key)
        self._held = set(keys)

    def tap(self, key: Key) -> None:
        held = set(self._held)
        self.hold(held | {key})
        self.hold(held)


class Hands:
    """Picks the cube: moves above it, down to it, closes the fingers and lifts. Reads the simulator, changes nothing.

    `act` gives the way to go (x, y, z in metres) and what the gripper does.
    """

    def __init__(self, env: gymnasium.Env) -> None:
        self._env = env.unwrapped
        self._closing = 0

    def reset(self) -> None:
        """A new episode, or the robot is taken over in the middle of one."""
        self._closing = 0

    @property
    def to_cube(self) -> np.ndarray:
        """Metres from the grip point to the cube, x, y, z."""
        data = self._env.data
        return data.sensor("block_pos").data - data.sensor("2f85/pinch_pos").data

    @property
    def closed(self) -> bool:
        """Whether the fingers are told to be closed."""
        return bool(self._env.get_gripper_pose()[0] > 127)

    def act(self, tolerance: float) -> tuple[np.ndarray, float]:
        """The way to go now, float64[3], and the gripper's action. `tolerance`: metres across at which to go down."""
        way = self.to_cube
        if self.closed and np.abs(way).max() < 2 * GRASP:
            self._closing += 1
            return np.array([0, 0, STEP if self._closing >= CLOSING_TICKS else 0.0]), CLOSE
        self._closing = 0
        if self.closed:  # on nothing
            return np.array([0, 0, STEP]), OPEN
        across = np.abs(way[:2]).max()
        if across > tolerance:
            return np.array([*way[:2], STEP if way[2] > -2 * GRASP else 0.0]), STAY
        if way[2] < -GRASP / 2:
            return way, STAY
        return np.zeros(3), CLOSE


class Expert:
    """The scripted demonstrator, moves in proportion; what it commands is float32[4] in the wrapper's units."""

    def __init__(self, env: gymnasium.Env) -> None:
        self._hands = Hands(env)

    def reset(self, seed: int) -> None:
        """After the environment's reset."""
        self._hands.reset()

    def act(self) -> np.ndarray:
        way, gripper = self._hands.act(tolerance=0.01)
        return np.array([*np.clip(way / STEP, -1, 1), gripper], np.float32)


class Operator:
    """Watches, takes the robot over with the space bar after a stall, late, and drives it with keys for a while."""

    STALL, REACTION, CORRECTION = 10, (3, 8), (10, 25)  # ticks; the last two drawn uniformly, both included
    RISE = 0.005  # metres of progress: less is none

    def __init__(self, keyboard: Keyboard, env: gymnasium.Env) -> None:
        self._keyboard, self._hands = keyboard, Hands(env)
        self._rng = np.random.default_rng(0)

    def reset(self, seed: int | None) -> None:
        """Before the environment's reset, which gym-hil's wrapper takes for the end of an intervention."""
        self._keyboard.hold(set())
        self._rng = np.random.default_rng(seed)
        self._left = 0  # ticks of the intervention
        self._watch()

    def _watch(self) -> None:
        self._best, self._idle, self._reaction = -np.inf, 0, None

    def tick(self) -> None:
        """Press and release keys, before the environment's step."""
        if self._left:
            self._left -= 1
            if self._left:
                return self._drive()
            self._keyboard.hold(set())
            self._keyboard.tap(Key.space)
            self._watch()
        elif self._wants_control():
            self._left = self._draw(self.CORRECTION)
            self._hands.reset()
            self._keyboard.tap(Key.space)
            self._drive()
        return None

    def _draw(self, ticks: tuple[int, int]) -> int:
        return int(self._rng.integers(*ticks, endpoint=True))

    def _wants_control(self) -> bool:
        way, height = self._hands.to_cube, self._hands._env.data.sensor("block_pos").data[2]
        progress = 5 * height - float(np.linalg.norm(way))
        if progress > self._best + self.RISE:
            self._best, self._idle, self._reaction = progress, 0, None
            return False
        self._idle += 1
        if self._reaction is None:
            self._reaction = self._draw(self.REACTION) if self._idle >= self.STALL else None
            return False
        self._reaction -= 1
        return self._reaction <= 0

    def _drive(self) -> None:
        way, gripper = self._hands.act(tolerance=STEP / 2)
        plus, minus = (Key.up, Key.left, Key.shift_r), (Key.down, Key.right, Key.shift)
        keys = {(plus if d > 0 else minus)[axis] for axis, d in enumerate(way) if abs(d) > STEP / 2}
        self._keyboard.hold(keys | {CLOSE: {Key.ctrl_r}, OPEN: {Key.ctrl_l}, STAY: set()}[gripper])


class Watched(gymnasium.Wrapper):
    """An environment with an operator at its keyboard (or none), and with a scripted demonstrator.

    Its starts follow from `seed`, which the environment ignores.
    """

    def __init__(self, env: gymnasium.Env, operator: Operator | None) -> None:
        super().__init__(env)
        self._operator = operator

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            np.random.seed(seed % 2**32)  # noqa: NPY002 (that generator is what the environment draws from)
        if self._operator is not None:
            self._operator.reset(seed)
        return self.env.reset(seed=seed, options=options)

    def step(self, action: np.ndarray) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        if self._operator is not None:
            self._operator.tick()
        return self.env.step(action)

    def make_expert(self) -> Expert:
        return Expert(self.env)


def make_pick_cube(fake_env: bool, *, operated: bool) -> gymnasium.Env:
    """gym-hil's PandaPickCube with its keyboard wrapper and without its window, states only."""
    keyboard = Keyboard()
    module = types.ModuleType("pynput")
    module.keyboard = keyboard  # type: ignore[attr-defined]
    sys.modules["pynput"] = module
    import gym_hil

    env = gym_hil.make_env(
        "gym_hil/PandaPickCubeBase-v0",
        use_inputs_control=True,
        use_gamepad=False,
        reset_delay_seconds=0.0,
        gripper_penalty=-0.05,
        random_block_position=True,
    )
    return Watched(env, Operator(keyboard, env) if operated else None)


def experiment(*, operated: bool) -> ExperimentConfig:
    """The sizes of `fake_single_arm`, not tuned for this task."""
    return ExperimentConfig(
        name="gym_hil",
        robot=GymConfig(
            make=functools.partial(make_pick_cube, operated=operated),
            robot_name="gym_hil pick cube",
            task="pick the cube up",
            control_hz=10,
            max_episode_steps=MAX_STEPS,
            grippers=(3,),
        ),
        agent=AcfqlConfig(),
        chunk=ChunkConfig(horizon=4),  # 0.4 s
        normaliser=NormaliserConfig(actions="absolute_range"),  # actions are moves in [-1, 1] already
        replay=ReplayConfig(capacity=50_000, demo_capacity=5_000, human_capacity=10_000),
        learner=LearnerConfig(
            utd_ratio=0.5,
            max_steps=3_000,
            pretrain_steps=3_000,
            critic_pretrain_steps=0,
            warmup_episodes=16,
            steps_per_update=50,
            checkpoint_period=1_000,
            keep_checkpoints=10,
        ),
        actor=ActorConfig(clock="lockstep"),
        discount=0.984,  # 0.984**100 = 0.20
    )


def run(seed: int, args: argparse.Namespace) -> Run:
    """Record, train (or resume), and evaluate every checkpoint; human ticks and time are those of the training."""
    operated, alone = (
        apply_overrides(experiment(operated=operated), [*args.overrides, ("seed", str(seed))])
        for operated in (True, False)
    )
    learning.record(alone, N_DEMOS, args.out / "demos")
    base = experiment(operated=True)
    folder = learning.train(operated, args.out / f"run_{seed}", [args.out / "demos"], base=base).run
    metrics, trained = read_metrics(folder), learning.Trained(alone, folder, {"reported": EVAL_SEED_BASE})
    episodes, last = metrics["episode"], metrics.last()
    assert last is not None
    points = [trained.evaluate(step, args.episodes) for step in trained.steps]
    trained.env.close()  # its OpenGL context ends before the interpreter
    points[-1] = dataclasses.replace(points[-1], human_ticks=last["human_ticks"], wall=round(last["wall"], 1))
    helped = sum(bool(e["intervention_count"]) for e in episodes)
    print(f"seed {seed}: {len(episodes)} episodes, {last['human_ticks']} human ticks in {helped} of them", flush=True)
    figures = {"demonstrations": N_DEMOS, "episodes": len(episodes), "episodes_with_intervention": helped}
    return Run("gym_hil", seed, "gym_hil", args.set, points, figures)


def main() -> None:
    p = learning.parser(__doc__, "gym_hil", of="of the experiment", episodes=50)
    p.add_argument("--quick", action="store_true", help="tiny, in OUT/quick: does it run?")
    args = learning.arguments(p)
    if args.quick:
        args.out, args.episodes, args.overrides = args.out / "quick", 2, settings(p, [*QUICK, *args.set])
    try:
        importlib.metadata.version("gym-hil")
    except importlib.metadata.PackageNotFoundError:
        p.error("gym-hil is not installed: pip install gym-hil==0.1.14")
    runs = [run(seed, args) for seed in args.seeds]
    if args.json:
        write(args.json, runs)


if __name__ == "__main__":
    main()
