"""`serl-chunk classifier record`: frames of success and of failure, labelled by a key while the robot moves."""

from __future__ import annotations

import argparse
import contextlib
import logging
import threading
from pathlib import Path

from serl_chunk.cli.console import console_of
from serl_chunk.cli.process import add_experiment_flags, load_flags
from serl_chunk.cli.record import held, recorded_cameras
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.fields import require
from serl_chunk.data.formats.hdf5_writer import EpisodeWriter
from serl_chunk.logs import add_log_flags
from serl_chunk.outcomes.robot import spec_of
from serl_chunk.recording.labelled import LabelledFolder, LabelledRecording, LabellingKeys
from serl_chunk.recording.recording import open_human
from serl_chunk.robots.registry import make_env
from serl_chunk.signals import exit_at_once_while, never
from serl_chunk.types import ConfigError

logger = logging.getLogger(__name__)


def record_flags(p: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    p.description = (
        "Record episodes with a label for each frame: the key s switches 'this is a success' on and off, f ends an "
        "episode. You move the robot with the device of actor.intervention. The same command continues."
    )
    p.add_argument("--exp_name", help="the experiment whose robot is recorded")
    p.add_argument("--out", required=True, metavar="DIR", help="folder for the episodes and frame_labels.json")
    p.add_argument("--successes", type=int, default=200, metavar="N", help="frames of success (default: %(default)s)")
    p.add_argument("--failures", type=int, default=1000, metavar="N", help="frames of failure (default: %(default)s)")
    p.add_argument("--cameras", metavar="A,B", help="cameras to record: names or all (default: all)")
    add_experiment_flags(p)
    add_log_flags(p)


def record_command(flags: argparse.Namespace) -> int:
    """Record; raises as `run_record_labels`."""
    config = load_flags(flags)
    cameras = recorded_cameras(flags.cameras or "all", spec_of(config))
    return run_record_labels(config, flags.out, cameras=cameras, successes=flags.successes, failures=flags.failures)


def run_record_labels(
    config: ExperimentConfig, out: str, *, cameras: tuple[str, ...], successes: int, failures: int
) -> int:
    """Record until `out` holds so many frames of success and of failure; the same command continues.

    Raises ConfigError, also without a terminal and for files in `out` of another robot or without one of `cameras`,
    DataError for a damaged file there, and DeviceError for a device that cannot be opened.
    """
    for name, value in (("successes", successes), ("failures", failures)):
        require(value >= 1, name, f"must be at least 1, got {value}")
    require(bool(cameras), "cameras", "names no camera, and a classifier looks at some. Give names, or all")
    folder = Path(out).expanduser()
    spec = spec_of(config)
    for name in cameras:
        spec.camera(name)
    seed, _ = held(folder, spec.name, cameras)
    labels = LabelledFolder(folder, (failures, successes))
    if labels.done:
        logger.info(f"{folder} holds {labels.counts()}")
        return 0
    keys, ended = LabellingKeys(), threading.Event()
    exit_at_once_while(never)  # an open robot is closed, however long it takes
    with contextlib.ExitStack() as files_stack, contextlib.ExitStack() as stack:  # the robot is closed first
        console = console_of(
            config, "classifier record", amend=labels.amend, end=ended.set, takes=keys.takes, simulated=True
        )
        operator = stack.enter_context(console)
        if operator is None:
            raise ConfigError("classifier record labels frames by a key. Start it at a terminal")
        operator.labels.notes = labels
        env = stack.enter_context(contextlib.closing(make_env(config.robot)))
        source = open_human(config, env, seed)
        if source is not None:
            stack.callback(source.close)
        writer = files_stack.enter_context(EpisodeWriter(folder, env.robot_spec, sim=not config.robot.real))
        recording = LabelledRecording(
            env, source, writer, labels, config=config, cameras=cameras, keys=keys, operator=operator,
            ended=ended.is_set,
        )  # fmt: skip
        stack.callback(recording.close)
        recording.run(seed)
    logger.info(f"{folder}: {labels.counts()}")
    if ended.is_set():
        raise KeyboardInterrupt
    return 0
