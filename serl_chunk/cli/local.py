"""`--local`: the same learner and actor loops in one process, without sockets; a seed reproduces a run."""

from __future__ import annotations

from threading import Event
from typing import Any

from serl_chunk.actor.canary import check_signal
from serl_chunk.actor.link import ActorLink, RunProgress
from serl_chunk.actor.service import ActorService, ActorSummary
from serl_chunk.cli.actor import report_session
from serl_chunk.cli.learner import STOPPING, finish_run, locked_run, make_learner, prepare
from serl_chunk.cli.process import check_many, warn_of_lockstep
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.fields import require
from serl_chunk.learner.building import RunOptions
from serl_chunk.learner.learner import Learner
from serl_chunk.signals import exit_at_once_while, never, stop_on_signals
from serl_chunk.types import Amend, Begin, ConfigError, End, Snapshot, Step, StepBlock

SESSION = "local/0"


class LocalLink(ActorLink):
    """The actor's end of a learner in the same process: records go straight into the replay.

    The learner works inside the actor's decisions: neither runs ahead.
    """

    learner: Learner  # set before the actor's loop begins
    steps_recorded = 0

    def __init__(self) -> None:
        self._snapshot: Snapshot | None = None
        self._episode = ""
        self._steps: list[Step] = []

    def publish(self, snapshot: Snapshot, info: dict[str, Any]) -> None:
        self._snapshot = snapshot

    @property
    def finished(self) -> str | None:
        return "training is complete" if self.learner.trainer.done else None

    def latest(self) -> Snapshot | None:
        return self._snapshot

    def begin(self, record: Begin) -> None:
        self._episode = record.episode_id
        self.insert(record)

    def step(self, record: Step) -> None:
        self._steps.append(record)
        self.steps_recorded += 1

    def end(self, record: End) -> None:
        self.hand_on()
        self.insert(record)

    def amend(self, record: Amend) -> None:
        self.insert(record)

    def insert(self, record: Begin | StepBlock | End | Amend) -> None:
        self.learner.router.insert(SESSION, record)

    def hand_on(self) -> None:
        if self._steps:
            self.insert(StepBlock.from_steps(self._episode, self._steps))
            self._steps = []


def run_local(config: ExperimentConfig, options: RunOptions, *, n_envs: int = 1) -> int:
    """Train in this process until `max_steps` or a signal. `n_envs`: environments whose episodes run at once."""
    stop, started = Event(), Event()
    stop_on_signals(stop, STOPPING, started.is_set)
    learner, summary = train_local(config, options, stop=stop, started=started, n_envs=n_envs)
    report_session(summary, config)
    return finish_run(learner)


def train_local(
    config: ExperimentConfig,
    options: RunOptions,
    *,
    stop: Event | None = None,
    started: Event | None = None,
    n_envs: int = 1,
) -> tuple[Learner, ActorSummary]:
    """Train as `run_local`, and return the closed learner and the actor's summary. Raises SerlChunkError.

    `started` is set as soon as `stop` is polled.
    """
    if config.actor.clock != "lockstep":
        raise ConfigError("--local runs in lockstep only: --config.actor.clock=lockstep, or use --learner and --actor")
    stop, started = stop or Event(), started or Event()
    require(config.learner.utd_ratio is not None or config.learner.online_steps == 0, "learner.utd_ratio",
        "none lets neither side wait, and the one process of --local trains between decisions. Set a number, or "
        "use --learner and --actor")  # fmt: skip
    require(
        not config.agent.iterates,
        "local",
        "its one process collects no groups of episodes. Use --learner --actor, with --n_envs for several simulators",
    )
    check_signal(config, operator=False)
    warn_of_lockstep(config)
    spec = prepare(config, options)
    check_many(config, spec, n_envs)
    with locked_run(config, spec, options.checkpoint_path) as (run, status, stack):
        exit_at_once_while(never)  # an open robot is closed, however long it takes
        link = LocalLink()
        actor = ActorService(config, actor_id="local", link=link, stop=stop, report_every=50, n_envs=n_envs)
        stack.callback(actor.close)
        learner = make_learner(config, options, run, spec, publish=link.publish, threaded=False, stopping=stop.is_set)
        stack.callback(learner.metrics.close)
        stack.callback(learner.close)
        stack.callback(actor.stop_robot)  # before the learner writes its last checkpoint
        link.learner = learner
        learner.trainer.log_if_empty()  # no journal is kept here

        def show() -> None:
            status.update(str(learner.trainer.phase), learner.status())

        learner.tick = show  # within an evaluation
        started.set()

        def work() -> None:
            link.hand_on()
            while not stop.is_set() and learner.work():
                show()

        work()  # up to the first snapshot, which the actor needs
        actor.agent, actor.before_decision = learner.agent, work
        begun = RunProgress(episodes=learner.episodes, env_steps=learner.env_steps, human_ticks=learner.human_ticks)
        summary = actor.run(learner.preprocess, begun)
    return learner, summary
