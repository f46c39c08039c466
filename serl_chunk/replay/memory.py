"""The memory that a replay may need, and the memory that there is."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from serl_chunk.config.experiment import ExperimentConfig, ReplayConfig
from serl_chunk.replay.features import PLACE_BYTES, ROW_BYTES, ROW_PLACE_BYTES, FeatureSpec, groups_of
from serl_chunk.replay.frame_storage import cached_frames
from serl_chunk.types import CameraSpec, ConfigError, RobotSpec

STORES = 3  # online, demonstrations, and episodes kept for their interventions
MESSAGE_BYTES = 2048  # of a step's message in addition to its observation and action: header, columns, the decision
_MIB = 1 << 20


def estimate_bytes(
    spec: RobotSpec, config: ReplayConfig, cameras: Sequence[CameraSpec],
    features: Mapping[str, FeatureSpec] | None = None, *, language: bool = False,
) -> int:  # fmt: skip
    """Return the bytes of a replay whose partitions are full: columns, index views, free lists, images.

    `features`: those that are kept, by name; then no decoded image of demonstrations' files is kept.
    `language`: whether the agent reads the tasks' texts.
    """
    floats = 4 * (spec.state_dim + spec.action_dim + 3)  # reward, effective, bc_weight
    fixed = 1 + 4 + 4 + 4 + 8 + 8  # source, tick, decision, lost, succ, pred
    fixed += 1 + 1 + 1 + 1  # live, terminal, is_demo, recent
    fixed += -(-spec.action_dim // 8) + 1  # human_dims, bc_human
    fixed += 4 if language else 0  # task
    index = (3 if config.positive_fraction is None else 5) * 16 + 8  # views, free list
    index += 16 if config.windows == "qc" else 0  # the order of the steps, while it is drawn up anew
    per_row = floats + fixed + index + 12 * len(cameras)  # frame slot and age
    per_frame = sum(c.height * c.width * 3 + 8 for c in cameras)
    rows = config.capacity + config.demo_capacity + config.human_capacity
    cached = 0 if features else cached_frames(cameras, config.frame_cache_bytes, config.demo_capacity)
    cached_bytes = cached * sum(c.height * c.width * 3 + 16 for c in cameras)
    feature_bytes = 0
    for group in groups_of(features or {}):
        if group.frame is not None:
            places = STORES * config.image_capacity + config.demo_capacity
            feature_bytes += places * (group.nbytes + PLACE_BYTES)
        else:
            feature_bytes += kept_observations(config) * (group.nbytes + PLACE_BYTES + ROW_PLACE_BYTES)
            feature_bytes += rows * ROW_BYTES
    return rows * per_row + STORES * config.image_capacity * per_frame + cached_bytes + feature_bytes


def kept_observations(config: ReplayConfig) -> int:
    """Return the observations whose features are kept by rows at most, of all partitions."""
    of_episodes = min(config.capacity, config.image_capacity) + min(config.human_capacity, config.image_capacity)
    return of_episodes + config.demo_capacity


def replay_size(config: ExperimentConfig, nbytes: int) -> str:
    """Return a line about a full replay, which takes `nbytes`, and its online steps where frames limit them."""
    line, r = f"replay: {nbytes / _MIB:.0f} MiB when full", config.replay
    held = int(r.image_capacity / config.frames_per_tick) if config.agent.image_keys else r.capacity
    if held >= r.capacity:
        return line
    return (
        f"{line}, of which about {held} online steps: replay.image_capacity={r.image_capacity} frames of "
        f"each camera are fewer than replay.capacity={r.capacity} steps need "
        f"({config.frames_per_tick:.2g} a tick, actor.frames={config.actor.frames})"
    )


def estimate_disk_bytes(spec: RobotSpec, config: ReplayConfig, cameras: Sequence[CameraSpec]) -> int:
    """Return the bytes of the journal that refills the online and the human partition, with a message per step."""
    per_step = MESSAGE_BYTES + 4 * (spec.state_dim + spec.action_dim)
    per_frame = sum(c.height * c.width * 3 for c in cameras)
    return (config.capacity + config.human_capacity) * per_step + 2 * config.image_capacity * per_frame


def available_bytes(proc: Path = Path("/proc"), group: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return the memory left to this process, by the system or its control group; None if unknown."""
    found = [1024 * int(line.split()[1]) for line in _lines(proc / "meminfo") if line.startswith("MemAvailable:")]
    limit, current, stat = group / "memory.max", group / "memory.current", group / "memory.stat"
    if limit.exists() and current.exists() and (text := limit.read_text().strip()) != "max":
        # File pages that no process uses count as the group's memory, and are freed on demand.
        cache = sum(int(line.split()[1]) for line in _lines(stat) if line.startswith("inactive_file "))
        found.append(max(0, int(text) - int(current.read_text()) + cache))
    return min(found, default=None)


def _lines(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []


def check_memory(
    spec: RobotSpec, config: ReplayConfig, cameras: Sequence[CameraSpec], available: int | None,
    features: Mapping[str, FeatureSpec] | None = None, *, language: bool = False,
) -> int:  # fmt: skip
    """Return the estimate in bytes; raises ConfigError, naming what to lower, where it exceeds `available`."""
    need = estimate_bytes(spec, config, cameras, features, language=language)
    if available is not None and need > available:
        fields = "replay.capacity, replay.demo_capacity or replay.human_capacity"
        images = "replay.image_capacity (or use fewer agent.image_keys), " if cameras else ""
        if features:  # nothing is kept decoded
            bare = dataclasses.replace(config, frame_cache_bytes=0)
            share = need - estimate_bytes(spec, bare, cameras, language=language)
            fields += f", or set agent.encoder.cache_features=False ({share / _MIB:.0f} MiB of it are features)"
        elif cameras:
            images += "replay.frame_cache_bytes, "
        raise ConfigError(
            f"a full replay needs {need / _MIB:.0f} MiB, {available / _MIB:.0f} MiB are available: lower "
            f"{images}{fields}"
        )
    return need
