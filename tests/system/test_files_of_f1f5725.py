"""Files that commit f1f5725 wrote are still read as it read them: runs, spools, settings and data sets.

`tests/data/f1f5725/README.md` says how they were made. Nothing here names a setting of the product: the command line's
arguments are files of that folder too.
"""

import collections
import hashlib
import json
import re
import shutil
import signal
from collections.abc import Iterable, Mapping
from pathlib import Path
from unittest import mock

import h5py
import pytest
from commands import Command
from processes import PATIENCE, Cluster, checkpoints, cluster

from serl_chunk.runs.folder import RunFolder

parquet = pytest.importorskip("pyarrow.parquet")

FILES = Path(__file__).parents[1] / "data" / "f1f5725"
ARGUMENTS = json.loads((FILES / "arguments.json").read_text())  # of command lines, by what they are for
EXPECTED = json.loads((FILES / "digests.json").read_text())
LATER = json.loads((FILES / "later.json").read_text())  # what became of settings since
RENAMED = {"adjacent": "qc"}  # values that have another name since
INTERRUPTED = 130  # exit status
CHANGED = "config changed since the last start"
pytestmark = pytest.mark.timeout(4 * PATIENCE)


@pytest.fixture
def files(tmp_path) -> Path:
    """Copy the files, and note the demonstrations' new place where the old one was."""
    copy = tmp_path / "files"
    shutil.copytree(FILES, copy)
    note = copy / "run" / "demos.json"
    demos = json.loads(note.read_text())
    for episode in demos["episodes"]:
        episode["path"] = str(copy / "episodes_states" / Path(episode["path"]).name)
    note.write_text(json.dumps(demos))
    return copy


@pytest.fixture
def command(tmp_path, files, environment):
    """Return what starts `serl-chunk` in processes, all of which end with the test."""
    with cluster(tmp_path / "output", files / "episodes_states", environment) as c:
        yield c


def rows(run: Path) -> list[dict]:
    """Return the rows of a run's `metrics.jsonl`."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def episode_digest(file: Path) -> str:
    """Return a digest of all arrays and attributes of an HDF5 episode, by their names, types and bytes.

    A copy no longer knows whether a simulator made it, which alone is left out.
    """
    digest = hashlib.sha256()

    def add(name: str, node: h5py.Group | h5py.Dataset) -> None:
        for key in sorted(node.attrs.keys() - {"sim"}):
            digest.update(f"{name}@{key}={node.attrs[key]!r}\n".encode())
        if isinstance(node, h5py.Dataset):
            digest.update(f"{name} {node.dtype.str} {node.shape}\n".encode() + node[()].tobytes())

    with h5py.File(file) as opened:
        add("/", opened)
        opened.visititems(add)
    return digest.hexdigest()


def episodes(folder: Path) -> dict[str, str]:
    """Return the digest of every HDF5 episode of a folder, by its file's name."""
    return {file.name: episode_digest(file) for file in sorted(folder.glob("*.hdf5"))}


def tables(folder: Path) -> dict[str, str]:
    """Return a digest of the values of every table and JSON file of a LeRobot data set, by the file's place."""
    read = {file: parquet.read_table(file).to_pylist() for file in folder.rglob("*.parquet")}
    read |= {file: json.loads(file.read_text()) for file in (folder / "meta").rglob("*.json")}
    return {
        str(file.relative_to(folder)): hashlib.sha256(
            json.dumps(values, sort_keys=True, default=bytes.hex).encode()
        ).hexdigest()
        for file, values in sorted(read.items())
    }


def moved(manifest: Path, source: Path) -> list[dict]:
    """Note in a conversion's manifest that its source lies elsewhere now; return the manifest's entries."""
    entries = [json.loads(line) for line in manifest.read_text().splitlines()]
    entries[0]["settings"]["path"] = str(source)
    manifest.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return entries


def values(config: object) -> collections.Counter:
    """Count how often each value occurs among the leaves of a `config.json`, under whatever name."""
    if isinstance(config, dict):
        return sum(map(values, config.values()), collections.Counter())
    return collections.Counter([json.dumps(config)])


def changes(output: str) -> list[str]:
    """Return `old -> new` of every setting that a start's output lists as changed, under whatever name."""
    return sorted(re.findall(rf"{CHANGED}.*?: [\w.]+: (.* -> .*)", output))


@pytest.mark.slow
def test_the_run_goes_on_and_every_record_of_the_spool_arrives_once(command: Cluster, files, tmp_path):
    run, before = files / "run", rows(files / "run")
    shared = [*flags("run"), "--port", str(command.port)]
    learner = command.start(
        *shared, "--learner", "--debug", "--demo_path", str(command.demos), "--checkpoint_path", str(run)
    )
    actor = command.start(*shared, *ARGUMENTS["actor_of_two_episodes"], "--actor", "--spool_path", str(files / "spool"))
    actor.ends()
    trained = max(row["step"] for row in before)
    learner.until(lambda: rows(run)[-1]["step"] > trained, "no training")
    learner.signal(signal.SIGTERM)
    output = learner.ends()
    assert CHANGED not in output
    out = str(tmp_path / "out")
    command.start("data", "export", str(run), "--format", "hdf5", "--out", out, kind=Command).ends()

    arrived, steps = collections.defaultdict(list), 0
    for file in (tmp_path / "out").glob("*.hdf5"):
        with h5py.File(file) as opened:
            arrived[opened["rl"].attrs["episode_id"].decode()].append(episode_digest(file))
            steps += len(opened["action"])
    segments = sorted((run / "journal" / "online").glob("*.journal"))
    assert len(segments) > 1
    formats = [segment.read_bytes()[:8] for segment in segments]
    assert sorted(set(formats)) == [b"SERLJRN\x01", b"SERLJRN\x02"]
    assert formats == sorted(formats), "a segment of the old format follows a new one"
    delivered = EXPECTED["delivered"]
    assert {name: arrived[name] for name in delivered} == delivered
    assert len(arrived) == len(delivered) + 2  # those of the new actor
    after = rows(run)
    assert after[: len(before)] == before
    assert after[-1]["env_steps"] == steps
    new = [row for row in after[len(before) :] if row["kind"] == "train"]
    assert new[0]["replay/steps"] >= EXPECTED["journal_steps"]
    assert checkpoints(run)[-1] >= after[-1]["step"] > trained


def test_its_checkpoint_is_evaluated_as_it_was(command: Cluster, files):
    run = files / "run"
    [file] = (run / "evaluations").iterdir()
    then = json.loads(file.read_text())
    file.unlink()
    as_then = "XLA_FLAGS=--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    command.start(
        *flags("run"), "--actor", "--eval_checkpoint_step", "latest", "--eval_n_trajs", "3",
        "--checkpoint_path", str(run), prefix=("env", as_then),
    ).ends()  # fmt: skip
    now = json.loads(file.read_text())
    ran = [episode for results in (then["results"], now["results"]) for r in results for episode in r["episodes"]]
    fine = [{name: episode.pop(name) for name in ("jerk", "clipped_share", "gated_share")} for episode in ran]
    for episode in ran:
        del episode["wall_seconds"]
    assert [r.pop("starts_repeat") for r in now["results"]] == [True]  # which it did not record
    assert now == then
    for one, other in zip(fine[:3], fine[3:], strict=True):
        assert other == pytest.approx(one, rel=0.2, abs=0.015)  # processors round differently; the loop is closed


def test_its_report_has_its_figures(command: Cluster, files):
    run = files / "run"
    command.start("report", str(run), kind=Command).ends()
    text = re.sub(r"<[^>]+>", " ", (run / "report.html").read_text())
    for name in ("step", "env_steps", "human_ticks"):
        shown = max(row[name] for row in rows(run))
        assert re.search(rf"(?<!\d){shown}(?!\d)", text), name
    assert (run / "report.png").stat().st_size > 10_000


def test_its_episodes_are_exported_as_they_were(command: Cluster, files, tmp_path):
    for to in ("lerobot", "hdf5"):
        out = str(tmp_path / to)
        export = ("data", "export", str(files / "run"), "--format", to, "--out", out, "--workers", "0")
        command.start(*export, kind=Command).ends()
    assert tables(tmp_path / "lerobot") == tables(FILES / "exported") == EXPECTED["exported_tables"]
    assert episodes(tmp_path / "hdf5") == EXPECTED["journal"]
    then, now = (
        moved(folder / "conversion.jsonl", Path("run")) for folder in (files / "exported", tmp_path / "lerobot")
    )
    assert now == then


def test_its_demonstrations_are_found_where_it_noted_them(command: Cluster, files, tmp_path):
    out = str(tmp_path / "out")
    export = ("data", "export", str(files / "run"), "--store", "demo", "--format", "hdf5", "--out", out)
    command.start(*export, kind=Command).ends()
    assert episodes(tmp_path / "out") == EXPECTED["episodes_states"]


@pytest.mark.parametrize("name", ["episodes_states", "episodes_images", "exported"])
def test_data_are_read_bit_for_bit(command: Cluster, files, tmp_path, name):
    convert = ("data", "convert", str(files / name), "--to", "hdf5", "--out", str(tmp_path / "out"))
    command.start(*convert, kind=Command).ends()
    assert episodes(tmp_path / "out") == EXPECTED[name]


def test_an_interrupted_conversion_goes_on(command: Cluster, files):
    source, out = files / "episodes_states", files / "converted"
    before = moved(out / "conversion.jsonl", source)
    convert = ("data", "convert", str(source), "--to", "lerobot", "--out", str(out), "--resume")
    command.start(*convert, kind=Command).ends()
    after = [json.loads(line) for line in (out / "conversion.jsonl").read_text().splitlines()]
    assert after[:4] == before[:4]  # the head and the episode that had arrived
    assert after[-1] == {"kind": "finished"}
    assert tables(out) == EXPECTED["converted"]


def replaced(config: dict, path: str, value: object) -> object:
    """Put `value` at the dotted `path` of a `config.json`; return what was there."""
    *groups, name = path.split(".")
    for group in groups:
        config = config[group]
    before, config[name] = config[name], value
    return before


def without_removed(run: Path) -> tuple[dict, collections.Counter]:
    """Give a run's removed settings values without effect; return its `config.json`, and a count of these changes."""
    file = run / "config.json"
    config = json.loads(file.read_text())
    gone: collections.Counter = collections.Counter()
    for path, default in LATER["removed"].items():
        gone[f"{replaced(config, path, LATER['unused'].get(path, default))} -> {default}"] += 1
    file.write_text(json.dumps(config))
    return config, gone


def flags(name: str) -> list[str]:
    """Return a command line of `arguments.json` without the settings that were removed.

    What was added since and has another default now is set to what there was.
    """
    removed = tuple(f"--config.{path}=" for path in LATER["removed"])
    return [word for word in ARGUMENTS[name] if not word.startswith(removed)] + LATER["as_then"]


@pytest.mark.parametrize("name", ["settings_a", "settings_b"])
def test_settings_keep_their_values(command: Cluster, files, name):
    run, write = files / name, RunFolder.write_config
    then, _ = without_removed(run)

    def write_and_interrupt(folder: RunFolder) -> None:
        write(folder)
        raise KeyboardInterrupt

    with mock.patch.object(RunFolder, "write_config", write_and_interrupt):
        output = start_and_interrupt(command, run, flags(name))
    now = json.loads((run / "config.json").read_text())
    assert CHANGED not in output
    assert now["run_id"] == then["run_id"]
    for path, value in LATER["converted"].items():
        replaced(then, path, value)
    removed = collections.Counter(map(json.dumps, (LATER["removed"] | LATER["unused"]).values()))
    assert not renamed(values(then)) - removed - values(now)


@pytest.mark.parametrize("name", ["settings_a", "settings_b"])
def test_a_start_with_other_settings_says_each_of_them(command: Cluster, files, name):
    _, gone = without_removed(files / name)
    with mock.patch("serl_chunk.cli.learner.Learner", side_effect=KeyboardInterrupt):  # before networks are built
        output = start_and_interrupt(command, files / name, flags(f"not_{name}"))
    expected = renamed(collections.Counter(EXPECTED["changes"][name]) - gone)
    assert changes(output) == sorted(expected.elements())


def test_a_run_that_used_removed_settings_is_refused_with_the_commit_that_has_them(command: Cluster, files):
    demos = ("--demo_path", str(command.demos), "--checkpoint_path", str(files / "settings_a"))
    output = command.start(*flags("settings_a"), "--local", "--debug", *demos, kind=Command).ends(2)
    assert re.search(r"was removed: .* The last commit with it is [0-9a-f]{7}", " ".join(output.split()))


def renamed(texts: Iterable[str] | Mapping[str, int]) -> collections.Counter[str]:
    """Count `texts` under the present names of values."""
    out: collections.Counter[str] = collections.Counter()
    for text, n in collections.Counter(texts).items():
        for old, new in RENAMED.items():
            text = re.sub(rf"\b{old}\b", new, text)
        out[text] += n
    return out


def start_and_interrupt(command: Cluster, run: Path, settings: list[str]) -> str:
    """Start with these settings, which a patched part of the start interrupts; return the output."""
    flags = ("--local", "--debug", "--demo_path", str(command.demos), "--checkpoint_path", str(run))
    return command.start(*settings, *flags, kind=Command).ends(INTERRUPTED)
