"""What LeRobot has no place for, in `meta/serl_chunk.parquet`: one row an episode, row i of episode i.

    episode_index, length   int64     as in LeRobot's own tables
    digest                  string    of the states and actions that it belongs to: see `digest_of`
    episode_id, robot, specs_digest, init_state, group            `types.Begin`; the task is LeRobot's
    terminated, truncated, outcome, outcome_by, end_reward        `types.End`
    last_reward             float32   the reward recorded with the last step; LeRobot's column has the corrected one
    final_state             list<float32>                         null where the actor died
    final_images            list<struct<name, data>>              PNG files
    image_ticks             list<struct<name, ticks>>             of cameras that were not read on every tick
    decisions               list<struct<name, dtype, shape, ticks, data>>

An episode on its way there is one such row, without `episode_index`, with the text of its `task` and `histograms` of
its frames.
"""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import numpy as np

from serl_chunk.data.frames import decode_image
from serl_chunk.data.lerobot.arrow import Schema, pa
from serl_chunk.data.lerobot.images import Histogram, file_of
from serl_chunk.types import (
    DECISION_PREFIX,
    IMAGE_PREFIX,
    STATE,
    Begin,
    DataError,
    End,
    Episode,
    Observation,
    Outcome,
    SparseRows,
    StepBlock,
)

GROUP = 16  # episodes of a row group: reading one reads these
Row = dict[str, Any]


def digest_of(state: np.ndarray, action: np.ndarray) -> str:
    """Tells the episode a row belongs to from another one that took its number."""
    return hashlib.sha256(state.tobytes() + action.tobytes()).hexdigest()[:16]


def schema(staged: bool) -> Schema:
    """Of the file, or of the row of an episode that is on its way there."""
    strings = ("digest", *(name for name in Begin._fields if name != "task"), "outcome", "outcome_by")
    fields = [
        pa.field("length", pa.int64()),
        *(pa.field(name, pa.string()) for name in strings),
        pa.field("terminated", pa.bool_()),
        pa.field("truncated", pa.bool_()),
        pa.field("end_reward", pa.float64()),
        pa.field("last_reward", pa.float32()),
        pa.field("final_state", pa.list_(pa.float32())),
        pa.field("final_images", _structs(name=pa.string(), data=pa.binary())),
        pa.field("image_ticks", _structs(name=pa.string(), ticks=pa.list_(pa.int32()))),
        pa.field(
            "decisions",
            _structs(
                name=pa.string(),
                dtype=pa.string(),
                shape=pa.list_(pa.int64()),
                ticks=pa.list_(pa.int32()),
                data=pa.binary(),
            ),
        ),
    ]
    if staged:
        fields.append(pa.field("task", pa.string()))
        fields.append(pa.field("histograms", _structs(name=pa.string(), frames=pa.int64(), counts=pa.binary())))
    else:
        fields.insert(0, pa.field("episode_index", pa.int64()))
    return pa.schema(fields)


def _structs(**fields: Any) -> Any:
    return pa.list_(pa.struct(list(fields.items())))


def row_of(where: str, episode: Episode, task: str, histograms: dict[str, Histogram]) -> Row:
    """The staged row of an episode. Raises DataError for decisions that are no numbers."""
    begin, steps, end = episode
    final = end.final_observation
    partial = {
        key.removeprefix(IMAGE_PREFIX): rows.index
        for key, rows in steps.sparse.items()
        if key.startswith(IMAGE_PREFIX) and len(rows.index) != steps.n
    }
    texts = {name: value for name, value in begin._asdict().items() if name != "task"}
    return {
        "length": steps.n,
        "digest": digest_of(steps.observation[STATE], steps.action),
        **texts,
        "outcome": end.outcome.value,
        "outcome_by": end.outcome_by,
        "terminated": end.terminated,
        "truncated": end.truncated,
        "end_reward": end.reward,
        "last_reward": float(steps.reward[-1]),
        "final_state": None if final is None else final[STATE].tolist(),
        "final_images": [
            {"name": key.removeprefix(IMAGE_PREFIX), "data": file_of(value)}
            for key, value in sorted((final or {}).items())
            if key.startswith(IMAGE_PREFIX)
        ],
        "image_ticks": [{"name": name, "ticks": index.tolist()} for name, index in sorted(partial.items())],
        "decisions": [
            _decision(where, key.removeprefix(DECISION_PREFIX), rows)
            for key, rows in sorted(steps.sparse.items())
            if key.startswith(DECISION_PREFIX)
        ],
        "task": task,
        "histograms": [
            {"name": name, "frames": each.frames, "counts": each.counts.tobytes()} for name, each in histograms.items()
        ],
    }


def _decision(where: str, name: str, rows: SparseRows) -> Row:
    values = np.ascontiguousarray(rows.values)
    if values.dtype.kind not in "biuf":
        raise DataError(f"{where}: decision/{name} holds {values.dtype}, not numbers; leave it out")
    return {
        "name": name,
        "dtype": values.dtype.str,
        "shape": list(values.shape),
        "ticks": rows.index.tolist(),
        "data": values.tobytes(),
    }


def restored(where: str, row: Row, task: str, steps: StepBlock, wanted: set[str]) -> Episode:
    """The episode whose `row` this is, from the `steps` that LeRobot's columns give, every frame on every tick.

    `wanted`: cameras. Raises DataError, beginning with `where`, where the row belongs to other steps or is damaged.
    """
    try:
        return _restored(where, row, task, steps, wanted)
    except DataError:
        raise
    except (LookupError, ValueError, TypeError) as error:
        raise DataError(
            f"{where}: its row in meta/serl_chunk.parquet is damaged ({error}); remove that file to read what LeRobot "
            "itself records"
        ) from error


def _restored(where: str, row: Row, task: str, steps: StepBlock, wanted: set[str]) -> Episode:
    if row["length"] != steps.n or row["digest"] != digest_of(steps.observation[STATE], steps.action):
        raise DataError(
            f"{where} is not the one that was written: its steps or its place were changed since, and "
            "meta/serl_chunk.parquet no longer fits. Remove that file to read what LeRobot itself records"
        )
    begin = Begin(task=task, **{name: row[name] for name in Begin._fields if name != "task"})
    reward = steps.reward.copy()
    reward[-1] = row["last_reward"]
    sparse: dict[str, SparseRows] = {}
    ticks = {each["name"]: _ticks(each, steps.n) for each in row["image_ticks"]}
    for key, rows in steps.sparse.items():
        index = ticks.get(key.removeprefix(IMAGE_PREFIX))
        sparse[key] = rows if index is None else SparseRows(index, rows.values[index])
    for each in row["decisions"]:
        dtype = np.dtype(each["dtype"])
        if dtype.kind not in "biuf":
            raise ValueError(f"decision/{each['name']} holds {dtype}, not numbers")
        values = np.frombuffer(each["data"], dtype).reshape(each["shape"]).copy()
        sparse[DECISION_PREFIX + each["name"]] = SparseRows(_ticks(each, steps.n), values)
    try:
        outcome = Outcome(row["outcome"])
    except ValueError:
        raise DataError(f"{where}: outcome is {row['outcome']!r}; valid: {', '.join(Outcome)}") from None
    end = End(
        episode_id=begin.episode_id,
        length=steps.n,
        final_observation=_final(where, row, wanted),
        terminated=row["terminated"],
        truncated=row["truncated"],
        outcome=outcome,
        outcome_by=row["outcome_by"],
        reward=row["end_reward"],
    )
    whole = dataclasses.replace(steps, episode_id=begin.episode_id, reward=reward, sparse=sparse)
    return Episode(begin, whole, end)


def _ticks(each: Row, n: int) -> np.ndarray:
    """int32[M]; raises ValueError for ticks that an episode of `n` steps has not."""
    ticks = np.array(each["ticks"], np.int32)
    wrong = ticks[(ticks < 0) | (ticks >= n)]
    if len(wrong):
        raise ValueError(f"{each['name']} at tick {wrong[0]} of {n}")
    return ticks


def _final(where: str, row: Row, wanted: set[str]) -> Observation | None:
    if row["final_state"] is None:
        return None
    final = {STATE: np.array(row["final_state"], np.float32)}
    for each in row["final_images"]:
        if each["name"] in wanted:
            final[IMAGE_PREFIX + each["name"]] = decode_image(each["data"], f"{where}: the final frame")
    return final
