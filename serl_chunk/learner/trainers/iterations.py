"""Training in iterations: collect groups of episodes under one policy, train on them, publish what came of it."""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import jax
import numpy as np

from serl_chunk.agents.groups.agent import GroupAgent
from serl_chunk.agents.groups.rows import Episodes, GroupRows, minibatches, uncredited
from serl_chunk.agents.state import Metrics
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.fields import as_text, leaves, require
from serl_chunk.data.preprocess import Preprocess
from serl_chunk.io import Waiting, format_bytes, plural
from serl_chunk.learner.groups.collector import Collected, Collector
from serl_chunk.learner.groups.scheduler import GroupScheduler
from serl_chunk.learner.groups.starts import Memory, make_starts
from serl_chunk.learner.offline_data import InitialData
from serl_chunk.learner.profiling import free_device_bytes
from serl_chunk.learner.schedule import Phase
from serl_chunk.learner.trainers.pretraining import PretrainingTrainer
from serl_chunk.replay.memory import available_bytes
from serl_chunk.runs.status_line import StatusFields

if TYPE_CHECKING:
    from serl_chunk.learner.learner import Learner

logger = logging.getLogger(__name__)

LOG_SECONDS = 5.0  # between lines of iterations, at least
GAP = 0.05  # difference of log-probabilities, actor and learner, that is warned of: 5 % of a ratio


class Saved(NamedTuple):
    """What a checkpoint keeps of the iterations."""

    sampler_rng: Mapping[str, Any]
    phase: str
    phase_updates: int
    since: int  # version with which the policy was first published
    memory: Mapping[str, Any]
    starts: str  # digest of the set of starts
    acting: str = ""  # digest of all that makes an episode of a ticket what it is


class IterationTrainer(PretrainingTrainer):
    """Imitates, then repeats: episodes of groups under one policy, gradient steps on them, a snapshot, a checkpoint.

    The learner's `updates` count iterations: those of checkpoints and evaluations are theirs. At the hand-over from
    imitation the policy becomes its average, with a fresh optimiser: what is published is what is trained.
    """

    _agent: GroupAgent

    def __init__(self, learner: Learner, data: InitialData, *, threaded: bool, step: int | None) -> None:
        super().__init__(learner, data, threaded=threaded, step=step)
        config = learner.config
        _check_memory(config, learner.preprocess)
        self._group, tasks = config.group, tasks_of_groups(config, data.tasks)
        begins = [demo.begin for demo in data.demos]
        self._starts = make_starts(config.group, tasks, config.seed, demos=begins, saved=data.tasks)
        scheduler = GroupScheduler(
            config.group, self._starts, tasks, config.seed,
            usable=lambda group: self._agent.learns_from([result.reward for result in group.results]),
        )  # fmt: skip
        self.collector = learner.router.groups = Collector(
            scheduler, learner.preprocess, config.chunk.horizon, keeps_successes=config.agent.clones_successes
        )
        self.phases = [*([Phase.PRETRAIN] if self._config.pretrain_steps else []), Phase.COLLECT, Phase.TRAIN]
        self._since = 0
        self._unpublished = False  # the policy of the next iteration
        self._updates: Iterator[Metrics] | None = None  # gradient steps that are left of the iteration
        self._metrics: list[Metrics] = []  # of those that are done
        self._figures: dict[str, float] = {}  # of the iteration
        self._over = ""  # why the run ends with it
        self._clock = 0.0  # when the stage began, s
        self._lines = Waiting(logger, LOG_SECONDS)

    @property
    def policy_trained(self) -> bool:
        return self.phase is not Phase.PRETRAIN

    @property
    def counts_steps(self) -> bool:
        return self.phase is not Phase.PRETRAIN

    @property
    def resumable(self) -> bool:
        return self.phase is not Phase.TRAIN and not self._unpublished

    def status(self) -> StatusFields:
        if self.phase is Phase.PRETRAIN:
            fields: StatusFields = {"done": self.phase_updates, "total": self._lengths[self.phase]}
        else:
            mixed = int(self.collector.figures()["mixed"]), self._group.groups
            # An update is an iteration, and needs no replay. Of many episodes at once, the last 20 are no fair sample.
            fields = {"updates_per_s": None, "empty_half": None, "success": None}
            fields |= {"mixed": mixed, "sampled": self._figures.get("group/success")}
            if not self.done:  # the run may end before the last iteration
                fields |= {"step": None, "done": self._learner.updates, "total": self._group.iterations}
        if self.phase in self.phases:
            fields |= {"phase_number": self.phases.index(self.phase) + 1, "phase_total": len(self.phases)}
        return fields

    def work(self) -> bool:
        if self._unpublished:
            return self._publish()
        match self.phase:
            case Phase.PRETRAIN:
                if self._pretrain(self._agent.update_policy, "policy"):
                    self._begin()
                return True
            case Phase.COLLECT:
                return self._collect()
            case Phase.TRAIN:
                return self._train()
        return False

    def _begin(self) -> None:
        """Hand the policy over from imitation; the first snapshot lets the actors begin."""
        learner = self._learner
        if self._config.pretrain_steps:
            learner.check_policy()
        learner.state = learner.devices.place(self._agent.begin_iterations(learner.state))
        self._enter(Phase.COLLECT)
        learner.evaluate_if_due(now=True)
        self._publish()

    def _publish(self) -> bool:
        """Publish the policy of the next iteration, let actors collect under it, and write a checkpoint.

        False, and tried again, where it could not be published: episodes of the one before are of another policy.
        """
        learner, before = self._learner, self._learner.version
        done = self._over or (learner.updates >= self._group.iterations and "all iterations are done")
        version = learner.publish()
        self._unpublished = version == before and not done
        if self._unpublished:
            return False
        self._since = version
        self.collector.begin(learner.updates, version)
        learner.checkpoint()
        self._clock = time.perf_counter()
        if done:
            logger.info(f"training ends: {done}")
            self._enter(Phase.DONE)
        return True

    def _collect(self) -> bool:
        if (collected := self.collector.poll()) is None:
            return False
        learner, now = self._learner, time.perf_counter()
        self._figures = {f"group/{name}": value for name, value in collected.counters.items()}
        self._figures["time/collect_s"] = now - self._clock
        self._clock = now
        if collected.no_update:
            text = f"iteration {collected.iteration} has no update: {collected.no_update}"
            learner.metrics.event(text, learner.counters())
            logger.warning("%s", text)
        self._over = collected.over
        self._metrics, self._updates = [], self._gradient_steps(collected)
        self.phase = Phase.TRAIN
        return True

    def _train(self) -> bool:
        assert self._updates is not None
        if (metrics := next(self._updates, None)) is not None:
            self._metrics.append(metrics)
            self._learner.stats.count(1, metrics)
        else:
            self._end_iteration()
        return True

    def _gradient_steps(self, collected: Collected) -> Iterator[Metrics]:
        """Train on an iteration's rows, a gradient step at a time."""
        learner, agent, c = self._learner, self._agent, self._group
        replays = agent.config.clones_successes
        if not collected.groups or (replays and not learner.replay.ready.windows):
            return
        rows, episodes = self.rows_of(collected)
        with learner.stats.first_call("updates"):
            rows = agent.with_contexts(learner.base, rows, available_bytes(), free_device_bytes())
            prepared = agent.prepare(learner.state, learner.base, rows)
            learner.state, rows, figures = agent.credit(learner.state, learner.base, rows, episodes, prepared)
        self._figures |= figures
        if (gaps := prepared.get("logp_gap")) is not None:
            self._note_gap(float(gaps.max()))
        rng = np.random.default_rng([learner.config.seed, collected.iteration])
        for _ in range(c.epochs):
            for batch in minibatches(rng, rows, c.minibatch):
                if replays:  # in as many steps
                    with learner.stats.timed("sampling"):
                        of_all = learner.replay.sample(rng, c.minibatch, next_observations=False)
                    learner.state, metrics = agent.update_clone(learner.state, learner.base, of_all)
                else:
                    learner.state, metrics = agent.update_rows(learner.state, learner.base, batch)
                yield metrics
            if 0 < c.target_kl < float(metrics.get("actor/approx_kl", 0.0)):
                break

    def rows_of(self, collected: Collected) -> tuple[GroupRows, Episodes]:
        """Return the decisions of an iteration's groups, and their episodes."""
        rollouts = [rollout for group in collected.rollouts for rollout in group]
        parts = [(r.observations, r.record, r.executed) for r in rollouts]
        observations, record, executed = jax.tree.map(lambda *each: np.concatenate(each), *parts)
        numbers = [group.number for group, each in zip(collected.groups, collected.rollouts, strict=True) for _ in each]
        episodes = Episodes(
            np.array([r.result.reward for r in rollouts], np.float32), np.array(numbers),
            np.array([len(r.executed) for r in rollouts]),
        )  # fmt: skip
        return uncredited(observations, record, executed), episodes

    def _note_gap(self, gap: float) -> None:
        self._figures["group/logp_gap"] = gap
        if gap > GAP:
            logger.warning(
                f"the log-probabilities of actors and learner differ by up to {gap:.3g} (expected less than {GAP:g}): "
                "they compute otherwise. The learner's are used; run both on the same version and device if training "
                "is unstable"
            )

    def _end_iteration(self) -> None:
        learner, now = self._learner, time.perf_counter()
        if self._metrics:
            learner.state = learner.devices.place(self._agent.end_iteration(learner.state))
            each = jax.device_get(self._metrics)
            self._figures |= {name: float(np.mean([m[name] for m in each])) for name in each[0]}
        self._figures |= {"time/train_s": now - self._clock, "group/gradient_steps": float(len(self._metrics))}
        learner.updates += 1
        learner.stats.log(self._figures)
        self._lines.log(f"{plural(learner.updates, 'iteration')} done: {_in_words(self._figures)}")
        learner.evaluate_if_due(now=bool(self._over) or learner.updates >= self._group.iterations)
        self._updates, self.phase = None, Phase.COLLECT
        self._publish()

    def check_data(self) -> None:
        if self.phase is Phase.PRETRAIN and self._config.pretrain_steps:
            self._data.require_window()
            self._data.require_imitated(self._learner.config)

    def progress(self, env_steps: int) -> dict[str, Any]:
        scheduler = self.collector.scheduler
        return Saved(
            self._rng.bit_generator.state, str(self.phase), self.phase_updates, self._since,
            scheduler.memory.to_json(), self._starts.digest(), self._acting(),
        )._asdict()  # fmt: skip

    def _acting(self) -> str:
        config = self._learner.config
        acting = [(leaf.path, as_text(leaf.value)) for leaf in leaves(config) if leaf.acts == "value"]
        return hashlib.sha256(repr((acting, config.seed, self._starts.digest())).encode()).hexdigest()[:16]

    def resume(self, progress: Mapping[str, Any], *, missed_evaluation: bool) -> None:
        saved, learner = Saved(**progress), self._learner
        self._rng.bit_generator.state = dict(saved.sampler_rng)
        if saved.phase == Phase.PRETRAIN:
            self.phase_updates = saved.phase_updates
            return
        scheduler = self.collector.scheduler
        if saved.starts == self._starts.digest():
            scheduler.memory = Memory.from_json(saved.memory)
        elif saved.memory["starts"]:
            logger.warning("the set of starts changed: what was known of them is forgotten")
        self.phase = Phase.COLLECT
        if learner.updates >= self._group.iterations:
            if missed_evaluation:  # any other is due by its number, and made up for by the first piece of work
                learner.evaluate_if_due(now=True)
            self.phase = Phase.DONE
            logger.info(f"resumed after {learner.updates} iterations: all are done (raise group.iterations to go on)")
            return
        if scheduler.memory.barren >= self._group.patience and saved.acting == self._acting():
            self.phase = Phase.DONE
            logger.info(
                f"resumed after {learner.updates} iterations: the last {scheduler.memory.barren} had no update (change "
                "what they learn from, and raise group.patience to go on)"
            )
            return
        logger.info(f"resumed after {learner.updates} iterations, {learner.env_steps} online steps")
        version = learner.publish()
        if saved.acting == self._acting():
            self._since = cast(int, saved.since)
        else:
            logger.info("settings of episodes changed: none of those before the restart is trained on")
            self._since = version
        self.collector.begin(learner.updates, version, since=self._since)
        self._clock = time.perf_counter()


def _in_words(figures: Mapping[str, float]) -> str:
    mixed, groups, steps = (f"{figures[f'group/{name}']:.0f}" for name in ("mixed", "groups", "gradient_steps"))
    success, kl = figures.get("group/success"), figures.get("actor/approx_kl")
    parts = [
        "" if success is None else f"sampled success {success:.1%}",
        f"{mixed} of {groups} groups mixed, {steps} gradient steps",
        "" if kl is None else f"KL {kl:.3g}",
        f"{figures['time/collect_s']:.1f} s of collecting, {figures['time/train_s']:.1f} s of training",
    ]
    return ", ".join(filter(None, parts))


def tasks_of_groups(config: ExperimentConfig, tasks: Iterable[str]) -> Sequence[str]:
    """Return those of the robot's `tasks` that groups come from, in turn. Raises ConfigError for one it lacks."""
    known = list(tasks) or [config.robot.task]
    wrong = [task for task in config.group.tasks if task not in known]
    require(not wrong, "group.tasks", f"must be of this robot's tasks {known}, got {wrong}. Leave it out for all")
    return config.group.tasks or known


def _check_memory(config: ExperimentConfig, preprocess: Preprocess) -> None:
    """Raise ConfigError where the decisions of the largest iteration, and their copy in one piece, do not fit."""
    group, normaliser = config.group, preprocess.normaliser
    decisions = group.max_groups * group.size * math.ceil(config.robot.max_episode_steps / config.chunk.executed)
    numbers = normaliser.state_mean.size + 6 * normaliser.centre.size  # a record has up to five chunks
    row = 4 * numbers + sum(3 * camera.height * camera.width for camera in preprocess.cameras)
    needed, free = 2 * decisions * row, available_bytes()
    require(free is None or needed <= free, "group.max_groups",
        f"{group.max_groups} groups of {group.size} have up to {decisions:,} decisions, which take "
        f"{format_bytes(needed)} ({format_bytes(free or 0)} are free). Lower it or group.size, or show the agent "
        "smaller frames (agent.encoder.frame_size)")  # fmt: skip
