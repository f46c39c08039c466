"""Episodes for LeRobot data sets, the data sets, written without the pipeline of conversions, and changes of these."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from serl_chunk.data.lerobot.writer import LeRobotSink
from serl_chunk.types import Begin, End, Episode, Outcome, Source, SparseRows, StepBlock

HZ = 50.0
HEIGHT, WIDTH = 16, 24
DATA, EPISODES = "data/chunk-000/file-000.parquet", "meta/episodes/chunk-000/file-000.parquet"
SIDE, INFO = "meta/serl_chunk.parquet", "meta/info.json"
TOP, VIDEO = "observation.images.top", "videos/observation.images.top/chunk-000/file-000.mp4"
Change = Callable[[Any], Any]


def smooth(seed: int, t: int, height: int = HEIGHT, width: int = WIDTH) -> np.ndarray:
    """An image that codecs are kind to, another one for each seed and tick."""
    y, x = np.mgrid[:height, :width]
    blue = np.full_like(x, (50 * seed + 6 * t) % 200)
    return np.stack([x * 200 // width, y * 200 // height, blue], -1).astype(np.uint8)


def episode_of(seed: int, n: int, task: str = "stack", every: int = 1, **end: Any) -> Episode:
    """Of a robot with 4 state values, 3 actions and cameras `top` (read every so many ticks) and `wrist`."""
    rng = np.random.default_rng(seed)
    ticks = {"top": np.arange(min(every - 1, n - 1), n, every, dtype=np.int32), "wrist": np.arange(n, dtype=np.int32)}
    frames = {c: np.stack([smooth(seed + 2 * i, t) for t in ticks[c]]) for i, c in enumerate(ticks)}
    steps = StepBlock(
        f"e{seed}",
        0,
        observation={"state": rng.normal(size=(n, 4)).astype(np.float32)},
        action=rng.normal(size=(n, 3)).astype(np.float32),
        reward=rng.uniform(-0.5, 0.5, n).astype(np.float32),
        source=rng.choice([Source.POLICY, Source.HUMAN], n).astype(np.uint8),
        decision_tick=rng.integers(-1, n, n).astype(np.int32),
        policy_version=rng.integers(-1, 2**40, n),
        policy_age=rng.uniform(0, 9, n).astype(np.float32),
        stamp=1234.5 + np.arange(n) / HZ,
        lost_ticks=np.zeros(n, np.int32),
        sparse={f"images/{c}": SparseRows(ticks[c], frames[c]) for c in ticks},
    )
    final = {"state": rng.normal(size=4).astype(np.float32)}
    final |= {"images/top": smooth(seed, n), "images/wrist": smooth(9, n)}
    how: dict[str, Any] = {
        "final_observation": final, "terminated": True, "truncated": False, "outcome": Outcome.SUCCESS, "reward": 1.0
    }  # fmt: skip
    return Episode(
        Begin(f"e{seed}", task, "arm", "ab12", "init-1", "g", '{"profile": "p"}'),
        steps,
        End(f"e{seed}", n, **(how | end)),
    )


def shared(episode: Episode, *ticks: int) -> Episode:
    """`episode` with a human who had the second number of the action, of three, on `ticks`."""
    steps = episode.steps
    rows = SparseRows(np.array(ticks, np.int32), np.tile(np.array([0, 1, 0], np.uint8), (len(ticks), 1)))
    source = steps.source.copy()
    source[rows.index] = Source.HUMAN
    steps = dataclasses.replace(steps, source=source, sparse=steps.sparse | {"human_dims": rows})
    return episode._replace(steps=steps)


def several() -> list[Episode]:
    """Two tasks, a camera that is read on some ticks only, a truncated episode, and one whose actor died."""
    return [
        episode_of(0, 9),
        episode_of(1, 7, task="insert", every=3),
        episode_of(2, 12, every=2, terminated=False, truncated=True, outcome=Outcome.FAILURE, reward=None),
        episode_of(3, 5, task="insert", final_observation=None, truncated=True, outcome=Outcome.UNKNOWN, reward=None),
        episode_of(4, 8),
    ]


def plain(value: Any) -> Any:
    """As a manifest gives it back."""
    return json.loads(json.dumps(value))


def write(sink: LeRobotSink, episodes: Sequence[Episode], hz: float = HZ) -> Path:
    """Write a data set as a conversion does that nothing interrupts; returns its folder."""
    layout, staged = plain(sink.layout(episodes[0], hz)), []
    assert sink.placed(layout, []) == 0
    for number, episode in enumerate(episodes):
        staged.append(plain(sink.stage(layout, number, episode)))
        sink.place(layout, staged)
    sink.finish(layout, staged)
    return sink.folder


def contents(folder: Path) -> dict[str, str]:
    """Path -> digest of every file in a folder."""
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def column(name: str, values: Any) -> Change:
    """A table with these values in a column, or what a function makes of the list of those that were there."""

    def change(table: pa.Table) -> pa.Table:
        new = values(table.column(name).to_pylist()) if callable(values) else values
        new = new if isinstance(new, pa.Array) else pa.array(new)
        return table.set_column(table.schema.get_field_index(name), name, new)

    return change


def at(i: int, value: Any) -> Change:
    return lambda rows: [
        value(row) if k == i and callable(value) else value if k == i else row for k, row in enumerate(rows)
    ]


def without(*names: str) -> Change:
    return lambda table: table.drop_columns(list(names))


def info(**values: Any) -> Change:
    return lambda about: {k: v for k, v in (about | values).items() if v is not None}


def feature(name: str, **values: Any) -> Change:
    return lambda about: about | {"features": about["features"] | {name: about["features"].get(name, {}) | values}}


def kept_type(name: str, i: int, change: Change) -> Change:
    """Change entry `i` of a column of lists of structures, whose type remains."""

    def changed(table: pa.Table) -> pa.Table:
        rows = table.column(name).to_pylist()
        rows[i] = change(rows[i])
        return column(name, pa.array(rows, table.schema.field(name).type))(table)

    return changed


def amend(folder: Path, name: str, change: Change | int | str | None, **options: Any) -> Path:
    """Change a table or a JSON file; keep so many bytes of it; write a text; or remove it."""
    path = folder / name
    if change is None:
        path.unlink()
    elif isinstance(change, int):
        path.write_bytes(path.read_bytes()[:change])
    elif isinstance(change, str):
        path.write_text(change)
    elif path.suffix == ".json":
        path.write_text(json.dumps(change(json.loads(path.read_text()))))
    else:
        pq.write_table(change(pq.read_table(path)), path, **options)
    return folder


def drop(folder: Path, *columns: str) -> None:
    """A data set that never had these columns."""
    amend(folder, DATA, without(*columns))
    amend(
        folder,
        INFO,
        lambda about: about | {"features": {k: v for k, v in about["features"].items() if k not in columns}},
    )


def variants(root: Path) -> dict[str, Path]:
    """Ours; with partial interventions; with videos; and without what only we write, also of the older version."""
    episodes = several()
    found = {
        "ours": write(LeRobotSink(root / "ours"), episodes),
        "shared": write(LeRobotSink(root / "shared"), [episodes[0], shared(episodes[1], 2, 6), *episodes[2:]]),
        "v2.1": write(LeRobotSink(root / "v2.1", "v2.1"), episodes),
        "video": write(LeRobotSink(root / "video", mode="video"), [episode_of(0, 6), episode_of(1, 6)]),
    }
    for name, of in (("foreign", "ours"), ("bare", "video")):
        found[name] = Path(shutil.copytree(found[of], root / name))
    features = json.loads((found["foreign"] / INFO).read_text())["features"]
    drop(found["foreign"], *(k for k in features if k.startswith("complementary_info.") or k == "next.success"))
    for name in ("foreign", "v2.1", "bare"):
        (found[name] / SIDE).unlink()
    return found
