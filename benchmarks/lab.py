"""A rehearsal of a day in a lab, without hardware: each command that an operator gives, in the order of the first day.

    python benchmarks/lab.py            (make lab)

A robot's server moves simulated ALOHA arms: through ROS 1 where Python can import rospy (or SERL_CHUNK_ROS1 names a
folder of Debian's packages), with a master and a node of its own, else through the driver `fake`, which has the same
joints. With `--driver lerobot` it moves an SO-101 of simulated motors behind a stand-in of LeRobot. The operator is
simulated: two SpaceMice below pyspacemouse, or a hand on the SO-101's leader, the keys of a terminal, and the robot's
joints as seen 0.2 s late. The tasks are in `support/lab_experiment.py`, the robots in `support/lab_robots.py`, and the
camera draws the arms.

One line is printed for each stage. A failed stage ends the rehearsal with exit status 1 and names the log to read. The
folder of `--out` is replaced; `report.html` there has the stages, pictures and the link to the run's own report.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from support.lab_cell import Lab
from support.lab_experiment import CAMERA
from support.lab_operator import HELP, MEET, MISS, WATCH, kept
from support.lab_report import PAGES, Stage, write_report
from support.lab_robots import FAKE, ROBOTS, ROS, ros1

from serl_chunk.replay.episode import human_segments
from serl_chunk.runs.episodes import RunSource
from serl_chunk.types import STATE, Episode, Outcome
from serl_chunk_robot.client.client import RobotClient

DEMOS, MISSES, TRIALS = 10, 6, 20
WORKS = 0.8  # share of the trials in which a policy that works succeeds
TRIES = 3  # of what a machine that stood still spoils
MARK = ".lab"  # file in a folder that this script may replace


class StageError(Exception):
    """A stage did not show what it has to."""


class Rehearsal:
    """Runs the stages, and keeps what each showed."""

    def __init__(self, out: Path, driver: str) -> None:
        self.out, self.driver, self.stages = out, driver, list[Stage]()
        self._read: dict[str, Episode] = {}  # of the journal
        self.lab = Lab(out, ROBOTS[driver])

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[list[str]]:
        """Time a stage and print its line; yields a list for what it showed."""
        began, shown = time.monotonic(), list[str]()
        try:
            yield shown
        except BaseException as error:
            why = (str(error).strip() or type(error).__name__).split("\n")[0]
            self.stages.append(Stage(name, f"FAILED: {why}", time.monotonic() - began))
            print(f"{name}: FAILED after {self.stages[-1].seconds:.0f} s: {why}. Read {self.lab.log}", flush=True)
            raise
        self.stages.append(Stage(name, ", ".join(shown), time.monotonic() - began))
        print(f"{name}: {self.stages[-1].shown}, {self.stages[-1].seconds:.0f} s", flush=True)

    def run(self) -> None:
        self.prepare()
        self.demonstrate()
        self.train()
        self.conclude()

    def prepare(self) -> None:
        lab = self.lab
        with lab.clearing():
            with self.stage("robot server") as shown:
                lab.serve()
                shown.append(f"driver {self.driver}, cleared by an operator")
            with self.stage("robot check") as shown:
                shown.append(self._check())

    def demonstrate(self) -> None:
        lab = self.lab
        with self.stage(f"{DEMOS} demonstrations") as shown:
            shown.append(self._record("demos", DEMOS, lambda: MEET))
        with self.stage(f"{MISSES} near misses") as shown:
            misses = self.out / "misses"
            shown.append(self._record("misses", 1, lambda: MISS if kept(misses) < MISSES else MEET, "--keep", "all"))
        with self.stage("classifier") as shown:
            lab.run_here(
                "classifier", "train", "demos", "misses", "--cameras", CAMERA, "--positives", "25", "--ignored", "25",
                "--frames", "3", "--steps", "500", "--out", "classifier",
            )  # fmt: skip
            held = json.loads((self.out / "classifier/classifier.json").read_text())["validation"]
            count = held["successes"] + held["failures"]
            shown.append(f"area under ROC {held['auc_by_frame']:.3f} by frame of {count} held-out episodes")
            lab.judge_by(self.out / "classifier")

    def conclude(self) -> None:
        lab = self.lab
        with self.stage(f"evaluation of {TRIALS} trials") as shown:
            words = ["--actor", "--eval_checkpoint_step", "latest", "--eval_n_trajs", str(TRIALS)]
            words += ["--checkpoint_path", "run", "--save_video"]
            with lab.operated(lambda: WATCH, *lab.at_learner, *words) as (terminal, operator):
                output = lab.ends(terminal)
            found = re.findall(r"evaluation: success_rate=([01]\.\d+) n=(\d+)", output)
            need([int(n) for _, n in found] == [TRIALS], f"{len(found)} evaluations were reported")
            rate, failures = float(found[0][0]), operator.keys.count("f")
            need(rate >= WORKS, f"{rate:.0%} of {TRIALS} succeeded, {WORKS:.0%} are asked for")
            shown.append(f"{rate:.0%} succeeded, the operator's key decided {failures}")
        with self.stage("pages of episodes") as shown:
            for folder in PAGES:
                lab.run_here("view", folder, "--out", f"{folder}.html", "--size_mb", "20")
            shown.append(", ".join(PAGES.values()))
        with self.stage("export to LeRobot") as shown:
            lab.run_here("data", "export", "run", "--format", "lerobot", "--out", "lerobot")
            info = json.loads((self.out / "lerobot/meta/info.json").read_text())
            need(info["total_episodes"] >= lab.episodes(), "episodes are missing")
            shown.append(f"{info['total_episodes']} episodes, {info['total_frames']} frames")

    def _check(self) -> str:
        """Check the robot; a machine that stood still meanwhile fails a check, and it is tried again."""
        for left in reversed(range(TRIES)):
            with contextlib.suppress(AssertionError) if left else contextlib.nullcontext():
                found = self.lab.robot("check", self.lab.file.name, "--robot", self.lab.address)
                return f"{found.count('ok  ')} findings ok" + f" at attempt {TRIES - left}" * (left < TRIES - 1)
        raise AssertionError

    def _record(self, folder: str, n: int, choose: Callable[[], str], *more: str) -> str:
        lab = self.lab
        words = ["record", *lab.flags, "--policy", "human", "--n_demos", str(n), "--out", folder, "--cameras", CAMERA]
        words += more
        with lab.operated(choose, *words) as (terminal, _):
            output = lab.ends(terminal)
        [found] = re.findall(r"\d+ demonstrations? recorded in \d+ episodes?, \d+ ticks on average", output)
        return f"{found}, {kept(self.out / folder)} files"

    def train(self) -> None:
        """Train with an operator who intervenes, stops the robot and clears it; the actor is killed on the way."""
        lab = self.lab
        learner, plan = lab.learner(), [WATCH]
        actor = [*lab.at_learner, "--actor", "--spool_path", "spool"]
        with lab.operated(lambda: plan[0], *actor) as (terminal, operator):
            with self.stage("learner and actor") as shown:
                lab.goes_on()
                shown.append(f"{lab.episodes()} episodes")
            with self.stage("intervention") as shown:
                plan[0] = HELP
                for left in reversed(range(TRIES)):
                    before = set(self._segments())
                    segments = self._new_segments(before)
                    if len(segments) == 1:
                        break
                    need(bool(left), f"the intervention is {len(segments)} segments")
                plan[0] = WATCH
                begin, end = segments[0]
                shown.append(f"one segment, ticks {begin} to {end - 1} of its episode")
            with self.stage("stop and clear") as shown:
                lab.wait(lambda: operator.state == "RUN", "no episode runs")
                stopped = self._stopped()
                operator.answers = False
                operator.press("x")
                lab.wait(lambda: operator.state == "STOPPED", "the robot is not stopped")
                pose = operator.seen
                time.sleep(2.0)
                need(operator.state == "STOPPED" and np.abs(operator.seen - pose).max() < 0.05, "the robot moved on")
                operator.answers = True
                lab.wait(lambda: operator.state == "RUN", "the robot does not go on")
                lab.wait(lambda: self._stopped() > stopped, "no episode that the operator stopped is in the journal")
                shown.append("x stopped the robot, c and Enter cleared it, Enter let it go on")
            with self.stage("kill -9 of the actor") as shown:
                lab.wait(lambda: operator.state == "RUN", "no episode runs")
                terminal.kill()
                with RobotClient(lab.address, name="watcher") as watcher:
                    lab.wait(lambda: watcher.next_state(5)["state"] != "RUN", "the robot is not held")
                    lab.wait(lambda: not watcher.next_state(5)["controller"], "the lease does not end")
                operator.close()
                operator.error = None  # its devices may be gone
                shown.append("in an episode, after which the robot held and the lease ended")
        with lab.operated(lambda: WATCH, *actor) as (terminal, _):
            with self.stage("resumed") as shown:
                before = lab.episodes()
                lab.goes_on()
                shown.append(f"{lab.episodes() - before} more episodes")
            with self.stage("to the end of training") as shown:
                lab.ends(learner)
                lab.ends(terminal)
                shown.append(f"{lab.episodes()} episodes, {self._agreement()}")

    def _episodes(self) -> list[tuple[str, Episode]]:
        if not (self.lab.run / "journal").exists():
            return []
        source = RunSource(self.lab.run)
        for key in source.keys():
            if key not in self._read:
                self._read[key] = source.read(key)
        return list(self._read.items())

    def _segments(self) -> dict[str, np.ndarray]:
        """Return segments of human ticks of the episodes that have any."""
        found = {key: human_segments(e.steps.source, e.steps.decision_tick) for key, e in self._episodes()}
        return {key: segments for key, segments in found.items() if len(segments)}

    def _new_segments(self, before: set[str]) -> np.ndarray:
        """Wait for an episode with human ticks that is none of `before`; returns its segments."""
        self.lab.wait(lambda: set(self._segments()) > before, "no human ticks come to the journal")
        return next(segments for key, segments in self._segments().items() if key not in before)

    def _stopped(self) -> int:
        return sum(e.end.outcome_by == "operator" for _, e in self._episodes())

    def _agreement(self) -> str:
        """Compare the classifier with the joints at the ends of the run's episodes."""
        ends = [e.end for _, e in self._episodes() if e.end.final_observation is not None]
        same = sum(
            (end.outcome is Outcome.SUCCESS) == self.lab.kind.task.meets(end.final_observation[STATE])
            for end in ends
            if end.final_observation is not None
        )
        return f"the classifier agrees with the joints on {same} of {len(ends)}"

    def close(self) -> None:
        self.lab.close()


def driver_here() -> str:
    return FAKE if ros1.missing() else ROS


def emptied(out: Path) -> Path:
    """Make `out` a new folder; replaces the one of an earlier rehearsal, and no other."""
    if out.exists() and any(out.iterdir()) and not (out / MARK).exists():
        raise SystemExit(f"{out}: holds something else than a rehearsal. Name another folder with --out")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    (out / MARK).touch()
    return out.resolve()


def need(holds: bool, otherwise: str) -> None:
    if not holds:
        raise StageError(otherwise)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", type=Path, default=Path("runs/lab"), help="folder of all files; an earlier one is replaced")
    p.add_argument("--driver", choices=("auto", *ROBOTS), default="auto", help="auto: ROS where there is one")
    args = p.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    began, driver = time.monotonic(), driver_here() if args.driver == "auto" else args.driver
    rehearsal, status = Rehearsal(emptied(args.out), driver), 0
    try:
        rehearsal.run()
    except KeyboardInterrupt:
        status = 130
    except Exception as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        status = 1
    finally:
        rehearsal.close()
    seconds = time.monotonic() - began
    report = write_report(rehearsal.out, driver, rehearsal.stages, seconds)
    found = "FAILED" if status else "all stages passed"
    print(f"lab: {found} in {seconds / 60:.1f} minutes, driver {driver}, {report}")
    raise SystemExit(status)


if __name__ == "__main__":
    main()
