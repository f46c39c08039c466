"""Sidecar table `meta/serl_chunk.parquet`, which lerobot ignores: fields that LeRobot lacks, in row i of episode i.

    episode_index, length   int64     as in LeRobot's own tables
    digest                  string    of the states and actions that it belongs to: see `validate.content_id`
    episode_id, robot, specs_digest, init_state                   `types.Begin`; the task is LeRobot's
    conditions, ticket      string    the same; not where no episode has any
    terminated, truncated, outcome, outcome_by, end_reward        `types.End`
    last_reward             float32   the reward recorded with the last step; LeRobot's column has the corrected one
    final_state             list<float32>                         null where the actor died
    final_images            list<struct<name, data>>              PNG files
    image_ticks             list<struct<name, ticks>>             of cameras that were not read on every tick
    decisions               list<struct<name, dtype, shape, ticks, data>>
    human_dims              struct<ticks, data>   as in `types.StepBlock`; not where no episode has any

A staged episode is one such row, without `episode_index`, with the text of its `task` and `histograms` of its frames.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from serl_chunk.data.frames import decode_image
from serl_chunk.data.lerobot.arrow import Schema, pa, reading
from serl_chunk.data.lerobot.rows import Histogram, lossless_file
from serl_chunk.data.validate import content_id, first_true
from serl_chunk.types import (
    DECISION_PREFIX,
    HUMAN_DIMS,
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
# Columns of files in which some episode has such values, with the value of one that has none.
OPTIONAL: Row = {"conditions": "", "ticket": "", HUMAN_DIMS: None}
_BEGIN = tuple(name for name in Begin._fields if name not in ("task", "demonstration"))
REMEDY = "Remove that file to read only LeRobot's own columns"


def schema(staged: bool, *, absent: Collection[str] = ()) -> Schema:
    """Return the schema of the file without the columns `absent`, or of the row of a staged episode."""
    string, integer, binary = pa.string(), pa.int64(), pa.binary()
    ticks = pa.list_(pa.int32())
    fields = {
        "length": integer,
        **dict.fromkeys(("digest", *_BEGIN), string),
        **dict.fromkeys(("outcome", "outcome_by"), string),
        "terminated": pa.bool_(),
        "truncated": pa.bool_(),
        "end_reward": pa.float64(),
        "last_reward": pa.float32(),
        "final_state": pa.list_(pa.float32()),
        "final_images": {"name": string, "data": binary},
        "image_ticks": {"name": string, "ticks": ticks},
        "decisions": {"name": string, "dtype": string, "shape": pa.list_(integer), "ticks": ticks, "data": binary},
        HUMAN_DIMS: pa.struct([("ticks", ticks), ("data", binary)]),
    }
    if staged:
        fields |= {"task": string, "histograms": {"name": string, "frames": integer, "counts": binary}}
    else:
        fields = {"episode_index": integer} | fields
    lists = {name: pa.list_(pa.struct(list(of.items()))) for name, of in fields.items() if isinstance(of, dict)}
    return pa.schema([(name, of) for name, of in (fields | lists).items() if name not in absent])


def row_of(where: str, episode: Episode, task: str, histograms: dict[str, Histogram]) -> Row:
    """Return the staged row of an episode. Raises DataError for decisions that are no numbers."""
    begin, steps, end = episode
    final, dims = end.final_observation, steps.sparse.get(HUMAN_DIMS)
    return {
        "length": steps.n,
        "digest": content_id(steps.observation[STATE], steps.action, 16),
        **{name: getattr(begin, name) for name in _BEGIN},
        "outcome": end.outcome.value,
        "outcome_by": end.outcome_by,
        "terminated": end.terminated,
        "truncated": end.truncated,
        "end_reward": end.reward,
        "last_reward": float(steps.reward[-1]),
        "final_state": None if final is None else final[STATE].tolist(),
        "final_images": [{"name": k, "data": lossless_file(v)} for k, v in _of(IMAGE_PREFIX, final or {}).items()],
        "image_ticks": [
            {"name": name, "ticks": rows.index.tolist()}
            for name, rows in _of(IMAGE_PREFIX, steps.sparse).items()
            if len(rows.index) != steps.n
        ],
        "decisions": [_decision(where, *item) for item in _of(DECISION_PREFIX, steps.sparse).items()],
        HUMAN_DIMS: None
        if dims is None or not len(dims.index)
        else {"ticks": dims.index.tolist(), "data": dims.values.tobytes()},
        "task": task,
        "histograms": [
            {"name": name, "frames": each.frames, "counts": each.counts.tobytes()} for name, each in histograms.items()
        ],
    }


def _of(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {key.removeprefix(prefix): values[key] for key in sorted(values) if key.startswith(prefix)}


def _decision(where: str, name: str, rows: SparseRows) -> Row:
    values = np.ascontiguousarray(rows.values)
    if values.dtype.kind not in "biuf":
        raise DataError(f"{where}: decision/{name} holds {values.dtype}, not numbers. Leave it out")
    about = {"name": name, "dtype": values.dtype.str, "shape": list(values.shape)}
    return about | {"ticks": rows.index.tolist(), "data": values.tobytes()}


def restored(where: str, row: Row, task: str, steps: StepBlock, wanted: set[str]) -> Episode:
    """Restore an episode from its `row` and the `steps` in LeRobot's columns, which have every frame on every tick.

    `wanted`: cameras. Raises DataError, starting with `where`, where the row belongs to other steps or is damaged.
    """
    with reading(f"{where}: its row in meta/serl_chunk.parquet is damaged", f". {REMEDY}"):
        if row["length"] != steps.n or row["digest"] != content_id(steps.observation[STATE], steps.action, 16):
            raise DataError(
                f"{where} is not the one that was written: its steps or its place were changed since, and "
                f"meta/serl_chunk.parquet no longer fits. {REMEDY}"
            )
        row = OPTIONAL | row
        begin = Begin(task=task, **{name: row[name] for name in _BEGIN})
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
        if (each := row[HUMAN_DIMS]) is not None:
            dims = np.frombuffer(each["data"], np.uint8).reshape(-1, steps.action.shape[1]).copy()
            sparse[HUMAN_DIMS] = SparseRows(_ticks({"name": HUMAN_DIMS, **each}, steps.n), dims)
        if row["outcome"] not in list(Outcome):
            raise ValueError(f"outcome is {row['outcome']!r}; valid: {', '.join(Outcome)}")
        final: Observation | None = None
        if row["final_state"] is not None:
            final = {STATE: np.array(row["final_state"], np.float32)}
            for each in (image for image in row["final_images"] if image["name"] in wanted):
                final[IMAGE_PREFIX + each["name"]] = decode_image(each["data"], f"{where}: the final frame")
        ending = row["terminated"], row["truncated"], Outcome(row["outcome"]), row["outcome_by"], row["end_reward"]
        end = End(begin.episode_id, steps.n, final, *ending)
        whole = dataclasses.replace(steps, episode_id=begin.episode_id, reward=reward, sparse=sparse)
        return Episode(begin, whole, end)


def _ticks(each: Row, n: int) -> np.ndarray:
    """int32[M]; raises ValueError for ticks outside an episode of `n` steps."""
    ticks = np.array(each["ticks"], np.int32)
    if (i := first_true((ticks < 0) | (ticks >= n))) is not None:
        raise ValueError(f"{each['name']} at tick {ticks[i]} of {n}")
    return ticks
