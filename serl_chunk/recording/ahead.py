"""Episodes of many simulated robots, each in a thread, so that they wait for a policy server at the same time."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from serl_chunk.actor.episode import EpisodeRunner
from serl_chunk.actor.many import Records, put_all
from serl_chunk.actor.policy import Policy
from serl_chunk.actor.stats import EpisodeSummary
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.robots.base import RobotEnv, check_apart
from serl_chunk.types import Begin, End, RecordSink, Step

AHEAD = 2  # episodes begun, or ended and not returned, for each robot: a long one lets the others go on


class _Kept:
    """A RecordSink that keeps the records of one robot's last episode."""

    def __init__(self) -> None:
        self.records: Records = []

    def begin(self, record: Begin) -> None:
        self.records = [record]

    def step(self, record: Step) -> None:
        self.records.append(record)

    def end(self, record: End) -> None:
        self.records.append(record)


class _Robot(NamedTuple):
    runner: EpisodeRunner
    kept: _Kept


class EpisodesAhead:
    """Runs the episodes of consecutive start states on several robots at once, and returns them in their order.

    What is recorded is what one robot would record of these starts one after the other, its time stamps excepted, where
    the policy decides by the observation alone; a server's batches change its last bits. Episodes that no caller takes
    any more are dropped.

    Args:
        robots: each with a policy of its own.
        sink: gets the records of each episode that is returned.
        name: returns the id of the episode of a start state.
        stop: polled on every tick by the robots' threads; a string ends the episodes.
    """

    def __init__(
        self, robots: Sequence[tuple[RobotEnv, Policy]], sink: RecordSink,
        *, config: ExperimentConfig, cameras: tuple[str, ...], name: Callable[[int], str],
        stop: Callable[[], str | None],
    ) -> None:  # fmt: skip
        check_apart([env for env, _ in robots])
        self._sink, self._name, self._closed = sink, name, threading.Event()
        ended = lambda: "closed" if self._closed.is_set() else stop()  # noqa: E731
        self._robots = [
            _Robot(EpisodeRunner(env, policy, kept, config=config, cameras=cameras, stop=ended), kept)
            for env, policy, kept in ((*robot, _Kept()) for robot in robots)
        ]
        # A simulator's frames come from one thread alone: each robot keeps its own.
        self._free: queue.SimpleQueue[_Robot] = queue.SimpleQueue()
        for robot in self._robots:
            self._free.put(robot)
        self._own = threading.local()
        take = lambda: setattr(self._own, "robot", self._free.get())  # noqa: E731
        self._threads = ThreadPoolExecutor(len(robots), "robot", initializer=take)
        self._ahead: dict[int, Future[tuple[EpisodeSummary, Records]]] = {}  # by start state

    def run_episode(self, seed: int) -> EpisodeSummary:
        """Pass the records of start state `seed` to the sink, and return its episode; raises what that raised."""
        for following in range(seed, seed + AHEAD * len(self._robots)):
            if following not in self._ahead:
                self._ahead[following] = self._threads.submit(self._run, following)
        summary, records = self._ahead.pop(seed).result()
        put_all(self._sink, records)
        return summary

    def close(self) -> None:
        """End the episodes under way, and wait for them."""
        self._closed.set()
        self._threads.shutdown(cancel_futures=True)
        for robot in self._robots:
            robot.runner.close()

    def _run(self, seed: int) -> tuple[EpisodeSummary, Records]:
        robot: _Robot = self._own.robot
        robot.kept.records = []  # an episode that never begins leaves none
        summary = robot.runner.run_episode(seed, episode_id=self._name(seed))
        return summary, robot.kept.records
