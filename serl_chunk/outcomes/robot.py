"""The robot of an experiment; with `outcome.observed` its state has the classes that the classifier sees."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.fields import require
from serl_chunk.outcomes.classifier import CLASS_PROBABILITY, Classifier
from serl_chunk.robots.base import RobotEnv, StepResult
from serl_chunk.robots.registry import robot_spec
from serl_chunk.types import IMAGE_PREFIX, STATE, ConfigError, Observation, RobotSpec


def spec_of(config: ExperimentConfig) -> RobotSpec:
    """Return the specification of the experiment's robot without opening it; needs no classifier."""
    return _with_classes(robot_spec(config.robot), config)


def observing(env: RobotEnv, config: ExperimentConfig) -> RobotEnv:
    """Return the robot with `outcome.observed` in its state; `env` itself where that is empty or done.

    Raises ConfigError, after it closed `env`, where the classifier cannot be read, lacks one of these classes, or is
    one of other cameras.
    """
    observed = config.outcome.observed
    if not observed or isinstance(env, ObservedClasses):
        return env
    try:
        missing = f"are classes of outcome.classifier, which is empty (got {', '.join(observed)}). Give its folder"
        require(bool(config.outcome.classifier), "outcome.observed", missing)
        classifier = Classifier(config.outcome.classifier)
        classifier.check(env.robot_spec)
        numbers = classifier.numbers(observed, "outcome.observed")
    except ConfigError:
        env.close()
        raise
    return ObservedClasses(env, classifier, numbers, _with_classes(env.robot_spec, config))


def _with_classes(spec: RobotSpec, config: ExperimentConfig) -> RobotSpec:
    return dataclasses.replace(spec, state_dim=spec.state_dim + len(config.outcome.observed))


def _of_robot(name: str) -> Any:
    """An attribute of the robot inside."""
    return property(lambda self: getattr(self.env, name), lambda self, value: setattr(self.env, name, value))


class ObservedClasses(RobotEnv):
    """A robot to whose state K classes of a classifier are appended: 1 for the likeliest class, 0 for the others.

    `info["class_probability"]` is float64[N], of all classes of the classifier.
    """

    frames_with_observation = _of_robot("frames_with_observation")
    starts_repeat = _of_robot("starts_repeat")
    init_states = _of_robot("init_states")
    tasks = _of_robot("tasks")
    task = _of_robot("task")
    goes_on = _of_robot("goes_on")
    answers_late = _of_robot("answers_late")
    paced = _of_robot("paced")
    conditions = _of_robot("conditions")
    stop = _of_robot("stop")

    def __init__(self, env: RobotEnv, classifier: Classifier, classes: Sequence[int], spec: RobotSpec) -> None:
        self.env, self._classifier, self._classes = env, classifier, list(classes)
        self._set_spaces(spec, env.images)

    def __getattr__(self, name: str) -> Any:
        if name == "env":  # not set yet
            raise AttributeError(name)
        return getattr(self.env, name)

    def states_of(self, task: str) -> Sequence[str]:
        return self.env.states_of(task)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, dict]:
        raw, info = self.env.reset(seed=seed, options=options)
        return self._seen(raw)[0], info

    def step(self, action: np.ndarray) -> StepResult:
        raw, reward, terminated, truncated, info = self.env.step(action)
        return self._result_of((raw, float(reward), terminated, truncated, info))

    def send(self, command: np.ndarray) -> None:
        self.env.send(command)

    def receive(self) -> StepResult:
        return self._result_of(self.env.receive())

    def read_images(self, cameras: Sequence[str] | None = None) -> Observation:
        return self.env.read_images(cameras)

    def restart_limit(self) -> None:
        self.env.restart_limit()

    def watch(self, cameras: Sequence[str]) -> None:
        self.env.watch(tuple(dict.fromkeys((*cameras, *self._classifier.cameras))))

    def frame_numbers(self) -> Mapping[str, int]:
        return self.env.frame_numbers()

    def close(self) -> None:
        self.env.close()

    def _result_of(self, result: StepResult) -> StepResult:
        raw, reward, terminated, truncated, info = result
        observation, probability = self._seen(raw)
        return observation, reward, terminated, truncated, {**info, CLASS_PROBABILITY: probability}

    def _seen(self, raw: Observation) -> tuple[Observation, np.ndarray]:
        cameras = self._classifier.cameras
        there = all(IMAGE_PREFIX + c in raw for c in cameras)
        probability = self._classifier.probability(raw if there else self.env.read_images(cameras))
        likeliest = np.arange(len(probability)) == np.argmax(probability)
        return {**raw, STATE: np.concatenate([raw[STATE], likeliest[self._classes]]).astype(np.float32)}, probability
