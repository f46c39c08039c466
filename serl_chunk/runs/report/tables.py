"""Parts of a run's report that are text: origin, settings, robot time, episodes and their films."""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np

from serl_chunk.config.agents.base import AgentConfig
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.fields import ABSENT, default_of
from serl_chunk.config.overrides import to_dict
from serl_chunk.config.robots import RobotConfig
from serl_chunk.io import atomic_write, format_duration, plural
from serl_chunk.runs.episodes import RunSource
from serl_chunk.runs.evaluations import CHECKS
from serl_chunk.runs.folder import CONFIG, OWN_FIELDS, read_config
from serl_chunk.runs.metrics import Row, RunMetrics, read_metrics, succeeded_alone
from serl_chunk.types import IMAGE_PREFIX, DataError, Episode, Source
from serl_chunk.viz.page import Html, element, film, fold, join, note, section, table
from serl_chunk.viz.video import MAX_FPS, EpisodeVideo, ffmpeg_program

logger = logging.getLogger(__name__)

VIDEOS = "videos"  # in a run folder: <checkpoint>_<mode>/<mode>_<number>_<outcome>.mp4, training/
TRAINING_FILMS = Path(VIDEOS) / "training" / "films.json"
NOT_RECORDED = "not recorded"
SHOWN = 20  # episodes of a table before the fold
FOLDED = 1_000  # and behind it
PLAYED = 6  # films of a table with a player; the others are links
EPISODES_PAGE = "episodes.html"  # in a run folder: the viewer's page of some training episodes
EPISODES_IN_PAGE = "episodes.json"  # the number in that page of each of them, by its number in the metrics
STRETCHES, LEAST_EPISODES = 8, 10  # of a run at most, and episodes of each
_STRETCH_COLUMNS = ("episodes", "robot", "human", "human's share", "success without intervention", "change")
_COLUMNS = ("episode", "outcome", "steps", "return", "human", "after")


def read_settings(run: Path) -> dict[str, Any]:
    """Return a run's `config.json`, {} without one; raises ConfigError where it is damaged or of another format."""
    return read_config(run) if (run / CONFIG).exists() else {}


def origin(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the versions, host and command line of the process that wrote `config.json`, as (name, value)."""
    package, process = config.get("serl_chunk") or {}, config.get("process") or {}
    version = package.get("version", NOT_RECORDED)
    fields = {"Python": "python", "JAX": "jax", "Host": "host", "Command line": "command"}
    return [
        ("serl_chunk", f"{version}, commit {package['commit']}" if package.get("commit") else version),
        *((name, process.get(key, NOT_RECORDED)) for name, key in fields.items()),
    ]


def settings_section(config: Mapping[str, Any]) -> Html:
    """Build the settings: those that differ from the defaults, then all others folded."""
    if not config:
        return section("Configuration", note("This run folder holds no config.json."), key="configuration")
    flat, default = dict(flatten(config)), _defaults(config)
    changed = [
        (path, value, default.get(path, "(required)"))
        for path, value in flat.items()
        if path.split(".")[0] not in OWN_FIELDS and default.get(path) != value
    ]
    listed = {path for path, *_ in changed}
    others = [(path, value) for path, value in flat.items() if path not in listed]
    return section(
        "Configuration",
        table(("changed setting", "value", "default"), changed, "Every setting has its default."),
        fold(f"all {plural(len(others), 'other setting')}", table(("setting", "value"), others)),
        key="configuration",
    )


def flatten(value: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield settings by dotted path, as the command line names them."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from flatten(item, f"{prefix}.{key}" if prefix else str(key))
    elif prefix:
        yield prefix, value if isinstance(value, str) else json.dumps(value)


def _defaults(config: Mapping[str, Any]) -> dict[str, str]:
    defaults = _of_fields(ExperimentConfig)
    for name, base in (("robot", RobotConfig), ("agent", AgentConfig)):
        group = config.get(name)
        kind = group.get("kind") if isinstance(group, dict) else None
        defaults[name] = next(({"kind": kind} | _of_fields(c) for c in _subclasses(base) if c.kind == kind), {})
    return dict(flatten(json.loads(json.dumps(defaults))))


def _of_fields(kind: type) -> dict[str, Any]:
    values = ((field.name, default_of(field)) for field in dataclasses.fields(kind))
    return {name: to_dict(value) for name, value in values if value is not ABSENT}


def _subclasses(base: Any) -> Iterator[Any]:
    for kind in base.__subclasses__():
        yield kind
        yield from _subclasses(kind)


def control_hz(config: Mapping[str, Any]) -> float | None:
    """Return ticks per second: of the robot's specification where the run recorded it, else of its configuration."""
    found = (hz for group in ("robot_spec", "robot") if (hz := (config.get(group) or {}).get("control_hz")))
    return next(map(float, found), None)


_CHECK_COLUMNS = ("number", "policy", "repeated command", "mean command", "at a limit alone")


def checks_section(run: Path) -> Html:
    """Build the open-loop checks of a run's checkpoints: what each found, and the errors of the newest one."""
    checks = []
    for file in (run / CHECKS).glob("*.json"):
        try:
            check = json.loads(file.read_text())
            rows = [
                (d["name"], *(f"{d[e]:.4g}" for e in ("error", "held_error", "mean_error")), f"{d['saturated']:.1%}")
                for d in check["dimensions"]
            ]
            kind = "fault" if check["findings"] else None
            lines = [element("p", line, class_=kind) for line in check["lines"]]
            checks.append((int(check["checkpoint"]), lines, rows))
        except (OSError, ValueError, LookupError, TypeError) as error:
            logger.warning("%s is left out of the report: %r", file, error)
    checks.sort(key=lambda check: check[0])
    lines = [line for _, lines, _ in checks for line in lines]
    about = (
        "Chunks decided on recorded observations against the recorded actions, mean absolute errors in the robot's "
        "units: of the policy, of a command that stays as it is, of the demonstrations' mean command."
    )
    none = "No policy was compared with demonstrations: serl-chunk check-policy does."
    table_ = fold(about, table(_CHECK_COLUMNS, checks[-1][2])) if checks else note(none)
    return section("Policy against demonstrations", *lines, table_, key="check")


def episodes_section(run: Path, metrics: RunMetrics, config: Mapping[str, Any]) -> Html:
    """Build the episodes of evaluations and of training, newest first, with their films next to the page."""
    hz = control_hz(config)
    speed = f", {MAX_FPS / hz:.2f} of the robot's speed" if hz and hz > MAX_FPS else ""
    about = f"Films show every tick at {min(MAX_FPS, hz or MAX_FPS):g} frames a second{speed}. A frame in this colour: "
    parts: list[Html] = []
    filmed = False
    for title, rows, missing in (
        ("Evaluation", _evaluated(run), "No evaluation has kept its episodes."),
        ("Training", _trained(run, metrics), "No episode has finished in this run yet."),
    ):
        films = [(row.film, row.caption) for row in rows if row.film]
        filmed = filmed or bool(films)
        links = [name for name in ("film", "viewer") if any(getattr(row, name) for row in rows)]
        columns = (*_COLUMNS, *links)
        listed = rows[: SHOWN + FOLDED]
        cells = [(*row[: len(_COLUMNS)], *(_link(name, getattr(row, name)) for name in links)) for row in listed]
        more = cells[SHOWN:]
        parts += [
            element("h3", title),
            element("div", *(film(*each) for each in films[:PLAYED]), class_="films"),
            table(columns, cells[:SHOWN], missing),
            fold(plural(len(more), "earlier episode"), table(columns, more)) if more else Html(),
        ]
    how = "evaluations by learner.video_episodes or --save_video, training episodes by serl-chunk report --films N"
    none = f"No film. Films are made of {how}."
    legend = join([about, element("span", "a human acts", class_="human")]) if filmed else none
    if not (run / EPISODES_PAGE).exists():
        parts.append(
            note("Training episodes are played in the viewer: serl-chunk report --episodes N links some here.")
        )
    if seams := _seams(metrics):
        parts.append(note(seams))
    return section("Episodes", note(legend), *parts, key="episodes")


def _link(text: str, address: str) -> Html | str:
    return element("a", text, href=address) if address else ""


def _seams(metrics: RunMetrics) -> str:
    """Say how hard joints accelerated where control passed between policy and human; empty where it never did."""
    rows = [row for row in metrics["episode"] if row.get("seam_acceleration") is not None]
    if not rows:
        return ""
    seams, others = (max(row.get(name) or 0.0 for row in rows) for name in ("seam_acceleration", "acceleration"))
    return (
        f"In the {plural(len(rows), 'episode')} in which control passed between policy and human, the commands of "
        f"joints changed their speed by at most {seams:.3g} rad/s² there and {others:.3g} rad/s² at other ticks."
    )


class _Episode(NamedTuple):
    """A row of a table of episodes."""

    episode: str
    outcome: str
    steps: int
    ret: str
    human: str
    after: str
    caption: str
    film: str  # address relative to the run folder; empty without a film
    viewer: str = ""  # the same, of the viewer's page


def _trained(run: Path, metrics: RunMetrics) -> list[_Episode]:
    films, pages = (
        {e["number"]: e["file"] for e in _entries(run / file)} for file in (TRAINING_FILMS, EPISODES_IN_PAGE)
    )
    rows = []
    for row in reversed(metrics["episode"]):
        number, length = row["number"], row.get("episode/l") or 0
        outcome = {1: "success", 0: "no success", None: "unknown"}[row.get("succeed")]
        human = _share(row.get("intervention_steps"), length)
        name = f"{number} (warm-up)" if row.get("phase") == "warmup" else str(number)
        caption = f"training episode {number}: {outcome}, {plural(length, 'step')}, human {human}"
        film = _existing(run, TRAINING_FILMS.parent / films[number]) if number in films else ""
        after = f"{row['env_steps']:,} steps"
        ret = _number(row.get("episode/r"))
        rows.append(_Episode(name, outcome, length, ret, human, after, caption, film, pages.get(number, "")))
    return rows


def _entries(file: Path) -> list[dict[str, Any]]:
    """Return the entries of a list of numbers and files; none where it is absent or damaged."""
    try:
        return [each for each in json.loads(file.read_text()) if each.keys() >= {"number", "file"}]
    except (OSError, ValueError, AttributeError, TypeError):
        return []


def _evaluated(run: Path) -> list[_Episode]:
    rows: list[_Episode] = []
    for file in sorted(run.glob("evaluations/*.json"), key=lambda file: file.stat().st_mtime, reverse=True):
        try:
            content = json.loads(file.read_text())
            step, purpose = content["checkpoint"], content["purpose"]
            of_file = []
            for mode, episodes in ((r["mode"], r.get("episodes") or []) for r in content["results"]):
                for i, e in enumerate(episodes):
                    outcome, length = e["outcome"], e["length"]
                    about = f"evaluation of checkpoint {step}, {mode} policy, episode {i}: {outcome}"
                    of_file.append(_Episode(
                        f"{i} ({mode}, {purpose})", outcome, length, _number(e.get("total_reward")),
                        _share(e.get("human_ticks"), length), f"checkpoint {step}",
                        f"{about}, {plural(length, 'step')}",
                        _existing(run, Path(VIDEOS, f"{step}_{mode}", f"{mode}_{i:03d}_{outcome}.mp4")),
                    ))  # fmt: skip
            rows += of_file
        except (OSError, ValueError, LookupError, TypeError) as error:
            logger.warning("%s is left out of the report: %r", file, error)
    return rows


def _existing(run: Path, film: Path) -> str:
    return quote(film.as_posix()) if (run / film).is_file() else ""


def _share(human: int | None, length: int) -> str:
    return f"{(human or 0) / length:.0%}" if length else "unknown"


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.4g}"


class RobotTime(NamedTuple):
    """Figures of a run's online episodes; resets and pauses are not in them. None where nothing is known."""

    robot_minutes: float  # of all ticks, a human's too
    human_seconds: float  # of a human's segments, idle ticks included
    successes_per_10_min: float | None  # without intervention, in the last `window` judged episodes
    longest_streak: int  # of judged episodes that succeed without intervention, one after another
    success_s: float | None  # median length of those among the last `window`
    demonstration_s: float | None  # median length of the demonstrations
    resets: int | None  # of the scene, before this task's episodes; None: no other task undoes this one
    unreset_minutes: float  # of the episodes that began without one
    longest_unreset_minutes: float  # of the robot between two resets, the other task's episodes included


def robot_time(metrics: RunMetrics, hz: float, demo_steps: Sequence[int], window: int) -> RobotTime:
    """Return the figures of a run at `hz` ticks a second, whose demonstrations have `demo_steps` steps each."""
    episodes = metrics["episode"]
    judged = [row for row in episodes if row.get("succeed") is not None and _length(row)]
    recent = judged[-window:]
    ticks, alone = sum(map(_length, recent)), [_length(row) for row in recent if succeeded_alone(row)]
    last, turns = metrics.last() or {}, [row for row in episodes if row.get("start")]
    return RobotTime(
        robot_minutes=sum(map(_length, episodes)) / hz / 60,
        human_seconds=(last.get("human_ticks") or 0) / hz,
        successes_per_10_min=len(alone) / (ticks / hz / 600) if ticks else None,
        longest_streak=max((len(list(of)) for won, of in itertools.groupby(judged, succeeded_alone) if won), default=0),
        success_s=statistics.median(alone) / hz if alone else None,
        demonstration_s=statistics.median(demo_steps) / hz if demo_steps else None,
        resets=sum(row["start"] == "reset" for row in turns) if turns else None,
        unreset_minutes=sum(_length(row) for row in turns if row["start"] != "reset") / hz / 60,
        longest_unreset_minutes=max((row["since_reset"] + _length(row) for row in turns), default=0) / hz / 60,
    )


class Stretch(NamedTuple):
    """Online episodes that follow one another, and what a human did in them."""

    first: int  # their numbers in the run
    last: int
    robot_seconds: float  # of all ticks, a human's too
    human_seconds: float  # of them a human's, idle ticks included
    alone: int  # episodes that succeeded without intervention
    judged: int  # with a known outcome

    @property
    def rate(self) -> float:
        return self.alone / max(1, self.judged)


def stretches(metrics: RunMetrics, hz: float) -> list[Stretch]:
    """Return a run's online episodes in equal stretches; none where no human acted, or of too few episodes for two."""
    rows = [row for row in metrics["episode"] if _length(row)]
    count = min(STRETCHES, len(rows) // LEAST_EPISODES)
    if count < 2 or not any(row.get("intervention_steps") for row in rows):
        return []
    parts = [[rows[i] for i in part] for part in np.array_split(np.arange(len(rows)), count)]
    return [
        Stretch(
            part[0]["number"], part[-1]["number"], sum(map(_length, part)) / hz,
            sum(row.get("intervention_steps") or 0 for row in part) / hz,
            sum(map(succeeded_alone, part)), sum(row.get("succeed") is not None for row in part),
        )
        for part in parts
    ]  # fmt: skip


def gain(found: Sequence[Stretch]) -> str:
    """Say what a minute of the human's bought, from the first stretch to the last; empty where there was none."""
    minutes = sum(part.human_seconds for part in found[:-1]) / 60  # the last stretch's help is for later episodes
    if not minutes:
        return ""
    first, last = 100 * found[0].rate, 100 * found[-1].rate
    return (
        f"{(last - first) / minutes:+.0f} points of success without intervention ({first:.0f} to {last:.0f} % for "
        f"{minutes:.1f} min), the robot's own practice included"
    )


def human_time_table(found: Sequence[Stretch]) -> Html:
    """Build what each stretch took of a human's time, and what the policy did alone in it; empty without one."""
    if not found:
        return Html()
    changes = ["", *(f"{100 * (part.rate - before.rate):+.0f} points" for before, part in itertools.pairwise(found))]
    rows = [
        (
            f"{part.first} to {part.last}", format_duration(part.robot_seconds), format_duration(part.human_seconds),
            f"{part.human_seconds / part.robot_seconds:.0%}", f"{part.alone} of {part.judged} ({part.rate:.0%})",
            change,
        )
        for part, change in zip(found, changes, strict=True)
    ]  # fmt: skip
    chance = 196 * (0.5 / max(1, min(part.judged for part in found))) ** 0.5  # 95 %, of rates near a half
    about = (
        "What a human's minutes bought: a helped episode is no success without intervention. A change of up to "
        f"{chance:.0f} points may be chance."
    )
    return join([note(about), table(_STRETCH_COLUMNS, rows)])


def _length(row: Row) -> int:
    return int(row.get("episode/l") or 0)


def recorded_episodes(run: Path, source: RunSource) -> list[tuple[str, int]]:
    """Return key and number of the training episodes that the journal has, the newest first.

    An episode belongs to the row of `metrics.jsonl` that names it, of older runs to that in the same place, counted
    from the end, if their lengths agree; others are left out. Raises DataError (no `metrics.jsonl`).
    """
    keys = [key for key in source.keys() if not source.about(key).demonstration]  # those have no row
    rows = read_metrics(run)["episode"]
    named = {row["episode"].removeprefix(f"{row['actor_id']}/"): row for row in rows if row.get("episode")}
    by_place = zip(reversed(keys), reversed(rows), strict=False)
    both = [(key, named[key]) for key in reversed(keys) if key in named] if named else by_place
    return [(key, row["number"]) for key, row in both if row.get("episode/l") == source.about(key).length]


def film_training_episodes(run: Path, n: int) -> int:
    """Film the newest `n` training episodes that have frames to `videos/training/`, and return their number.

    They are those of `recorded_episodes`. Raises as that, ConfigError (no journal, or no ffmpeg) and VideoError.
    """
    ffmpeg_program()
    source = RunSource(run)
    folder = (run / TRAINING_FILMS).parent
    entries: list[dict[str, Any]] = []
    for key, number in recorded_episodes(run, source):
        if len(entries) == n:
            break
        name = f"{number:06d}.mp4"
        if not (folder / name).exists():
            try:
                if not _film(source.read(key), folder / name, source.spec.control_hz):
                    logger.info("no films of training episodes: the journal of %s has no frames", run)
                    break
            except DataError as error:  # dropped by the learner meanwhile, or damaged
                logger.warning("training episode %s is not filmed: %s", number, error)
                continue
        entries.append({"number": number, "file": name})
    if entries:
        atomic_write(run / TRAINING_FILMS, json.dumps(entries))
    return len(entries)


def _film(episode: Episode, path: Path, control_hz: float) -> bool:
    """Write an episode's film, each camera's frame held until its next one; False without frames."""
    cameras = {k: rows for k, rows in episode.steps.sparse.items() if k.startswith(IMAGE_PREFIX) and len(rows.index)}
    if not cameras:
        return False
    video = EpisodeVideo(path, control_hz)
    try:
        for tick, source in enumerate(episode.steps.source):
            at = {k: max(0, int(np.searchsorted(rows.index, tick, "right")) - 1) for k, rows in cameras.items()}
            images = {k: np.asarray(rows.values[at[k]]) for k, rows in cameras.items()}
            video.add(images, human=source == Source.HUMAN)
        video.finish(path.name)
    except BaseException:
        video.discard()
        raise
    return True
