"""What an inspection says of good and of broken episodes, and the page it writes."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from held_source import HeldSource

from serl_chunk.data.frames import Frames
from serl_chunk.data.inspect.inspect import inspect
from serl_chunk.data.inspect.results import InspectionReport
from serl_chunk.types import Begin, DataError, End, Episode, Outcome, SparseRows, StepBlock
from serl_chunk.types import Source as Actor


def moving(spec, n: int = 40, seed: int = 0, *, hz: float = 50.0, cameras: bool = True, **end) -> Episode:
    """A clean episode: smooth states, actions near the joints they command, different images, reward at its end."""
    rng = np.random.default_rng(seed)
    t, ticks = np.arange(n)[:, None] / n, np.arange(n, dtype=np.int32)
    state = (np.sin(2 * t + np.arange(spec.state_dim)) + 0.1 * rng.normal(size=spec.state_dim)).astype(np.float32)
    action = (state[:, list(spec.joint_of_action)] * 0.9 + 0.01).astype(np.float32)
    images = {
        f"images/{c.name}": SparseRows(ticks, rng.integers(0, 256, (n, c.height, c.width, 3), dtype=np.uint8))
        for c in spec.cameras
    }
    steps = StepBlock(
        f"e{seed}", 0, {"state": state}, action, (ticks == n - 1).astype(np.float32),
        np.full(n, Actor.SCRIPTED, np.uint8), np.full(n, -1, np.int32), np.full(n, -1, np.int64),
        np.full(n, -1, np.float32), ticks / hz, np.zeros(n, np.int32), images if cameras else {},
    )  # fmt: skip
    values = {"terminated": True, "truncated": False, "outcome": Outcome.SUCCESS} | end
    return Episode(Begin(f"e{seed}", "stack"), steps, End(f"e{seed}", n, {"state": state[-1]}, **values))


def changed(episode: Episode, **columns) -> Episode:
    return episode._replace(steps=dataclasses.replace(episode.steps, **columns))


def look(*episodes: Episode, hz: float | None = 50.0, **options) -> InspectionReport:
    return inspect(HeldSource({f"ep{i}": e for i, e in enumerate(episodes)}, hz), **options)


def said(findings: InspectionReport, kind: str) -> list[str]:
    return [f.text for f in findings.findings if f.kind == kind]


def only(findings: InspectionReport, kind: str, severity: str = "remark"):
    """The single finding of `kind`."""
    (finding,) = [f for f in findings.findings if f.kind == kind]
    assert finding.severity == severity
    return finding


def test_clean_episodes_have_no_findings_and_their_facts_are_counted(spec):
    episodes, calls = [moving(spec, n, seed) for seed, n in enumerate((30, 50, 40))], []
    episodes[1] = moving(spec, 50, 1, terminated=False, truncated=True, outcome=Outcome.FAILURE)
    episodes[1].steps.reward[:] = 0
    episodes[2].steps.source[[3, 4, 5, 9]] = Actor.HUMAN
    wide = dataclasses.replace(spec, action_low=(-3.0,) * 3, action_high=(3.0,) * 3)
    found = look(*episodes, spec=wide, horizon=30, progress=lambda *a: calls.append(a))
    assert found.findings == ()
    assert (found.available, found.looked_at, found.steps) == (3, 3, 120)
    assert found.to_json()["lengths"] == {"low": 30, "median": 40, "high": 50}
    assert found.measured_hz == pytest.approx(50)
    assert (found.count(Outcome.SUCCESS), found.count(Outcome.FAILURE)) == (2, 1)
    assert found.shares == pytest.approx({"HUMAN": 4 / 120, "SCRIPTED": 116 / 120})
    assert (found.episodes[2].segments, found.tasks()) == (2, {"stack": 3})
    sizes = {name: (c[0].height, c[0].width, [each.frames for each in c]) for name, c in found.cameras().items()}
    assert sizes == {"top": (4, 6, [30, 50, 40]), "wrist": (3, 3, [30, 50, 40])}
    states = np.concatenate([e.steps.observation["state"] for e in episodes])
    np.testing.assert_allclose([d.low for d in found.state], states.min(0))
    np.testing.assert_allclose([d.std for d in found.state], states.std(0, dtype=np.float64), rtol=1e-6)
    changes = np.concatenate([np.abs(np.diff(e.steps.action, axis=0)) for e in episodes])
    np.testing.assert_allclose(found.changes[[0, 3]], [np.median(changes, axis=0), changes.max(0)], rtol=1e-6)
    assert calls == [(1, 3), (2, 3), (3, 3)]


def test_unreadable_short_and_repeated_episodes_are_found(spec):
    source = HeldSource({"a": moving(spec), "b": DataError("b.hdf5: truncated"), "c": moving(spec, seed=1)})
    found = inspect(source)
    fault = only(found, "unreadable", "fault")
    assert (fault.text, fault.episode, [e.key for e in found.episodes]) == ("b.hdf5: truncated", "b", ["a", "c"])
    assert found.findings[0] is fault  # faults come first
    assert only(look(), "empty", "fault").text == "memory: there is no episode"
    found = look(
        moving(spec, 9), moving(spec, 30, 1), moving(spec, 9), moving(spec, seed=4), horizon=10, max_episodes=3
    )
    assert (found.available, found.looked_at, len(found.episodes)) == (4, 3, 3)
    assert [text.split(":")[0] for text in said(found, "short")] == ["ep0", "ep2"]
    assert only(found, "duplicate episode").episode == "ep2"
    plain = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert (plain["ok"], plain["outcomes"]["success"]) == (True, 3)
    silent = changed(moving(spec, seed=1), reward=np.zeros(40, np.float32))
    assert only(look(moving(spec), silent), "reward").episode == "ep1"
    corrected = silent._replace(end=silent.end._replace(reward=0.5))
    assert look(corrected).episodes[0].reward == 0.5


def test_time_that_does_not_go_on_and_the_largest_gap_name_episode_and_tick(spec):
    back, late = moving(spec, seed=1), moving(spec)
    back.steps.stamp[[17, 30]] = back.steps.stamp[[16, 28]]
    fault = only(look(moving(spec), back), "time", "fault")
    assert (fault.episode, fault.tick) == ("ep1", 17)
    late.steps.stamp[10:] += 0.015  # a late tick is none
    late.steps.stamp[25:] += 0.1
    late.steps.stamp[30:] += 0.03
    gap = only(look(late), "gap")
    assert (gap.episode, gap.tick) == ("ep0", 25)
    assert "6 periods" in gap.text


def test_another_robots_episode_and_missing_and_differing_cameras_are_faults(spec, joints_spec):
    found = look(moving(spec, cameras=False), moving(joints_spec, seed=1, cameras=False))
    assert only(found, "dimensions", "fault").episode == "ep1"
    assert len(found.state) == 5
    missing, other = moving(spec, seed=1), moving(spec, seed=2)
    del missing.steps.sparse["images/top"]
    rows = other.steps.sparse["images/wrist"]
    other.steps.sparse["images/wrist"] = SparseRows(rows.index, rows.values[:, :2])
    missing, other = said(look(moving(spec), missing, other), "cameras")
    assert "camera top" in missing
    assert "camera wrist has 2x3 pixels, elsewhere 3x3" in other


def test_commands_far_from_their_joints_and_frozen_and_blank_frames_are_remarked(spec):
    differences = changed(moving(spec), action=np.random.default_rng(0).normal(0, 0.01, (40, 3)).astype(np.float32) + 4)
    found = look(differences, spec=spec)
    only(found, "mismatch"), only(found, "limits")
    assert not said(look(differences), "mismatch")  # nobody says what the joints are
    frozen, resting = moving(spec), moving(spec, seed=1)
    for episode in (frozen, resting):
        episode.steps.sparse["images/top"].values[:] = episode.steps.sparse["images/top"].values[0]
    resting.steps.observation["state"][:] = resting.steps.observation["state"][0]
    found = look(frozen, resting, all_frames=True)
    assert only(found, "duplicate frames").episode == "ep0"
    assert [(c.identical, c.moved) for c in found.cameras()["top"]] == [(39, 39), (39, 0)]
    resting.steps.sparse["images/wrist"].values[10:] = 0
    assert "30 of 40" in only(look(resting, all_frames=True), "blank frames").text


class Counted(Frames):
    """Frames that say which were decoded, one of them damaged."""

    def __init__(self, n: int, broken: int = -1) -> None:
        super().__init__((4, 6, 3), np.arange(n))
        self.decoded: list[int] = []
        self.broken = broken

    def decode(self, at: int) -> np.ndarray:
        self.decoded.append(at)
        if at == self.broken:
            raise DataError(f"file.mp4: frame {at} cannot be decoded")
        return np.full((4, 6, 3), at, np.uint8)


def test_few_frames_are_decoded_and_one_that_cannot_be_is_a_fault(spec):
    def with_frames(frames: Frames) -> Episode:
        sparse = {"images/top": SparseRows(np.arange(len(frames), dtype=np.int32), frames)}
        return changed(moving(spec, 200), sparse=sparse)

    for n, every, decoded in ((200, False, 16), (200, True, 200), (5, False, 5)):
        counted = Counted(n)
        look(with_frames(counted), all_frames=every)
        assert len(counted.decoded) == len(set(counted.decoded)) == decoded
        assert {0, n - 1} <= set(counted.decoded)
    source = HeldSource({"a": with_frames(Counted(200, 199))})
    found = inspect(source)
    fault, text = only(found, "frames", "fault"), "file.mp4: frame 199 cannot be decoded"
    assert (fault.episode, fault.text) == ("a", text)


def test_random_episodes_single_steps_and_parts_of_a_human_are_looked_at(spec, make_episode):
    longer = make_episode(spec, 12, seed=1, image_ticks={"top": [3]})
    found = look(make_episode(spec, 1), changed(longer, stamp=np.random.default_rng(1).uniform(0, 1e6, 12)))
    assert (found.steps, found.episodes[0].period) == (13, None)
    assert [c.frames for c in found.cameras()["top"]] == [1, 1]
    only(found, "time", "fault")  # its stamps are random
    shared = make_episode(spec, 12, seed=1, shared=(3, 4, 9))
    shared.steps.source[[t for t in range(12) if t not in (3, 4, 9)]] = Actor.POLICY
    found = look(shared, spec=spec)
    assert (found.shares, found.episodes[0].segments) == (pytest.approx({"POLICY": 9 / 12, "HUMAN": 3 / 12}), 2)
