"""Episodes for the tests of this room: small, varied, and different in every array."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from journal_runs import assert_equal

from serl_chunk.types import Begin, CameraSpec, End, Episode, Outcome, RobotSpec, Source, Step, StepBlock

MakeEpisode = Callable[..., Episode]
TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), max_size=12)


@pytest.fixture(scope="session")
def spec() -> RobotSpec:
    """A robot of 3 actions whose state is 3 joints (in another order) and 2 further values; 2 cameras."""
    return RobotSpec(
        name="arm3", control_hz=50.0, state_dim=5, action_low=(-2.0, -1.0, 0.0), action_high=(2.0, 3.0, 1.0),
        joint_of_action=(2, 0, 1), grippers=(2,), cameras=(CameraSpec("top", 4, 6), CameraSpec("wrist", 3, 3)),
        max_episode_steps=20,
    )  # fmt: skip


@pytest.fixture(scope="session")
def joints_spec() -> RobotSpec:
    """A robot whose state is exactly its 2 joints, in the order of its actions; 1 camera."""
    return RobotSpec(
        "arm2", 25.0, 2, (-1.0, -1.0), (1.0, 1.0), (0, 1), (), (CameraSpec("top", 16, 16),), max_episode_steps=20
    )


def records(
    spec: RobotSpec,
    n: int,
    *,
    seed: int = 0,
    success_at: tuple[int, ...] = (),
    image_ticks: dict[str, list[int]] | None = None,
    decision_ticks: tuple[int, ...] = (),
    final: bool = True,
    episode_id: str = "",
    task: str = "stack",
    reward: float | None = None,
    lost: dict[int, int] | None = None,  # tick -> control periods lost before it
    ticket: str = "1.0.3.0",
    shared: tuple[int, ...] = (),  # ticks on which a human had a part of the action
) -> tuple[Begin, list[Step], End]:
    rng = np.random.default_rng(seed)
    episode_id, began = episode_id or f"e{seed}", float(rng.uniform(0, 1e6))
    image_ticks = {c.name: list(range(n)) for c in spec.cameras} if image_ticks is None else image_ticks

    def observe(tick: int) -> dict[str, np.ndarray]:
        out = {"state": rng.normal(size=spec.state_dim).astype(np.float32)}
        for camera in spec.cameras:
            if tick in image_ticks.get(camera.name, ()) or (tick == n and image_ticks):
                out[f"images/{camera.name}"] = rng.integers(0, 256, (camera.height, camera.width, 3), dtype=np.uint8)
        return out

    steps = [
        Step(
            tick=t,
            observation=observe(t),
            action=rng.normal(size=spec.action_dim).astype(np.float32),
            reward=1.0 if t in success_at else float(rng.uniform(-0.5, 0.5)),
            source=Source(int(rng.integers(5))),
            decision_tick=int(rng.integers(-1, t + 1)),
            policy_version=int(rng.integers(-1, 2**40)),
            policy_age=float(rng.uniform(0, 1e3)),
            stamp=began + (t + sum(k for at, k in (lost or {}).items() if at <= t)) / spec.control_hz,
            lost_ticks=(lost or {}).get(t, 0),
            decision={"chunk": rng.normal(size=(4, spec.action_dim)).astype(np.float32), "value": np.float32(t)}
            if t in decision_ticks
            else None,
        )
        for t in range(n)
    ]
    for t in shared:
        dims = np.arange(spec.action_dim) % 2 == t % 2
        steps[t] = steps[t]._replace(source=Source.HUMAN, decision_tick=-1, human_dims=dims)
    begin = Begin(episode_id, task, spec.name, spec.digest(), "init-3", ticket, '{"profile": "p"}')
    seen = observe(n) if final else None
    return begin, steps, End(episode_id, n, seen, False, True, Outcome.UNKNOWN, outcome_by="clock", reward=reward)


@pytest.fixture(scope="session")
def make_records() -> Callable[..., tuple[Begin, list[Step], End]]:
    return records


@pytest.fixture(scope="session")
def make_episode() -> MakeEpisode:
    """`make(spec, n, **options)`, with those of `records`."""

    def make(spec: RobotSpec, n: int, **options: Any) -> Episode:
        begin, steps, end = records(spec, n, **options)
        return Episode(begin, StepBlock.from_steps(begin.episode_id, steps), end)

    return make


@pytest.fixture(scope="session")
def drawn_episode(make_episode: MakeEpisode) -> MakeEpisode:
    """`drawn(data, spec, **options)`: any episode that hypothesis draws, of `options` where they are given."""

    def drawn(data: st.DataObject, spec: RobotSpec, *, least: int = 0, **given: Any) -> Episode:
        n = data.draw(st.integers(1, 10), label="T")
        ticks = st.lists(st.integers(0, n - 1), unique=True)
        some = st.lists(st.integers(0, n - 1), unique=True, min_size=least)
        options = {
            "seed": data.draw(st.integers(0, 2**16)), "image_ticks": {c.name: data.draw(some) for c in spec.cameras},
            "decision_ticks": tuple(data.draw(ticks)), "final": data.draw(st.booleans()), "task": data.draw(TEXT),
            "reward": data.draw(st.none() | st.floats(-2, 2, width=32)), "shared": tuple(data.draw(ticks)),
            "ticket": data.draw(st.sampled_from(("", "1.0.3.0"))),
            "lost": data.draw(st.dictionaries(st.integers(1, n), st.integers(5, 2_000), max_size=2)),
        }  # fmt: skip
        return make_episode(spec, n, **options | given)

    return drawn


@pytest.fixture(scope="session")
def assert_same() -> Callable[[Episode, Episode], None]:
    """Asserts that two episodes are equal in every field, dtype and byte."""
    return assert_equal


@pytest.fixture(scope="session")
def lerobot_variants(tmp_path_factory) -> dict[str, Path]:
    """Read them; `lerobot_copy` is to be changed."""
    pytest.importorskip("av")
    lerobot_sets = pytest.importorskip("lerobot_sets")
    return lerobot_sets.variants(tmp_path_factory.mktemp("sets"))


@pytest.fixture
def lerobot_copy(lerobot_variants, tmp_path) -> Callable[[str], Path]:
    """`lerobot_copy(kind)`: a copy of one of `lerobot_sets.variants`."""
    return lambda kind: Path(shutil.copytree(lerobot_variants[kind], tmp_path / "set"))
