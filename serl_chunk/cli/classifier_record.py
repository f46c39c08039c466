"""`serl-chunk classifier record`: frames of success and of failure, labelled by a key while the robot moves."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

from serl_chunk.cli.console import console_of
from serl_chunk.cli.process import spec_of
from serl_chunk.cli.record import held
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.fields import require
from serl_chunk.data.formats.hdf5_writer import EpisodeWriter
from serl_chunk.recording.labelled import LabelledFolder, LabelledRecording, LabellingConsole
from serl_chunk.recording.recording import open_human
from serl_chunk.robots.registry import make_env
from serl_chunk.signals import exit_at_once_while, never
from serl_chunk.types import ConfigError

logger = logging.getLogger(__name__)


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
    keys, recordings = LabellingConsole(labels), list[LabelledRecording]()

    def interrupt() -> None:
        for each in recordings:
            each.interrupt()

    exit_at_once_while(never)  # an open robot is closed, however long it takes
    with contextlib.ExitStack() as files_stack, contextlib.ExitStack() as stack:  # the robot is closed first
        console = console_of(
            config, "classifier record", amend=labels.amend, end=interrupt, over=keys.over, takes=keys.takes,
            simulated=True,
        )  # fmt: skip
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
            env, source, writer, labels, config=config, cameras=cameras, keys=keys, operator=operator
        )
        recordings.append(recording)
        stack.callback(recording.close)
        recording.run(seed)
    logger.info(f"{folder}: {labels.counts()}")
    if recording.interrupted:
        raise KeyboardInterrupt
    return 0
