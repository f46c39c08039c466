"""What an experiment puts on its link, and whether a link carries it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from serl_chunk.commands.checks import Check, duration, per_second
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.transport import records, wire
from serl_chunk.transport.stats import in_words
from serl_chunk.types import IMAGE_PREFIX, STATE, RobotSpec, Source, Step, StepBlock

JPEG_SHARE = 0.1  # of an image's bytes that its JPEG takes, roughly: it depends on the picture
HOPELESS = 0.25  # share of its bytes below which a robot would mostly stand and wait
SLOW_SNAPSHOT = 5.0  # seconds


class Bandwidth(NamedTuple):
    """Bytes from one actor to the learner at the experiment's control rate, every step in a message of its own."""

    mean: float  # per second, the policy acting: frames at decisions
    human: float  # per second, a person acting: frames on every tick
    images: float  # share of `mean` that is frames, 0..1
    episode_seconds: float  # the longest


def expected(config: ExperimentConfig, spec: RobotSpec) -> Bandwidth:
    """Measured on messages of this experiment's shapes, without TCP's own few per cent."""
    horizon, a = config.chunk.horizon, spec.action_dim
    candidates = getattr(config.agent, "candidates", 1)
    observation = {STATE: np.zeros(spec.state_dim, np.float32)}
    decision = {
        "chunk": np.zeros((horizon, a), np.float32),
        "q": np.zeros((), np.float32),
        "values": np.zeros(candidates),
    }
    step = Step(0, observation, np.zeros(a, np.float32), 0.0, Source.POLICY, 0, 0, 0.0)
    plain = _message(step)
    decided = _message(step._replace(decision=decision))
    frames = 0.0
    for camera in map(spec.camera, config.agent.image_keys):
        frame = {IMAGE_PREFIX + camera.name: np.zeros((camera.height, camera.width, 3), np.uint8)}
        nbytes = _message(step._replace(observation={**observation, **frame})) - plain
        frames += nbytes * (JPEG_SHARE if config.transport.jpeg_quality else 1.0)
    every = config.chunk.executed - config.actor.delay_ticks
    # Frames are recorded at decisions, and where windows end that begin there, unless that is at another decision.
    shown = (1 if config.chunk.returned % every == 0 else 2) * frames / every
    mean = plain + (decided - plain) / every + shown
    return Bandwidth(
        mean * spec.control_hz,
        (plain + frames) * spec.control_hz,
        shown / mean,
        spec.max_episode_steps / spec.control_hz,
    )


def _message(step: Step) -> int:
    block = StepBlock.from_steps("an-actor-0123abcd-000123", [step])
    return wire.size_of(records.encode_record(block, 10**6))


def check_bandwidth(need: Bandwidth, measured: float, config: ExperimentConfig) -> Check:
    """Whether a link of `measured` bytes per second carries what one actor of the experiment records."""
    needs = f"the experiment records {per_second(need.mean)}"
    if need.images:
        needs += f" ({per_second(need.human)} while a person acts)"
    said = f"{needs}; measured {per_second(measured)}"
    figures = {"expected_bytes_per_s": need.mean, "expected_bytes_per_s_human": need.human}
    if measured >= need.human:
        return Check("bandwidth", "ok", said, figures=figures)
    if measured >= need.mean:
        said += ": what a person's turns add is sent between episodes"
        return Check("bandwidth", "warning", said, _relief(need, config), figures)
    if measured < HOPELESS * need.mean:
        said += ": the robot would mostly wait for room in its spool"
        return Check("bandwidth", "FAIL", said, _relief(need, config), figures)
    late = need.episode_seconds * (need.mean / measured - 1)
    said += f": an episode of {duration(need.episode_seconds)} needs {duration(late)} more to arrive"
    return Check("bandwidth", "warning", said, _relief(need, config), figures)


def _relief(need: Bandwidth, config: ExperimentConfig) -> str:
    if need.images < 0.5:
        return "use a wire instead of radio, or a machine nearer to the learner; nothing is lost, but steps arrive late"
    if config.transport.jpeg_quality:
        return "fewer or smaller cameras (agent.image_keys), or a faster link; nothing is lost, but steps arrive late"
    return (
        "--config.transport.jpeg_quality=90 on the actor sends about a tenth, slightly changed; or fewer or smaller "
        "cameras, or a faster link. Nothing is lost, but steps arrive late"
    )


def check_snapshots(version: int, nbytes: int, measured: float, config: ExperimentConfig) -> Check:
    """How long the policy takes to arrive, if the way back is as fast as the way there."""
    every = config.learner.steps_per_update
    if version < 0:
        return Check(
            "snapshots", "ok", f"none published yet; one comes every {every} updates, the newest alone is sent"
        )
    seconds = nbytes / measured if measured else float("inf")
    said = f"version {version} has {in_words(nbytes)}, {duration(seconds)} if the way back is as fast"
    figures = {"snapshot_bytes": nbytes, "snapshot_s": seconds}
    if seconds <= SLOW_SNAPSHOT:
        return Check("snapshots", "ok", said, figures=figures)
    return Check(
        "snapshots", "warning", f"{said}: the actor acts with an old policy",
        "a smaller network or a faster link; a slow actor always gets the newest, never a queue of old ones", figures,
    )  # fmt: skip
