"""The learner of one run: what every way of training needs. Its trainer decides what is trained when."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from serl_chunk.agents.base import Agent
from serl_chunk.agents.registry import trainer_of
from serl_chunk.agents.spec import agent_spec
from serl_chunk.agents.state import AgentState, Metrics, Params
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.data.preprocess import Preprocess, fit_preprocess
from serl_chunk.io import fsync_path, plural
from serl_chunk.learner.devices import Devices
from serl_chunk.learner.intake import Received, RecordRouter
from serl_chunk.learner.offline_data import InitialData, precompute_features
from serl_chunk.learner.schedule import BY_LEARNER, Check, Evaluate, Evaluations, TrainingProgress
from serl_chunk.learner.trainers.base import Trainer
from serl_chunk.learner.training_stats import TrainingStats, ValueRange
from serl_chunk.replay.memory import available_bytes, check_memory
from serl_chunk.replay.replay import Replay
from serl_chunk.runs.checkpoints import EXPORTS, LearnerCheckpoints, PolicyCheckpoint, Restored, Saves
from serl_chunk.runs.metrics import DEMONSTRATION_RECEIVED, Counters, MetricsLog, read_metrics
from serl_chunk.runs.status_line import StatusFields
from serl_chunk.runs.term import FencedError
from serl_chunk.types import ConfigError, DataError, PolicyOrigin, Record, RobotSpec, Snapshot

logger = logging.getLogger(__name__)

Publish = Callable[[Snapshot, dict[str, Any]], None]
VERSION_DIGITS = 12


class SnapshotPublisher:
    """Copies parameters on the device, then flattens and publishes them in a thread of its own.

    The copy is dispatched before the next update donates the state. Only the newest waiting copy is kept. With
    `threaded=False` (single-process mode) the call itself publishes, so that a seed reproduces a run.

    The version is written to `<run>/snapshot_version` before it is used: versions never go back, not even after a
    resume from an older checkpoint. One that cannot be written is not published: that is logged, and the next call
    tries again. `copy` copies what an update donates; by default on the device.
    """

    def __init__(self, agent: Agent, publish: Publish, run_dir: Path, *, threaded: bool, copy: Any = None) -> None:
        self._agent, self._publish = agent, publish
        self._file = Path(run_dir) / "snapshot_version"
        self.version = _read_version(self._file)
        self._version_file = os.open(self._file, os.O_WRONLY | os.O_CREAT, 0o644)
        self.failed_writes = 0  # versions that could not be written, and were not published
        self._writes = True  # the last one was
        if self._keep_version(self.version):
            with contextlib.suppress(OSError):  # each version is synced before it is published
                fsync_path(self._file.parent)
        self._copy = copy or jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))
        self.seconds = 0.0  # that it took so far to copy, flatten and publish
        self.error: BaseException | None = None  # what stopped the thread
        self._waiting: deque[tuple[Snapshot, dict[str, Any]]] = deque(maxlen=1)  # not flattened, and its info
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="publisher") if threaded else None

    def publish(self, params: Any, info: dict[str, Any], *, normaliser: str = "") -> int:
        """Publish a parameter tree under the next version; returns the newest version that was published.

        `normaliser`: digest of the one that acting with these parameters needs. Raises what stopped the thread.
        """
        if self.error is not None:
            raise self.error
        if not self._keep_version(self.version + 1):
            return self.version
        self.version += 1
        origin = PolicyOrigin(normaliser=normaliser)  # the transport adds the run
        snapshot = Snapshot(self.version, self._copy(params), origin=origin)
        if self._thread is None:
            self._hand_over(snapshot, info)
        else:
            self._waiting.append((snapshot, info))
            self._thread.submit(self._publish_waiting)
        return self.version

    def _keep_version(self, version: int) -> bool:
        """Write a version; False where that failed. The first failure in a row is logged."""
        try:
            # Digits of one width: a kill leaves the old version or the new one, and a full disk has the room.
            data = f"{version:0{VERSION_DIGITS}d}\n".encode()
            if os.pwrite(self._version_file, data, 0) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as e:
            self._complain(version, e)
            return False
        if not self._writes:
            logger.warning("snapshot versions are written again; %d snapshots were not published", self.failed_writes)
        self._writes = True
        return True

    def _complain(self, version: int, error: OSError) -> None:
        self.failed_writes += 1
        if self._writes:
            logger.warning(
                f"snapshot {version} is not published: its version cannot be written to {self._file} "
                f"({error.strerror}). Training continues, and the next snapshot tries again; if the disk is full, free "
                "some space"
            )
        self._writes = False

    def _hand_over(self, snapshot: Snapshot, info: dict[str, Any]) -> None:
        if self._thread is not None:  # actors of other machines remember it: a power cut must not set it back
            try:
                os.fsync(self._version_file)
            except OSError as e:
                self._complain(snapshot.version, e)
                return
        start = time.perf_counter()
        self._publish(snapshot._replace(params=self._agent.flatten_params(snapshot.params)), info)
        self.seconds += time.perf_counter() - start

    def _publish_waiting(self) -> None:
        try:
            if self._waiting and self.error is None:  # an earlier call may have published it
                self._hand_over(*self._waiting.pop())
        except BaseException as error:  # raised again in the training thread by the next publish
            self.error = error

    def close(self) -> None:
        """Publish the copy that waits, then stop the thread; `error` is set if that failed."""
        if self._thread is not None:
            self._thread.shutdown()
        if self._version_file >= 0:
            os.close(self._version_file)
            self._version_file = -1


def _read_version(file: Path) -> int:
    """Return the last published version, 0 before the first. Raises DataError for anything but a number."""
    text = file.read_bytes().strip() if file.exists() else b""
    if text and not text.isdigit():
        raise DataError(
            f"{file} holds {text[:40]!r}, not the version of the last snapshot. Write a number above every version "
            "that was published into it: actors ignore snapshots that are not newer than theirs"
        )
    return int(text or 0)


class Learned(NamedTuple):
    """The part of a checkpoint that is the agent's."""

    state: AgentState
    base: Params  # empty where it has a source


class Learner:
    """Owns the agent's state, the replay, the checkpoints and the metrics of one run.

    Args:
        config, spec, agent: of the run.
        preprocess: fitted to the data of this start; a resumed run keeps its own normaliser.
        data: what there is to train on before any actor sends steps.
        metrics: of the run folder, where the checkpoints are kept too.
        publish: takes each snapshot and its info (on the publisher's thread where `threaded`).
        threaded: prefetch batches and publish in parallel to the training thread; False reproduces a run bit for bit.
        evaluate: called as `learner.eval_interval` sets; closed with the learner.
        check: called once with the policy that demonstrations trained, before an actor gets it.
        start: the policy that a fresh run begins with, of whose normaliser `preprocess` is.
        profile: updates that are traced.
        devices: that train; None: all of this process.

    Raises ConfigError where its batches or settings do not fit the devices.
    """

    def __init__(
        self, config: ExperimentConfig, spec: RobotSpec, agent: Agent, preprocess: Preprocess, data: InitialData,
        metrics: MetricsLog, *, publish: Publish, threaded: bool, evaluate: Evaluate | None = None,
        check: Check | None = None, start: PolicyCheckpoint | None = None, profile: int = 0,
        devices: Devices | None = None,
    ) -> None:  # fmt: skip
        self.config, self.agent = config, agent
        self.devices = devices or Devices(config)
        self.devices.adopt(agent)
        c, a = config.learner, config.agent
        saves = Saves() if self.devices.together is None else self.devices.together.saves()
        self.checkpoints = LearnerCheckpoints(
            metrics.run_dir, keep=c.keep_checkpoints, most_bytes=c.checkpoint_bytes, saves=saves
        )
        key, self.base = jax.random.key(config.seed), agent.source_base
        learned = lambda: [Learned(s, {} if agent.source else agent.new_base(key)) for s in agent.states(key)]  # noqa: E731
        restored = self.checkpoints.restore_state(*jax.eval_shape(learned), place=agent.place)
        if restored is None:  # else trained weights are in the checkpoint, and their file may be gone
            self.state: AgentState = agent.pretrained(self.devices.new_state(agent, key))
            self.base = self.base or agent.new_base(key)
            if start is not None:
                agent.check_base(start.meta["base_digest"])
                self.state = agent.with_policy(self.state, start.params)
            if a.image_keys and a.encoder.frozen_backbone and not a.encoder.weights:
                logger.warning(
                    "agent.encoder.frozen_backbone=True without agent.encoder.weights: its convolutions stay random. "
                    "Set agent.encoder.weights (serl-chunk data encoder makes the file), or frozen_backbone=False"
                )
        else:
            saved = Preprocess.restored(config, spec, restored.meta, restored.normaliser)
            preprocess = restored_preprocess(saved, preprocess, same_data=data.dataset is None)
            self.state, self.base = restored.state.state, self.base or restored.state.base
            self.agent.check_base(restored.meta["base_digest"])
        self.state, self.base = self.devices.place((self.state, self.base))
        self.preprocess = preprocess
        embed = agent.embedder(self.base)  # with the weights that the run has: they never change
        if embed is not None and self.devices.several:
            embed.compile(self.devices.compiled)
        self.replay = Replay(spec, config, preprocess, bc_on=config.imitated, embed=embed)
        self.router = RecordRouter(self.replay)
        self.router.demonstrations.hold(data.demos)
        self._precompute = None if embed is None else precompute_features(self.replay)
        self.value_range = ValueRange(config)
        self.updates = 0  # critic updates of the offline and the online phase
        self.human_ticks = self.episodes = 0
        self.stats = TrainingStats(
            metrics, self.replay, c.log_period, self.counters, preprocess.normaliser.mode,
            publishing=lambda: self._publisher.seconds, profile=profile,
        )  # fmt: skip
        step = None if restored is None else restored.step
        # One thread starts the programs of several devices, in one order on all: batches compute features.
        loads = threaded and (embed is None or not self.devices.several)
        self.trainer: Trainer = trainer_of(a)(self, data, threaded=loads, step=step)
        copy = None if self.devices.together is None else self.devices.gathered
        self._publisher = SnapshotPublisher(agent, publish, metrics.run_dir, threaded=threaded, copy=copy)
        self._evaluations = Evaluations(evaluate, config.eval_interval if evaluate else 0, check, self._none_evaluated)
        self.idle = False  # whether the last look found no work: steps are waited for
        self.tick: Callable[[], None] = lambda: None  # for what takes long within one piece of work
        if restored is not None:
            self._resume(restored)
        self.trainer.check_data()

    @property
    def _none_evaluated(self) -> int:
        """What counts as the step of the last evaluation before the first: of iterations, the clone is evaluated."""
        return -1 if self.config.agent.iterates else 0

    @property
    def eval_interval(self) -> int:
        """Updates between evaluations; 0: none."""
        return self._evaluations.interval

    @property
    def metrics(self) -> MetricsLog:
        return self.stats.metrics

    @property
    def env_steps(self) -> int:
        return self.router.env_steps

    @property
    def version(self) -> int:
        return self._publisher.version

    def counters(self) -> Counters:
        return Counters(self.updates, self.env_steps, self.human_ticks)

    def status(self) -> StatusFields:
        stats = self.stats
        always: StatusFields = {
            "paused": stats.evaluation_seconds, "evaluating": stats.evaluating,
            "step": self.updates, "updates_per_s": stats.rates.get("rates/updates_per_s", 0.0),
        }  # fmt: skip
        if self.config.learner.online_steps == 0:  # there are no actors
            return {**always, **self.trainer.status()}
        return {
            **always, "env_steps": self.env_steps, "episodes": self.episodes, "version": self.version,
            "success": stats.success_without_intervention,
            "human": self.human_ticks / self.env_steps if self.env_steps else None,
            "learner_wait": stats.waiting[0], "actor_wait": stats.waiting[1], "empty_half": self.replay.empty_half,
            **self.trainer.status(),
        }  # fmt: skip

    def run(self, stop: threading.Event, tick: Callable[[], None] = lambda: None) -> None:
        """Work until the run's end or `stop`; `tick` is called between pieces of work, and within long ones."""
        self.tick = tick
        while self.router.refilling and not stop.is_set():  # no update before the replay is whole
            time.sleep(0.02)
            tick()
        self.trainer.log_if_empty()
        while not self.trainer.done and not stop.is_set():
            self.idle = not self.work()
            if self.idle:
                start = time.perf_counter()
                self.router.wait(0.02, self.trainer.steps_missing)
                self.stats.waited(time.perf_counter() - start)
            tick()

    def work(self) -> bool:
        """Do one piece of work; False where there is none until more steps arrive."""
        self._count_episodes()
        if self.checkpoints.timed_due and self.trainer.resumable:
            self.checkpoint(timed=True)
        # Before anything is changed: a resume makes up for one that was cut short.
        if self.trainer.counts_steps and self.evaluate_if_due():
            return True
        # Before the first update, so that a stop may end it; a journal has been read by now.
        if self._precompute is not None and not self.trainer.done:
            with self.stats.aside():
                if next(self._precompute, 0):
                    return True
        self._precompute = None
        return self.trainer.work()

    def updated(self, updates: int, metrics: Metrics) -> None:
        """Count a compiled call of `updates` updates, of whatever kind."""
        self.checkpoints.unsaved = True
        self.stats.updated(updates, metrics)

    def evaluate_if_due(self, *, now: bool = False) -> bool:
        """Evaluate the current policy where the schedule wants it (`now`: an end does); False where it does not."""
        if not self._evaluations.due(self.updates, now=now):
            return False
        with self.stats.evaluation():
            self.tick()
            self._evaluations.run(self, Snapshot(self.updates, self._policy()))
        return True

    def check_policy(self) -> None:
        """Compare the current policy with the demonstrations that it was trained on."""
        check = self._evaluations.check
        if check is not None and self.devices.together is not None and self.agent.source:
            # It would decide with the base that lies on the devices of all, in a program that process 0 alone starts.
            logger.info("no policy check: several processes share the base. Run serl-chunk check-policy RUN later")
        elif check is not None:
            with self.stats.evaluation():
                self.tick()
                check(self, Snapshot(self.updates, self._policy()))

    def refill(self, records: Iterable[tuple[int, str, Record | None]]) -> int:
        """Put the journal's records back into the replay; see `RecordRouter.refill`."""
        steps = self.router.refill(records)
        if received := self.router.demonstrations.received:
            logger.info("journal: %s put back", plural(received, "streamed demonstration"))
        return steps

    def _count_episodes(self) -> Received:
        """Note the episodes that were finished since the last call; returns the counters of that moment."""
        received = self.router.take()
        for e in received.episodes:
            self.episodes += 1
            self.human_ticks += e.human_ticks
            self.value_range.check(f"episode {e.episode_id}", *e.returns)
            self.stats.episode(e, number=self.episodes, phase="train" if self.trainer.policy_trained else "warmup")
        for session, amend in received.corrections:
            self.stats.correction(session, amend)
        for demonstration in received.demonstrations:
            text = f"{DEMONSTRATION_RECEIVED}: {demonstration.begin.episode_id}, {demonstration.steps.n} steps"
            self.value_range.demonstrations([demonstration])
            self.metrics.event(text, self.counters())
            logger.info("%s", text)
        self.stats.model_space.check(self.counters())
        return received

    def publish(self) -> int:
        self.router.fence()
        params = self._published()
        info = {"step": self.updates, "env_steps": self.env_steps}
        return self._publisher.publish(params, info, normaliser=self.preprocess.digest())

    def _policy(self) -> dict[str, Any]:
        return self.agent.flatten_params(self.devices.gathered(self._published()))

    def _published(self) -> Params:
        return self.agent.published(self.state, self.base, pretrained=self.trainer.pretrained)

    def checkpoint(self, *, timed: bool = False) -> None:
        """Write a checkpoint in the background: of this step, or `timed`, in the place of the timed one before."""
        self.router.fence()
        policy, received = self._published(), self._count_episodes()
        progress = TrainingProgress(
            env_steps=received.env_steps, human_ticks=self.human_ticks, episodes=self.episodes,
            journal_position=received.position, human_steps_held=int(self.replay.stats()["replay/human_rows"]),
            trainer=self.trainer.progress(received.env_steps),
        )  # fmt: skip
        meta = {
            "experiment": self.config.name,
            "agent": self.config.agent.kind,
            **self.preprocess.normaliser.fields(),
            "base_digest": self.agent.base_digest,
            "version": self.version,
            "updates": int(self.state.critic_updates) + int(self.state.policy_updates),
            **dataclasses.asdict(progress),
        }
        learned = Learned(self.state, {} if self.agent.source else self.base)
        content = (self.updates, learned, policy, self.preprocess.normaliser.to_arrays(), meta)
        if timed:
            self.checkpoints.save_timed(*content)
        else:
            self.checkpoints.save(*content)

    def export(self) -> None:
        """Write pi0, as it acts now, as openpi's checkpoint in bfloat16; one that is there already stays.

        Of all exports the newest `learner.keep_checkpoints` are kept. None is written where the run's statistics are
        not those of the file.
        """
        from serl_chunk.runs.openpi_checkpoints import export, norm_stats_of  # slow to import, and few runs need it

        folder, model = self.metrics.run_dir / EXPORTS / str(self.updates), self.config.agent.as_pi0
        if model is None or folder.exists():
            return
        of_file = norm_stats_of(self.config.normaliser)
        if of_file and fit_preprocess(self.config, self.replay.spec, []).digest() != self.preprocess.digest():
            logger.warning(
                f"{folder}: not exported: {self.config.normaliser.norm_stats} has other statistics than this run began "
                "with. Give the run's as normaliser.norm_stats"
            )
            return
        trees = self.devices.gathered((self._published().get("policy", {}), self.base))
        trained, base = (jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree.get("pi0", {})) for tree in trees)
        partial = folder.with_name(f"{folder.name}.partial")
        with self.stats.aside():
            self.tick()
            try:
                shutil.rmtree(partial, ignore_errors=True)
                export(partial, model, trained, base, of_file)
                partial.rename(folder)
                steps = sorted(int(other.name) for other in folder.parent.iterdir() if other.name.isdigit())
                for step in steps[: -self.config.learner.keep_checkpoints]:
                    shutil.rmtree(folder.with_name(str(step)))
            except Exception as error:  # of many kinds where a disk is full; training is worth more
                shutil.rmtree(partial, ignore_errors=True)
                why = f"{type(error).__name__}: {error}"
                logger.warning(f"{folder}: could not be exported ({why}); the next period tries again")
            else:
                logger.info(f"{folder}: pi0 for openpi, in bfloat16")

    @property
    def writes_checkpoint(self) -> bool:
        """Whether closing now writes one: while actors collect for the warm-up there is nothing to write."""
        return self.trainer.resumable and (self.checkpoints.unsaved or self.trainer.counts_steps)

    def close(self) -> None:
        """Write the final checkpoint, publish the last snapshot, stop the threads; failures are logged."""
        self.trainer.close()
        self.stats.close()
        self._count_episodes()
        # Before and between the phases that count steps the final checkpoint is a timed one.
        unsaved = self.checkpoints.unsaved
        if self._fenced:
            logger.info("no checkpoint is written: the run is another learner's")
        elif self.router.refilling:
            logger.info("no checkpoint is written while the journal is put back: a resume goes on from the last one")
        elif not self.trainer.resumable:
            logger.info("no checkpoint is written within an iteration: a resume goes on from the one before it")
        elif self.trainer.counts_steps and not (unsaved and self.updates in self.checkpoints.steps()):
            self.checkpoint()
        elif unsaved:
            self.checkpoint(timed=True)
        self.checkpoints.close()
        self._publisher.close()
        self._evaluations.close()
        if (error := self._publisher.error) is not None:
            logger.warning("the newest snapshot did not reach the actors (%s: %s)", type(error).__name__, error)

    @property
    def _fenced(self) -> bool:
        try:
            self.router.fence()
        except FencedError:
            return True
        return False

    def _resume(self, restored: Restored) -> None:
        saved = TrainingProgress.of(restored.meta)
        self.updates = restored.step
        self.router.resume(saved.env_steps, saved.journal_position, saved.human_steps_held)
        self.human_ticks, self.episodes = saved.human_ticks, saved.episodes
        self.metrics.resumed(self.counters(), self.episodes)
        rows = read_metrics(self.metrics.run_dir)["eval"]
        steps = (row["step"] for row in rows if row.get("by") == BY_LEARNER)
        self._evaluations.last = max(steps, default=self._none_evaluated)
        self.trainer.resume(saved.trainer, missed_evaluation=self._evaluations.due(self.updates, now=True))


def check_replay_memory(config: ExperimentConfig, spec: RobotSpec, agent: Agent) -> int:
    """Return the bytes of a full replay; raises ConfigError where memory has fewer, or a camera is unknown.

    The replay's own check comes after the compilation of the networks, which this one does not need.
    """
    cameras = agent_spec(config, spec).cameras
    language = config.agent.language.reads
    return check_memory(spec, config.replay, cameras, available_bytes(), agent.cached_features(), language=language)


def restored_preprocess(saved: Preprocess, fresh: Preprocess, *, same_data: bool) -> Preprocess:
    """Return `saved`, the checkpoint's; raises ConfigError where it transforms actions in another way than `fresh`.

    `same_data`: whether `fresh` was fitted to all data; of a data set it is another part, as a rule.
    """
    now, before = fresh.normaliser.mode, saved.normaliser.mode
    if before != now:
        raise ConfigError(
            f"{now} is not what this run's networks were trained with ({before}). Leave it as it was, or "
            "start afresh with another checkpoint_path",
            parameter="normaliser.actions",
        )
    if same_data and saved.digest() != fresh.digest():
        # Statistics of other demonstrations under an old network would shift every input.
        logger.info("the demonstrations or normaliser settings changed since the checkpoint: its normaliser is kept")
    return saved
