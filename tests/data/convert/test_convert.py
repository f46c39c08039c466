"""The conversion pipeline: in order, in parallel, atomic, continued after any interruption, small in memory."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from errors import naming
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from properties import examples

from serl_chunk.data.convert.convert import Progress, Report, convert
from serl_chunk.data.convert.manifest import NAME, Manifest
from serl_chunk.data.formats.episodes import FORMAT
from serl_chunk.data.formats.hdf5 import read_episode, write_episode
from serl_chunk.data.formats.hdf5_writer import Hdf5Sink
from serl_chunk.data.source import Json, ReadOptions
from serl_chunk.types import CameraSpec, ConfigError, DataError, Episode, RobotSpec

ARM = RobotSpec("arm2", 50.0, 2, (-1.0, -1.0), (1.0, 1.0), (0, 1), (), (CameraSpec("top", 16, 16),), 20)


_CONVERT = """
import sys
from pathlib import Path
from serl_chunk.data.convert.convert import convert
from serl_chunk.data.formats.episodes import FORMAT
from serl_chunk.data.formats.hdf5_writer import Hdf5Sink
from serl_chunk.data.source import ReadOptions

if __name__ == "__main__":
    source, out = FORMAT.open(Path(sys.argv[1]), ReadOptions()), Path(sys.argv[2])
    report = convert(source, source.keys(), Hdf5Sink(out), out, workers=int(sys.argv[3]), resume=True)
    print("converted", report.episodes)
"""


def _on_time(episode: Episode) -> Episode:
    n = episode.steps.n
    return episode._replace(steps=dataclasses.replace(episode.steps, stamp=np.arange(n) / 50.0))


@pytest.fixture
def folder(tmp_path, make_episode):
    """`folder(n)`: n episodes of `ARM`, of 3 to 6 steps."""

    def make(n: int, name: str = "in") -> Path:
        path = tmp_path / name
        path.mkdir()
        for i in range(n):
            write_episode(path / f"episode_{i}.hdf5", _on_time(make_episode(ARM, 3 + i % 4, seed=i)), ARM)
        return path

    return make


def _convert(path: Path, out: Path, *, sink: Hdf5Sink | None = None, spec: RobotSpec | None = ARM, **how) -> Report:
    source = FORMAT.open(path, ReadOptions(spec=spec))
    return convert(source, source.keys(), sink or Hdf5Sink(out, spec), out, **({"workers": 0} | how))


def _content(path: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in path.iterdir()}


@settings(max_examples=examples(10), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_round_trip_keeps_every_byte(tmp_path_factory, spec, drawn_episode, assert_same, data):
    tmp = tmp_path_factory.mktemp("trip")
    (tmp / "in").mkdir()
    episodes = []
    for i in range(data.draw(st.integers(1, 3), label="episodes")):
        episodes.append(_on_time(drawn_episode(data, spec, least=1, lost={})))
        write_episode(tmp / "in" / f"episode_{i}.hdf5", episodes[-1], spec)
    with_spec = data.draw(st.booleans(), label="with the robot")
    sink = Hdf5Sink(tmp / "out", spec if with_spec else None, compress=data.draw(st.booleans()))
    report = _convert(tmp / "in", tmp / "out", sink=sink, spec=spec)
    assert (report.episodes, report.steps) == (len(episodes), sum(e.steps.n for e in episodes))
    for i, episode in enumerate(episodes):
        assert_same(read_episode(tmp / "out" / f"episode_{i}.hdf5"), episode)
    if with_spec and not sink.compress:  # the same episode becomes the same bytes
        assert (tmp / "in" / "episode_0.hdf5").read_bytes() == (tmp / "out" / "episode_0.hdf5").read_bytes()
    assert FORMAT.open(tmp / "out", ReadOptions()).hz == 50.0


def test_worker_processes_write_the_same_as_one_process(folder, tmp_path):
    path = folder(7)
    told: list[Progress] = []
    alone = _convert(path, tmp_path / "alone", progress=told.append)
    many = _convert(path, tmp_path / "many", workers=2)
    assert _content(tmp_path / "alone") == _content(tmp_path / "many")
    assert sorted(_content(tmp_path / "many")) == [NAME, *(f"episode_{i}.hdf5" for i in range(7))]
    assert dataclasses.replace(alone, seconds=0) == dataclasses.replace(many, seconds=0)
    assert (many.frames, many.nbytes) == (many.steps, many.steps * (16 * 16 * 3 + 16))
    assert ([p.done for p in told], told[-1].frames) == (list(range(8)), alone.frames)


def test_a_taken_folder_is_refused_before_anything_is_touched(folder, tmp_path):
    path, out = folder(1), tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").write_text("precious")
    for taken, resume, named in (
        (out, False, "thesis.tex"),
        (out, True, "thesis.tex"),
        (out / "thesis.tex", False, "thesis.tex"),
    ):
        with pytest.raises(ConfigError, match=naming(out, named)):
            _convert(path, taken, resume=resume)
    assert os.listdir(out) == ["thesis.tex"]
    _convert(path, tmp_path / "new")
    with pytest.raises(ConfigError, match=naming(tmp_path / "new", "resume")):
        _convert(path, tmp_path / "new")
    again = _convert(path, tmp_path / "new", resume=True)
    assert (again.episodes, again.already) == (1, 1)


def interrupt() -> None:
    raise KeyboardInterrupt


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does with a process that takes too much memory


def fill_the_disk() -> None:
    raise OSError(28, "No space left on device")


def make_a_mistake() -> None:
    [].pop()


@dataclasses.dataclass(frozen=True)
class Spoilt(Hdf5Sink):
    """Acts at a moment of its episode 2."""

    when: str = "stage"
    act: Callable[[], None] = interrupt

    def now(self, when: str, number: int) -> None:
        if (self.when, 2) == (when, number):
            self.act()

    def stage(self, layout: Json, number: int, episode: Episode) -> Json:
        self.now("stage", number)
        return super().stage(layout, number, episode)

    def place(self, layout: Json, staged: list[Json]) -> None:
        self.now("before place", len(staged) - 1)
        super().place(layout, staged)
        self.now("after place", len(staged) - 1)

    def finish(self, layout: Json, staged: list[Json]) -> None:
        super().finish(layout, staged)
        self.now("after finish", 2)


@pytest.mark.parametrize(
    ("when", "already"), [("stage", 2), ("before place", 2), ("after place", 3), ("after finish", 5)]
)
def test_an_interrupted_conversion_ends_as_an_uninterrupted_one(folder, tmp_path, when, already):
    path, out = folder(5), tmp_path / "out"
    _convert(path, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        _convert(path, out, sink=Spoilt(out, ARM, when=when))
    with (out / NAME).open("ab") as manifest:
        manifest.write(b'{"kind": "pla')  # cut off by the power
    report = _convert(path, out, resume=True)
    assert _content(out) == _content(tmp_path / "whole")
    assert (report.already, report.episodes) == (already, 5)


@pytest.mark.parametrize(
    ("act", "named"),
    [
        (kill, ("episode_2.hdf5", "SIGKILL", "workers")),
        (fill_the_disk, ("episode_2.hdf5", "No space left on device", "resume")),
        (make_a_mistake, ("episode_2.hdf5", "IndexError")),
    ],
)
def test_what_is_not_the_episodes_fault_ends_the_conversion_even_with_skip_bad(folder, tmp_path, act, named):
    path, out = folder(5), tmp_path / "out"
    with pytest.raises(DataError, match=naming(*named)):
        _convert(path, out, sink=Spoilt(out, ARM, act=act), workers=1, skip_bad=True)
    assert _convert(path, out, resume=True, skip_bad=True).episodes == 5
    _convert(path, tmp_path / "whole")
    assert _content(out) == _content(tmp_path / "whole")


def test_a_resumed_conversion_must_be_the_same_one_alone_in_a_whole_folder(folder, tmp_path, monkeypatch):
    path, out = folder(3), tmp_path / "out"
    rgb, bgr = ({"reading": {"color": color}} for color in ("rgb", "bgr"))
    with pytest.raises(KeyboardInterrupt):
        _convert(path, out, sink=Spoilt(out, ARM), settings=rgb)
    with pytest.raises(ConfigError, match=naming("max_samples", None, 9, "reading.color", "rgb", "bgr")):
        _convert(path, out, resume=True, settings=bgr, max_samples=9)
    (path / "episode_1.hdf5").rename(tmp_path / "episode_1.hdf5")
    with pytest.raises(ConfigError, match=naming("episodes", 3, 2, "episodes_digest")):
        _convert(path, out, resume=True, settings=rgb)
    lines = (out / NAME).read_bytes().split(b"\n")
    (out / NAME).write_bytes(b"\n".join([*lines[:2], b"\0" * 20, *lines[3:]]))
    with pytest.raises(DataError, match=naming("conversion.jsonl", 3)):
        _convert(path, out, resume=True)
    monkeypatch.setattr("serl_chunk.data.convert.manifest._PATIENCE", 0.1)
    other = tmp_path / "other"
    with contextlib.closing(Manifest(other, {}, resume=False)), pytest.raises(ConfigError, match=naming(other)):
        Manifest(other, {}, resume=True)


def test_the_first_bad_episode_ends_the_conversion_and_skip_bad_leaves_them_out(folder, tmp_path, make_episode):
    path, out = folder(9), tmp_path / "out"
    good, blind = (_on_time(make_episode(ARM, 5, seed=seed)) for seed in (99, 98))
    blind.steps.sparse.clear()
    larger = dataclasses.replace(ARM, cameras=(CameraSpec("top", 8, 8),))
    wider = dataclasses.replace(ARM, action_low=(-1.0,) * 3, action_high=(1.0,) * 3, joint_of_action=(0, 1, -1))
    cases = {
        2: (_change(good, stamp=np.array([0, 0.02, 0.01, 0.03, 0.04])), ARM, (2, "0.020000", "0.010000")),
        3: (_on_time(make_episode(larger, 5)), larger, ("cameras", "[8, 8]", "[16, 16]")),
        4: (blind._replace(end=blind.end._replace(final_observation=None)), ARM, ("cameras", "{}", "[16, 16]")),
        5: (_on_time(make_episode(wider, 5)), wider, ("action_dim", 3, 2)),
        6: (None, None, ("HDF5",)),
    }
    for i, (episode, robot, _) in cases.items():
        target = path / f"episode_{i}.hdf5"
        if episode is None:
            target.write_bytes(target.read_bytes()[:1000])
        else:
            write_episode(target, episode, robot)
    how = {"sink": Hdf5Sink(out), "spec": None, "workers": 2}
    with pytest.raises(DataError, match=naming("/in", "episode_2.hdf5", "0.010000", "skip_bad")):
        _convert(path, out, **how)
    assert sorted(p.name for p in out.glob("episode*")) == ["episode_0.hdf5", "episode_1.hdf5"]
    report = _convert(path, out, **how, resume=True, skip_bad=True)
    assert (report.episodes, report.already) == (4, 2)
    assert [s.job for s in report.skipped] == [(i, f"episode_{i}.hdf5") for i in cases]
    for skipped, (_, _, named) in zip(report.skipped, cases.values(), strict=True):
        with pytest.raises(DataError, match=naming(path, skipped.job.key, *named)):
            raise DataError(skipped.reason)
    _convert(path, tmp_path / "at_once", sink=Hdf5Sink(tmp_path / "at_once"), spec=None, skip_bad=True)
    assert _content(out) == _content(tmp_path / "at_once")
    np.testing.assert_array_equal(
        read_episode(out / "episode_2.hdf5").steps.action, read_episode(path / "episode_7.hdf5").steps.action
    )
    for file in path.iterdir():
        file.write_bytes(b"")
    with pytest.raises(DataError, match=naming(9, path, "episode_0.hdf5")):
        _convert(path, tmp_path / "none", skip_bad=True)


def _change(episode: Episode, **columns) -> Episode:
    return episode._replace(steps=dataclasses.replace(episode.steps, **columns))


def test_the_rate_is_kept_within_a_tolerance_and_max_samples_ends_with_a_whole_episode(folder, tmp_path, make_episode):
    path = folder(6)  # of 3, 4, 5, 6, 3, 4 steps
    for limit, episodes in ((3, 1), (4, 2)):
        out = tmp_path / f"out{limit}"
        assert _convert(path, out, max_samples=limit).episodes == len([*out.glob("*.hdf5")]) == episodes
    stamps = np.array([0, 0.02, 0.045, 0.06])
    write_episode(path / "episode_1.hdf5", _change(_on_time(make_episode(ARM, 4)), stamp=stamps), ARM)
    assert _convert(path, tmp_path / "any").episodes == _convert(path, tmp_path / "loose", tolerance_s=0.0051).episodes
    with pytest.raises(DataError, match=naming(2, "0.045000", 50, "0.040000", "tolerance_s", 0.004)):
        _convert(path, tmp_path / "strict", tolerance_s=0.004)
    for name, value in (("tolerance_s", 0.0), ("max_samples", 0), ("workers", -1)):
        with pytest.raises(ConfigError, match=naming(name, value)):
            _convert(path, tmp_path / "wrong", **{name: value})


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_frames_are_written_one_by_one_and_a_failure_amid_a_write_is_that_failure(
    tmp_path, make_episode, monkeypatch, error
):
    """Ctrl-C may arrive, and the disk be full, while HDF5 calls back into Python, which it would not survive."""
    (tmp_path / "in").mkdir()
    out, calls, real = tmp_path / "out", [], os.pwrite
    out.mkdir()
    write_episode(tmp_path / "in" / "episode_0.hdf5", _on_time(make_episode(ARM, 20)), ARM)
    episode = FORMAT.open(tmp_path / "in", ReadOptions()).read("episode_0.hdf5")
    frames, sink = type(episode.steps.sparse["images/top"].values), Hdf5Sink(out, ARM)
    layout = sink.layout(episode, 50.0)

    def failing(descriptor: int, data: memoryview, at: int) -> int:
        calls.append(at)
        if len(calls) == 3:
            raise error
        return real(descriptor, data, at)

    monkeypatch.setattr(frames, "__array__", lambda *_, **__: pytest.fail("all frames were decoded"))
    sink.place(layout, [sink.stage(layout, 0, episode)])
    monkeypatch.setattr(os, "pwrite", failing)
    with pytest.raises(error if isinstance(error, type) else type(error)):
        sink.stage(layout, 1, episode)
    assert (len(calls), os.listdir(out)) == (3, ["episode_0.hdf5"])


@pytest.mark.parametrize(
    ("episodes", "kills", "workers"),
    [
        pytest.param(40, 1, (1,), marks=pytest.mark.system),
        pytest.param(150, 8, tuple(seed % 4 for seed in range(10)), marks=pytest.mark.slow),
    ],
)
def test_killed_at_random_moments_and_resumed_it_ends_the_same(folder, episodes, kills, workers):
    """Killed `kills` times, each time after it placed some more, then let end; for each of `workers`."""
    path = folder(episodes)
    whole, script = path.with_name("whole"), path.with_name("convert_it.py")
    script.write_text(_CONVERT)
    _convert(path, whole, sink=Hdf5Sink(whole))
    for seed, number in enumerate(workers):
        out, rng = path.with_name(f"killed{seed}"), random.Random(seed)
        command = [sys.executable, str(script), str(path), str(out), str(number)]
        for _ in range(kills):
            before = len(list(out.glob("episode_*.hdf5")))
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            until = time.monotonic() + 20
            while process.poll() is None and time.monotonic() < until:
                if len(list(out.glob("episode_*.hdf5"))) > before:
                    time.sleep(rng.uniform(0, 0.01))
                    break
            process.kill()  # its workers are left to notice; the next conversion begins at once
            assert process.wait() == -signal.SIGKILL
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert _content(out) == _content(whole)
