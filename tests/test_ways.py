"""The ways of a step and of a snapshot through the product's files, traced on a real learner and a real actor."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from actor_helpers import SPEC, LineEnv, identity, make_config
from ports import free_port

import serl_chunk
import serl_chunk_robot
from serl_chunk.actor.episode import EpisodeRunner
from serl_chunk.actor.policy import LocalPolicy
from serl_chunk.agents.base import Agent
from serl_chunk.agents.registry import make_agent
from serl_chunk.config.agents.acfql import AcfqlConfig
from serl_chunk.config.agents.critic import CriticConfig
from serl_chunk.config.agents.encoder import EncoderConfig
from serl_chunk.config.agents.flow import FlowConfig
from serl_chunk.config.experiment import ExperimentConfig, LearnerConfig, ReplayConfig
from serl_chunk.learner.learner import Learner
from serl_chunk.learner.offline_data import InitialData
from serl_chunk.learner.service import LearnerService
from serl_chunk.runs.folder import open_run
from serl_chunk.runs.metrics import MetricsLog
from serl_chunk.transport.client.link import LearnerLink
from serl_chunk.transport.storage.spool import Spool
from serl_chunk.types import STATE, Step, StepBlock
from serl_chunk_robot.wire.codec import Limits

pytestmark = [pytest.mark.compiles, pytest.mark.slow]  # threads of a whole learner are traced, ten seconds

ROOTS = [Path(package.__file__).resolve().parent for package in (serl_chunk, serl_chunk_robot)]
SHAPES = ("types.py",)  # the data themselves
HORIZON, MARKED, LENGTH = 2, 5, 12
CAMERA = SPEC.cameras[0].name
STEP, SNAPSHOT = 22, 11  # files at most; a step is acknowledged before its turn to be inserted
MARK = np.float32(0.7390851).tobytes()  # in all that one tick observes and executes


def holds(value: Any, mark: bytes, depth: int = 12) -> bool:
    """Whether data in a value, or in the containers that it consists of, have the bytes of `mark`."""
    if isinstance(value, bytes | bytearray | memoryview):
        return mark in bytes(value)
    if isinstance(value, float):
        return np.float32(value).tobytes() == mark
    if isinstance(value, np.ndarray):
        return value.dtype != object and mark in value.tobytes()
    if depth == 0:
        return False
    if isinstance(value, StepBlock):
        return holds(vars(value), mark, depth - 1)
    if isinstance(value, dict):
        return any(holds(v, mark, depth - 1) for v in value.values())
    if isinstance(value, tuple | list | collections.deque):
        return any(holds(v, mark, depth - 1) for v in list(value))
    if type(value).__name__ == "Frame":  # of ZeroMQ
        return mark in value.bytes
    if type(value).__name__ == "ArrayImpl" and not value.is_deleted():  # of JAX
        return value.dtype == np.float32 and mark in np.asarray(value).tobytes()
    return False


class Way:
    """Files of the product that handle marked data, in the order of the first time, with the function.

    A file does where one of its functions receives or returns such data, or hands it to another function of the
    product. On the thread of the control loop the data are a `Step`: what else holds them there is the loop's own.
    """

    def __init__(self) -> None:
        self.files: dict[str, str] = {}
        self.traces = self._steps_alone = False
        self._mark, self._names, self._loop = b"", dict[str, str](), threading.current_thread()

    def follow(self, mark: bytes, *, steps_alone: bool = False) -> None:
        self._mark, self._steps_alone, self.traces = mark, steps_alone, True

    def name(self, file: str) -> str:
        """Return a file's path within its package; empty for one that is none of the product's."""
        if file not in self._names:
            root = next((r for r in ROOTS if Path(file).is_relative_to(r)), None)
            known = root is not None and Path(file).name not in SHAPES
            self._names[file] = f"{root.name}/{Path(file).relative_to(root)}" if known else ""
        return self._names[file]

    def see(self, frame: FrameType, event: str, value: Any) -> None:
        code, back = frame.f_code, frame.f_back
        files = [(self.name(c.co_filename), c) for c in (code, back and back.f_code) if c is not None]
        if not files[0][0] or all(name in self.files or not name for name, _ in files):
            return
        given = [frame.f_locals.get(n) for n in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]]
        data = given if event == "call" else [value]
        if self._steps_alone and threading.current_thread() is self._loop:
            data = [v for v in data if isinstance(v, Step)]
        if holds(data, self._mark):
            for name, c in files:
                if name:
                    self.files.setdefault(name, c.co_qualname)


@contextlib.contextmanager
def tracing(*ways: Way) -> Iterator[None]:
    def see(frame: FrameType, event: str, value: Any) -> None:
        if event in ("call", "return"):  # of millions, while a network is compiled
            for way in ways:
                if way.traces:
                    way.see(frame, event, value)

    threading.setprofile(see)
    sys.setprofile(see)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


class MarkedEnv(LineEnv):
    """A line on which the data of one tick have the mark."""

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        value, marked = float(np.frombuffer(MARK, np.float32)[0]), self.tick == MARKED
        observation, reward, terminated, truncated, info = super().step(action)
        if marked:
            info["executed_action"] = np.full(2, value, np.float32)
        if self.tick == MARKED:
            observation = {STATE: np.full(3, value, np.float32)}
        return observation, value if marked else reward, terminated, truncated, info

    def _frames(self, tick: int, cameras: Any = None) -> dict[str, np.ndarray]:
        frames = super()._frames(tick, cameras)
        if tick == MARKED:
            frames = {k: np.resize(np.frombuffer(MARK, np.uint8), v.shape) for k, v in frames.items()}
        return frames


def experiment() -> ExperimentConfig:
    agent = AcfqlConfig(
        critic=CriticConfig(hidden=(8,), ensemble=2),
        flow=FlowConfig(hidden=(8,), steps=1),
        candidates=2,
        image_keys=(CAMERA,),
        encoder=EncoderConfig(features=(4,), latent=4),
    )
    return dataclasses.replace(
        make_config(horizon=HORIZON),
        agent=agent,
        learner=LearnerConfig(pretrain_steps=0, batch_size=32),
        replay=ReplayConfig(capacity=2000, demo_capacity=100, human_capacity=100, image_capacity=2000),
    )


class Pair:
    """A learner and an actor in this process, with loopback between them."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        config, port = experiment(), free_port()
        run = open_run(config, SPEC, str(folder / "run"))
        stack.enter_context(run.locked())
        self.service = stack.enter_context(
            contextlib.closing(LearnerService(config, run, {}, bind="127.0.0.1", port=port))
        )
        self.service.server.start()
        agent: Agent = make_agent(config, SPEC)
        metrics = stack.enter_context(MetricsLog(run.path, wandb_project=None, wandb_name="", config={}))
        self.learner = Learner(
            config, SPEC, agent, identity(HORIZON, CAMERA), InitialData(), metrics,
            publish=self.service.server.publish, threaded=True,
        )  # fmt: skip
        stack.callback(self.learner.close)
        self.service.attach(self.learner)
        limits = Limits(1 << 26, 64)
        self.link = stack.enter_context(contextlib.closing(LearnerLink(
            config.transport, host="127.0.0.1", port=port, actor_id="a", contract={},
            spools=lambda run: Spool(folder / "spool" / run, limits),
        )))  # fmt: skip
        self.link.connect(timeout=30)
        self.policy = LocalPolicy(agent, identity(HORIZON, CAMERA), SPEC, seed=0)
        self.runner = EpisodeRunner(MarkedEnv(length=2 * LENGTH), self.policy, self.link, config=config)
        stack.callback(self.runner.close)

    def give_snapshot(self) -> None:
        """Publish one, and act with it once it has arrived."""
        version, end = self.learner.publish(), time.monotonic() + 30
        while (snapshot := self.link.latest()) is None or snapshot.version < version:
            self.service.server.check()
            assert time.monotonic() < end
            time.sleep(0.01)
        self.policy.swap(snapshot)


def leaf_bytes(pair: Pair) -> bytes:
    params = pair.learner.agent.published(pair.learner.state, pair.learner.base, pretrained=False)
    flat = pair.learner.agent.flatten_params(params)
    largest = max((v for v in flat.values() if v.dtype == np.float32), key=lambda v: v.nbytes)
    return largest.tobytes()[:16]


def shown(way: Way) -> str:
    return "\n".join(f"{i:2} {name}: {function}" for i, (name, function) in enumerate(way.files.items(), 1))


def test_the_ways_of_a_step_and_of_a_snapshot(tmp_path):
    ways = step, snapshot = Way(), Way()
    with contextlib.ExitStack() as stack, tracing(*ways):  # its threads start here, and are traced to their end
        pair = Pair(tmp_path, stack)
        snapshot.follow(leaf_bytes(pair))
        pair.give_snapshot()
        snapshot.traces = False
        step.follow(MARK, steps_alone=True)
        episode = pair.runner.begin(0)
        while episode.tick < LENGTH:
            request = pair.runner.due(episode)
            if request is not None:
                pair.runner.accept(episode, pair.policy.decide(request))
            pair.runner.tick(episode)
        assert pair.link.flush(30)
        ends = time.monotonic() + 10  # acknowledged, and inserted a moment later
        while pair.learner.replay.stats()["replay/online_rows"] < LENGTH - 1 and time.monotonic() < ends:
            time.sleep(0.01)
        step.follow(MARK)
        batch = pair.learner.replay.sample(np.random.default_rng(0), 256)
        step.traces = False
        pair.runner.abort(episode)
    assert MARK in batch.rewards.tobytes()
    print(f"{shown(step)}\n\n{shown(snapshot)}")
    assert len(step.files) <= STEP, shown(step)
    assert len(snapshot.files) <= SNAPSHOT, shown(snapshot)
