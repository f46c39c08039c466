"""A success classifier on pictures of `fake_aloha` in other light, from moved cameras, and of near misses.

    python benchmarks/classifier_fake_aloha.py [--episodes 320] [--tests 200] [--steps 3000] [--json FILE] [--png FILE]

Half of the episodes succeed: the cube is released on its target, up to 3 cm from the middle, and the arm leaves. The
others are near misses, in turn: `next_to` (released 7.5 to 13 cm from the middle, the arm leaves), `held` (kept in the
fingers up to 8 cm above the target), `occluded` (released 7.5 to 13 cm away, and the open hand comes back over the
target and hides it from above), `empty` (the hand opens over the target while the cube lies elsewhere).

Light, colour, noise and the place of each camera differ in every episode. The classifier trains on one set of episodes,
a fifth of which is held out for the early stop and the threshold, and the figures are of a second set with other seeds.
Truth is the simulator's: the cube lies within the task's tolerance of its place, and no arm holds it.
"""

from __future__ import annotations

import dataclasses
import json
import math
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
from support.cli_args import make_parser, write_figures

from serl_chunk.classifier.dataset import CLASSES, Labelled, LabelledEpisode, split
from serl_chunk.classifier.files import save
from serl_chunk.classifier.metrics import Evaluation
from serl_chunk.classifier.report import roc_png, summary_lines, table_lines
from serl_chunk.classifier.train import TrainingOptions, judge, train
from serl_chunk.config.loader import load_experiment
from serl_chunk.config.robots import FakeAlohaConfig
from serl_chunk.outcomes.classifier import Classifier
from serl_chunk.robots.fake import spec as task
from serl_chunk.robots.fake.env import NO_ARM, FakeAlohaEnv
from serl_chunk.robots.fake.expert import READY, ScriptedExpert
from serl_chunk.robots.fake.kinematics import LEFT, Point, inverse

MISSES = ("next_to", "held", "occluded", "empty")
AFTER = 24  # ticks recorded after the release
EVERY = 2  # ticks of a recorded frame
ROBOT = load_experiment("fake_aloha_images").robot


class Placer(ScriptedExpert):
    """Brings the cube to `goal` with the left hand, and releases it there or not."""

    def __init__(self, env: FakeAlohaEnv, goal: Point, release: bool) -> None:
        self.goal, self.release = goal, release
        super().__init__(env)

    @property
    def there(self) -> bool:
        return math.dist(self._env.cube, self.goal) < 0.015

    def _place_cube(self) -> tuple[Point, float]:
        target, _ = super()._place_cube()
        if target != self._env.grips[LEFT]:  # not waiting for the right fingers
            target = self._carry(LEFT, self.goal)
        return target, 1.0 if self.there and self.release else 0.0


def towards(env: FakeAlohaEnv, place: Point, opening: float) -> np.ndarray:
    """The command that moves the left hand to `place`, metres, and keeps the right one where it is."""
    return np.array([*inverse(LEFT, place), opening, *env.joints[task.ARM_DIM :]], np.float32)


def goal_of(kind: str, rng: np.random.Generator) -> Point:
    """Where the cube is brought in an episode of this kind, metres."""
    x, y, z = task.PLACE
    if kind == "held":
        return x + rng.uniform(-0.02, 0.02), y + rng.uniform(-0.02, 0.02), z + rng.uniform(0.0, 0.08)
    away = rng.uniform(0.0, 0.03) if kind == "success" else rng.uniform(0.075, 0.13)
    angle = rng.uniform(0, 2 * math.pi)
    return x + away * math.cos(angle), y + away * math.sin(angle), z


def succeeded(env: FakeAlohaEnv) -> bool:
    """Return whether the cube lies in its place, which is the truth."""
    return env.holder == NO_ARM and math.dist(env.cube, task.PLACE) <= task.PLACE_DISTANCE


def always(env: FakeAlohaEnv) -> bool:
    return True


def record(kind: str, seed: int, looked: Callable[[FakeAlohaEnv], bool] = always) -> LabelledEpisode | None:
    """An episode as it is drawn, the frames that are `looked` at; None where the scripted hand did not get there."""
    assert isinstance(ROBOT, FakeAlohaConfig)
    rng = np.random.default_rng(seed)
    env = FakeAlohaEnv(dataclasses.replace(ROBOT, max_episode_steps=1000))
    env.reset(seed=seed)
    placer = Placer(env, goal_of(kind, rng), release=kind != "held")
    placer.reset(seed)
    frames: dict[str, list[np.ndarray]] = {c: [] for c in task.CAMERAS}
    labels: list[int] = []
    ticks: list[int] = []
    hover = (task.PLACE[0], task.PLACE[1], rng.uniform(0.03, 0.07))
    left, held = 0, False
    for tick in range(300):
        if tick % EVERY == 0 and looked(env):
            images = env.read_images(task.CAMERAS)
            for camera, shown in frames.items():
                shown.append(images[f"images/{camera}"])
            labels.append(int(succeeded(env)))
            ticks.append(tick)
        if kind == "empty":
            done = tick > 25
            command = towards(env, hover, 1.0)
        else:
            held = held or env.holder == LEFT
            done = held and (placer.there if kind == "held" else env.holder == NO_ARM)
            away = hover if kind == "occluded" and left > 8 else READY[LEFT]
            command = towards(env, away, 1.0) if done and kind != "held" else placer.act()
        if done:
            left += 1
            if left > AFTER:
                break
        env.step(command)
    else:
        return None
    if bool(labels[-1]) != (kind == "success"):
        return None
    images = {c: np.stack(v) for c, v in frames.items()}
    return LabelledEpisode(f"{kind} {seed}", images, np.array(labels, np.int8), np.array(ticks, np.int32))


def seen_by_another_camera(images: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The frames uint8[N, H, W, 3] of an episode, shifted, turned and scaled alike, in another light, with noise."""
    size = images.shape[1]
    angle, scale = rng.uniform(-0.06, 0.06), rng.uniform(0.94, 1.06)
    middle = (size - 1) / 2
    v, u = np.mgrid[:size, :size] - middle
    x = scale * (math.cos(angle) * u - math.sin(angle) * v) + middle + rng.uniform(-2.5, 2.5)
    y = scale * (math.sin(angle) * u + math.cos(angle) * v) + middle + rng.uniform(-2.5, 2.5)
    x, y = np.clip(x, 0, size - 1.001), np.clip(y, 0, size - 1.001)
    x0, y0 = x.astype(int), y.astype(int)
    dx, dy = (x - x0)[None, ..., None], (y - y0)[None, ..., None]
    f = images.astype(np.float32)
    moved = (1 - dy) * ((1 - dx) * f[:, y0, x0] + dx * f[:, y0, x0 + 1])
    moved += dy * ((1 - dx) * f[:, y0 + 1, x0] + dx * f[:, y0 + 1, x0 + 1])
    lit = moved * rng.uniform(0.6, 1.35) * rng.uniform(0.88, 1.12, 3) + rng.uniform(-12, 12)
    return np.clip(lit + rng.normal(0, 3, moved.shape), 0, 255).astype(np.uint8)


def episodes(count: int, first: int, looked: Callable[[FakeAlohaEnv], bool] = always) -> Labelled:
    """Successes and near misses in turn, from the seeds `first` on."""
    out, seed = [], first
    while len(out) < count:
        n = len(out)
        kind = "success" if n % 2 == 0 else MISSES[n // 2 % len(MISSES)]
        episode = record(kind, seed, looked)
        if episode is not None:
            rng = np.random.default_rng([seed, 1])
            images = {c: seen_by_another_camera(v, rng) for c, v in episode.images.items()}
            out.append(episode._replace(images=images))
        seed += 1
    return Labelled(out, CLASSES, [])


def by_kind(found: Evaluation) -> dict[str, dict[str, float]]:
    """For each kind of episode: how many, how many are misjudged, and the middle of their scores."""
    out = {}
    counts = Counter(s.name.split()[0] for s in found.episodes)
    for kind, count in counts.items():
        of = [s for s in found.episodes if s.name.split()[0] == kind]
        wrong = sum(bool(s.fault(found.threshold)) for s in of)
        out[kind] = {"episodes": count, "misjudged": wrong, "median_score": float(np.median([s.score for s in of]))}
    return out


def milliseconds(classifier: Classifier, episode: LabelledEpisode, looks: int = 200) -> dict[str, float]:
    """Wall time of one look in the control loop."""
    took = []
    for i in range(looks):
        at = i % len(episode.labels)
        observation = {f"images/{c}": v[at] for c, v in episode.images.items()}
        begin = time.perf_counter()
        classifier.probability(observation)
        took.append(1e3 * (time.perf_counter() - begin))
    return {"p50": float(np.percentile(took, 50)), "p99": float(np.percentile(took, 99))}


def main() -> None:
    p = make_parser(__doc__)
    p.add_argument("--episodes", type=int, default=320, help="to train on")
    p.add_argument("--tests", type=int, default=200, help="of the figures")
    p.add_argument("--steps", type=int, default=3000)
    p.add_argument("--frames", type=int, default=3, help="in a row")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--png", type=Path)
    args = p.parse_args()
    begin = time.monotonic()
    data, tests = episodes(args.episodes, 10_000), episodes(args.tests, 900_000)
    print(f"{len(data.episodes)} and {len(tests.episodes)} episodes drawn in {time.monotonic() - begin:.0f} s")
    training, held = split(data, 0.2, args.seed)
    begin = time.monotonic()
    trained = train(
        training, held, task.CAMERAS, options=TrainingOptions(steps=args.steps, seed=args.seed),
        progress=lambda step, steps, note: print(f"{step}/{steps} {note}", flush=True),
    )  # fmt: skip
    seconds = time.monotonic() - begin
    description = dataclasses.replace(trained.description, frames=args.frames)
    validated = judge(description, trained.weights, held)
    found = judge(description, trained.weights, tests, threshold=validated.threshold)
    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder), dataclasses.replace(description, threshold=validated.threshold), trained.weights)
        look = milliseconds(Classifier(folder), tests.episodes[0])
    print("\n".join([*summary_lines(found), *table_lines(found)]))
    figures = {
        "episodes": args.episodes, "tests": args.tests, "seed": args.seed, "updates": trained.steps,
        "best_update": trained.step, "training_seconds": round(seconds, 1), "look_milliseconds": look,
        "held_out": validated.to_json(), "test": found.to_json(), "kinds": by_kind(found),
    }  # fmt: skip
    print(json.dumps(figures, indent=1))
    write_figures(args, figures)
    if args.png:
        args.png.write_bytes(roc_png(found))


if __name__ == "__main__":
    main()
