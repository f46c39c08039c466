"""A training run whose only reward is a classifier's, and how often that agrees with the simulator.

    python benchmarks/classifier_only_reward.py [--out DIR] [--json FILE] [--png FILE] [--set FIELD=VALUE]

1. The small network is trained on the near misses and successes of `classifier_fake_aloha.py`, on episodes of
   practice, in which the scripted hand errs, wanders and goes on after a success, and on releases up to 10 cm from the
   target and 8 cm above it; many in other light, from moved cameras. Of these it gets what it will look at: frames on
   which the left hand is open.
2. `serl-chunk record` records scripted demonstrations, and `serl-chunk --learner --actor` trains `fake_aloha_images`
   with the scripted human. In both the classifier alone ends an episode as a success (`outcome.environment=false`), and
   counts frames on which the left hand is open (`outcome.condition`). The policy sees the camera above alone, which
   makes an update three times as fast. One frame is enough: the simulator takes a release that lasts a single tick.
3. Each episode's outcome is compared with what the simulator judged, which the run's journal has and training does not.
4. Disagreements are corrected as an operator corrects them, a classifier is trained on these too, and steps 2 and 3 are
   repeated with it: `--rounds` times in all, fewer where a run agrees on `--wanted` of its episodes.
5. The last checkpoint is evaluated by the simulator, on starts of its own.

Everything that was done is kept in `--out`, and the same command goes on after an interruption.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
from classifier_fake_aloha import EVERY, ROBOT, episodes, seen_by_another_camera, succeeded, towards
from support.cli_args import add_settings, keep_plan, make_parser, settings, write_figures
from support.cli_args import split as split_setting
from support.learning import Trained, product
from support.ports import free_port

from serl_chunk.classifier.dataset import (
    CLASSES,
    IGNORED,
    Labelled,
    LabelledEpisode,
    Labelling,
    joined,
    read_source,
    split,
)
from serl_chunk.classifier.files import DESCRIPTION, read_description, save
from serl_chunk.classifier.train import TrainingOptions, judge, train
from serl_chunk.config.agents.encoder import EncoderConfig
from serl_chunk.config.loader import load_experiment
from serl_chunk.config.overrides import apply_overrides
from serl_chunk.data.labels import DISCARD, FAILURE, correction
from serl_chunk.data.source import ReadOptions
from serl_chunk.evaluation.results import wilson_interval
from serl_chunk.robots.fake.env import NO_ARM, FakeAlohaEnv
from serl_chunk.robots.fake.expert import READY, ScriptedExpert
from serl_chunk.robots.fake.kinematics import LEFT, RIGHT, grip_point, inverse
from serl_chunk.robots.fake.spec import ACTION_HIGH, ACTION_LOW, ARM_DIM, CUBE_REST_Z, FINGERS_ON_CUBE, PLACE
from serl_chunk.runs.amend import RunAmender
from serl_chunk.runs.episodes import RunSource
from serl_chunk.types import IMAGE_PREFIX, Observation, Outcome
from serl_chunk.viz.plots import new_figure, to_png

FILE = Path(__file__).resolve()  # is the experiment, too
LEFT_OPENING, OPEN = 6, 0.4  # of the state, and from where on the classifier looks
CAMERAS = ("top", "left_wrist")  # of the classifier
PRACTICE = 160  # ticks of an episode of practice
RELEASES, AFTER = 10, 5  # releases for each episode of practice, and ticks recorded of each
FALSE_POSITIVES = 0.05  # share of the threshold: most of the held-out failures are releases near the border
LAST = 100  # episodes of the second figure
SHOWN = 12  # disagreements in the picture
ENCODER = EncoderConfig(features=(16, 32, 32), latent=64, share_cameras=False)  # places matter: no pooling
PLAN = ("agent.image_keys=top",)  # of the training


def open_hand(observation: Observation) -> bool:
    """The classifier's condition: what the left hand still holds is not placed."""
    return bool(observation["state"][LEFT_OPENING] > OPEN)


def experiment() -> Any:
    config = load_experiment("fake_aloha_images")
    return dataclasses.replace(config, outcome=dataclasses.replace(config.outcome, condition=open_hand))


def practice(seed: int) -> LabelledEpisode:
    """Draw an episode of an unsteady hand, as it is drawn; labels are the simulator's truth.

    A cube that fell into its place from above is of no class: the simulator judges how it came there.
    """
    rng = np.random.default_rng([seed, 2])
    env = FakeAlohaEnv(dataclasses.replace(ROBOT, max_episode_steps=1000))
    env.reset(seed=seed)
    expert = ScriptedExpert(env, noise=rng.uniform(0.005, 0.03))
    expert.reset(seed)
    frames: dict[str, list[np.ndarray]] = {c: [] for c in CAMERAS}
    labels, ticks, left, command, released = [], [], 0, expert.act(), False
    for tick in range(PRACTICE):
        placed = succeeded(env)
        if tick % EVERY == 0 and env.joints[LEFT_OPENING] > OPEN:
            images = env.read_images(CAMERAS)
            for camera, shown in frames.items():
                shown.append(images[IMAGE_PREFIX + camera])
            labels.append(int(released) if placed == released else IGNORED)
            ticks.append(tick)
        if left == 0 and rng.uniform() < (0.3 if placed else 0.02):
            left, command = int(rng.integers(8, 40)), _somewhere(env, rng)
        left = max(0, left - 1)
        *_, info = env.step(command if left else expert.act())
        released = bool(info["success"]) or (released and env.holder == NO_ARM)
    images = {c: np.stack(v) for c, v in frames.items()}
    return LabelledEpisode(f"practice {seed}", images, np.array(labels, np.int8), np.array(ticks, np.int32))


def release(seed: int) -> LabelledEpisode:
    """Draw a release near the border of what counts, or an empty hand that opens near the target, and the ticks after
    it; the simulator judges it.

    Of a cube that fell into its place from above, the first frame alone counts.
    """
    rng = np.random.default_rng([seed, 4])
    env = FakeAlohaEnv(dataclasses.replace(ROBOT, max_episode_steps=1000))
    env.reset(seed=seed)
    away, angle = rng.uniform(0.0, 0.1), rng.uniform(0, 2 * math.pi)
    height = rng.uniform(0.0, 0.08) if rng.uniform() < 0.4 else 0.0
    cube = PLACE[0] + away * math.cos(angle), PLACE[1] + away * math.sin(angle), PLACE[2] + height
    grip = tuple(np.subtract(cube, rng.uniform(-0.017, 0.017, 3)))
    right = tuple(READY[RIGHT] + rng.normal(0, 0.06, 3))
    joints = [*inverse(LEFT, grip), FINGERS_ON_CUBE, *inverse(RIGHT, right), rng.uniform(0.3, 1.0)]
    holder = int(rng.choice([LEFT, RIGHT, NO_ARM], p=[0.6, 0.2, 0.2]))
    if holder == RIGHT:
        joints[-1] = FINGERS_ON_CUBE
        cube = tuple(grip_point(RIGHT, joints, ARM_DIM) + rng.uniform(-0.017, 0.017, 3))
    elif holder == NO_ARM:
        cube = rng.uniform(-0.2, 0.25), rng.uniform(-0.15, 0.15), CUBE_REST_Z
    held_at = grip_point(RIGHT, joints, ARM_DIM) if holder == RIGHT else grip_point(LEFT, joints, 0)
    env.place(joints, cube, holder, tuple(np.subtract(cube, held_at)))
    goal, opening = tuple(grip + rng.normal(0, 0.04, 3)), rng.uniform(OPEN + 0.02, 1.0)
    frames: dict[str, list[np.ndarray]] = {c: [] for c in CAMERAS}
    labels: list[int] = []
    command = np.array([*joints[:LEFT_OPENING], opening, *joints[ARM_DIM:]], np.float32)
    released = False
    for tick in range(AFTER):
        *_, info = env.step(command)
        released = released or bool(info["success"])
        labels.append(int(released) if (tick == 0 and holder == LEFT) or released == succeeded(env) else IGNORED)
        images = env.read_images(CAMERAS)
        for camera, shown in frames.items():
            shown.append(images[IMAGE_PREFIX + camera])
        command = np.clip(towards(env, goal, opening), ACTION_LOW, ACTION_HIGH)
    images = {c: np.stack(v) for c, v in frames.items()}
    return LabelledEpisode(f"release {seed}", images, np.array(labels, np.int8), np.arange(AFTER, dtype=np.int32))


def _somewhere(env: FakeAlohaEnv, rng: np.random.Generator) -> np.ndarray:
    """A command to stay, or one that takes the left hand to a place, most often near the target, and the right one
    anywhere."""
    command = np.array(env.joints, np.float32)
    if rng.uniform() < 0.4:
        command[LEFT_OPENING] = max(command[LEFT_OPENING], rng.uniform(OPEN, 1.0))
        return command
    x, y, z = PLACE
    near = rng.uniform() < 0.6
    spread = 0.03 if near else 0.2
    goal = x + rng.normal(0, spread), y + rng.normal(0, spread), z + rng.uniform(0, 0.08)
    command = towards(env, goal, float(rng.uniform(0.3, 1.0)))
    if rng.uniform() < 0.5:
        command[ARM_DIM:] += rng.normal(0, 0.4, ARM_DIM).astype(np.float32)
    return np.clip(command, ACTION_LOW, ACTION_HIGH).astype(np.float32)


def drawn(count: int, first: int) -> Labelled:
    """Near misses and successes, as many episodes of practice, and releases, in another light, from moved cameras.
    Of practice and releases three of four are as
    the run's cameras see them."""
    out = episodes(count, first, looked=lambda env: env.joints[LEFT_OPENING] > OPEN).episodes
    kinds = [(practice, seed) for seed in range(first, first + count)]
    kinds += [(release, seed) for seed in range(first, first + RELEASES * count)]
    for draw, seed in kinds:
        episode, rng = draw(seed), np.random.default_rng([seed, 3])
        if seed % 4 == 0:
            moved = {c: seen_by_another_camera(v, rng) for c, v in episode.images.items()}
            episode = episode._replace(images=moved)
        out.append(episode)
    return Labelled(out, CLASSES, [])


def make_classifier(folder: Path, count: int, steps: int, runs: list[Path]) -> dict[str, Any]:
    """Train on `count` drawn episodes and on those of `runs`, where that was not done. Returns the held-out figures."""
    if not (folder / DESCRIPTION).exists():
        folder.mkdir(parents=True, exist_ok=True)
        sets = [drawn(count, 10_000)]
        for run in runs:
            found = read_source(RunSource(run, ReadOptions(cameras=CAMERAS)), CAMERAS, Labelling(), set(), open_hand)
            print("\n".join(found.notes))
            sets.append(found)
        training, held = split(joined(sets), 0.2, 0)
        options = TrainingOptions(steps=steps, batch_size=128, learning_rate=1e-3, shift=1, seed=0)
        trained = train(training, held, CAMERAS, encoder=ENCODER, options=options, progress=shown)
        description = dataclasses.replace(trained.description, frames=1)
        found = judge(description, trained.weights, held, false_positives=FALSE_POSITIVES)
        save(folder, dataclasses.replace(description, threshold=found.threshold, validation=found.to_json()),
             trained.weights)  # fmt: skip
    description = read_description(folder)
    return {"threshold": description.threshold, "frames": description.frames, "held_out": description.validation}


def shown(step: int, steps: int, note: str) -> None:
    print(f"{step}/{steps} {note}", flush=True)


def command(*words: str, classifier: Path, texts: list[str]) -> None:
    """Run one `serl-chunk` command with the classifier as the only judge. Raises SystemExit where it fails."""
    overrides = [f"outcome.classifier={classifier}", "outcome.environment=false", *texts]
    product(*words, experiment=str(FILE), overrides=overrides)


def trained_run(out: Path, number: int, classifier: Path, n_demos: int, seed: int, texts: list[str]) -> Path:
    """Record and train, or go on; returns the run folder."""
    demos, run = out / f"demos_{number}", out / f"run_{number}"
    command("record", "--policy", "scripted", "--n_demos", str(n_demos), "--out", str(demos), "--cameras", "top",
            classifier=classifier, texts=texts)  # fmt: skip
    command("--learner", "--actor", "--debug", "--seed", str(seed), "--port", str(free_port()), "--demo_path",
            str(demos), "--checkpoint_path", str(run), "--spool_path", str(out / f"spool_{number}"),
            classifier=classifier, texts=texts)  # fmt: skip
    return run


def compared(run: Path) -> tuple[dict[str, Any], list[str]]:
    """Compare the run's outcomes with the simulator's, once; returns the figures, and the episodes that differ."""
    file = run / "compared.json"  # a correction may discard episodes
    if file.exists():
        figures, differ = json.loads(file.read_text())
        return figures, differ
    source = RunSource(run, ReadOptions())
    ended = [(key, source.about(key)) for key in source.keys()]
    ended = [(key, entry) for key, entry in ended if entry.ended]
    pairs = [(k, *(x is Outcome.SUCCESS for x in (e.end.outcome, e.end.environment))) for k, e in ended]
    agree = np.array([ours == theirs for _, ours, theirs in pairs])
    truth = np.array([theirs for *_, theirs in pairs])
    human = [sum(e.human_steps for _, e in part) / sum(e.length for _, e in part) for part in (ended, ended[-LAST:])]
    figures = {
        "episodes": len(pairs), "agree": float(agree.mean()), "agree_of_last": int(agree[-LAST:].sum()),
        "last": min(LAST, len(pairs)),
        "false_successes": sum(ours and not theirs for _, ours, theirs in pairs),
        "missed": sum(theirs and not ours for _, ours, theirs in pairs),
        "steps": sum(e.length for _, e in ended), "human_share": human[0], "human_share_of_last": human[1],
        "success_of_the_simulator": [float(part.mean()) for part in np.array_split(truth, max(1, len(truth) // 50))],
    }  # fmt: skip
    differ = [key for key, ours, theirs in pairs if ours != theirs]
    file.write_text(json.dumps([figures, differ]))
    return figures, differ


def correct(run: Path, keys: list[str]) -> None:
    """Correct episodes as an operator does; episodes that were corrected before stay as they are.

    A missed success is discarded: by its end, whose frames are there, the hand may have taken the cube again.
    """
    source, amender = RunSource(run, ReadOptions()), RunAmender(run)
    there = set(source.keys())  # those that were discarded before are not
    for key in there.intersection(keys):
        entry = source.about(key)
        if not entry.amends:
            label = DISCARD if entry.end.environment is Outcome.SUCCESS else FAILURE
            session = key.rpartition("/")[0]
            amender.amend(session, entry.actor_id, correction(label, entry.end, entry.last_reward))
    amender.close()


def sheet(found: list[tuple[Path, str]]) -> bytes:
    """Draw the last frames of episodes that were judged differently: one row each."""
    rows = found[:SHOWN]
    with new_figure(5.6, 0.4 + 1.75 * max(1, len(rows))) as figure:
        axes = figure.subplots(max(1, len(rows)), len(CAMERAS), squeeze=False)
        for ax in axes.flat:
            ax.axis("off")
        if not rows:
            axes[0][1].text(0.5, 0.5, "no disagreement", ha="center")
        for row, (run, key) in zip(axes, rows, strict=False):
            source = RunSource(run, ReadOptions())
            source.keys()
            episode, entry = source.read(key), source.about(key)
            final = episode.end.final_observation or {}
            who = "false success" if entry.end.outcome is Outcome.SUCCESS else "missed"
            row[0].set_title(f"{run.name} {key.rpartition('/')[2]}: {who}", fontsize=8, loc="left")
            for ax, camera in zip(row, CAMERAS, strict=True):
                if IMAGE_PREFIX + camera in final:
                    ax.imshow(np.asarray(final[IMAGE_PREFIX + camera]))
        return to_png(figure)


def main() -> None:
    p = make_parser(__doc__)
    p.add_argument("--out", type=Path, default=Path("runs/benchmark_classifier_only"))
    p.add_argument(
        "--drawn", type=int, default=240, help="episodes to train the classifier on, and as many of practice"
    )
    p.add_argument("--classifier_steps", type=int, default=3000)
    p.add_argument("--demos", type=int, default=30)
    p.add_argument("--rounds", type=int, default=2)
    p.add_argument("--wanted", type=float, default=0.98, help="share of a run's episodes that ends the rounds")
    p.add_argument("--episodes", type=int, default=100, help="of the evaluation")
    p.add_argument("--seed", type=int, default=42)
    p.add_argument("--png", type=Path)
    add_settings(p, "of the training")
    args = p.parse_args()
    texts = [*PLAN, *(f"{path}={value}" for path, value in settings(p, args.set))]
    args.out.mkdir(parents=True, exist_ok=True)
    keep_plan(args.out / "plan.json", [texts, args.drawn, args.classifier_steps, args.demos, args.seed], args.out)
    rounds: list[dict[str, Any]] = []
    runs: list[Path] = []
    pictures: list[tuple[Path, str]] = []
    for number in range(args.rounds):
        began, folder = time.monotonic(), args.out / f"classifier_{number}"
        figures = {"classifier": make_classifier(folder, args.drawn, args.classifier_steps, runs)}
        runs.append(trained_run(args.out, number, folder, args.demos, args.seed, texts))
        found, differ = compared(runs[-1])
        rounds.append(figures | found | {"seconds_of_this_process": round(time.monotonic() - began)})
        pictures = [(runs[-1], key) for key in differ]
        print(json.dumps(rounds[-1], indent=1), flush=True)
        if found["agree"] >= args.wanted and found["agree_of_last"] >= args.wanted * found["last"]:
            break
        if number + 1 < args.rounds:
            correct(runs[-1], differ)
    config = apply_overrides(load_experiment("fake_aloha_images"), map(split_setting, texts))
    trained = Trained(config, runs[-1])  # the simulator judges
    point = trained.evaluate(trained.steps[-1], args.episodes)
    low, high = wilson_interval(point.successes, point.episodes)
    policy = {"step": point.updates, "env_steps": point.env_steps, "human_ticks": point.human_ticks}
    policy |= {"success_rate": point.rate, "low": low, "high": high}
    result = {"plan": texts, "rounds": rounds, "policy": policy}
    write_figures(args, result)
    if args.png:
        args.png.write_bytes(sheet(pictures))


if __name__ == "__main__":
    main()
