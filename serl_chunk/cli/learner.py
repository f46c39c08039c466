"""`--learner`: the training process and its three sockets."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from serl_chunk.agents.registry import make_agent
from serl_chunk.cli.demos import DemoOptions, append_hint, check_data, open_dataset, read_demos
from serl_chunk.cli.keys import invite_first, learner_keys
from serl_chunk.cli.learner_evaluation import OwnEvaluation, check_simulator
from serl_chunk.cli.learner_status import StatusReporter, status_fields
from serl_chunk.cli.logs import log_to_file, status_line
from serl_chunk.cli.process import print_config, say, spec_of
from serl_chunk.cli.signals import GRACE, TELLING, before_exit, exit_at_once_while, never, stop_on_signals
from serl_chunk.config.compatibility import contract
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.overrides import to_dict
from serl_chunk.data.normalise.normaliser import Normaliser, fit_normaliser
from serl_chunk.learner.checks import check_replay_memory
from serl_chunk.learner.learner import Learner
from serl_chunk.learner.offline_data import OfflineData
from serl_chunk.learner.phases import Phase
from serl_chunk.learner.publisher import Publish
from serl_chunk.learner.step_shares import StepShares
from serl_chunk.replay.memory import replay_size
from serl_chunk.runs.checkpoints import CheckpointStore
from serl_chunk.runs.demos import DEMOS, note_of
from serl_chunk.runs.episodes import JOURNAL
from serl_chunk.runs.evaluations import wanted_policy
from serl_chunk.runs.folder import RunFolder, open_run, write_json
from serl_chunk.runs.metrics import MetricsLog
from serl_chunk.runs.report import build_report
from serl_chunk.runs.status_line import StatusLine
from serl_chunk.transport.server.server import LearnerServer
from serl_chunk.transport.server.sessions import SessionInfo
from serl_chunk.transport.sockets import check_port, is_loopback
from serl_chunk.transport.storage.record_store import RecordStore, check_retention
from serl_chunk.transport.wire.codec import Limits
from serl_chunk.types import ConfigError, DataError, Episode, PolicyOrigin, Record, RobotSpec, Snapshot, StepBlock

LOG = "learner.log"  # in the run folder
STOPPING = "ending with a final checkpoint"
STOPPED = "the learner was stopped"  # the reason that actors receive
JOURNAL_PERIOD = 2.0  # seconds between lines about a journal that is being read
FINISH_GRACE = 10.0  # seconds the actors have to deliver what is left after the end of training


def build_learner(
    config: ExperimentConfig,
    demo_paths: Sequence[str],
    run: RunFolder,
    spec: RobotSpec,
    *,
    publish: Publish,
    threaded: bool,
    wandb: bool,
    tell: Callable[[str], None],
    demo_options: DemoOptions = DemoOptions(),  # noqa: B008 (immutable)
    stopping: Callable[[], bool] = lambda: False,
) -> Learner:
    """The learner of a run with its data, metrics and (on resume) its checkpoint; the caller closes both.

    `stopping`: whether the process was asked to end, for what takes long. Raises ConfigError, DataError or
    CheckpointError.
    """
    check_simulator(config)
    agent = make_agent(config, spec)
    check_replay_memory(config, spec, agent)  # before data are read and networks compiled
    demo_options = demo_options.of_robot(config.robot)
    demos = read_demos(config, spec, demo_paths, tell, demo_options)
    dataset = open_dataset(config, spec, demo_options, tell, CheckpointStore(run.path).newest() or 0)
    try:
        OfflineData.require(config.learner, there=bool(demos.episodes) or dataset is not None)
    except ConfigError as error:
        raise ConfigError(append_hint(str(error), config)) from error
    # Nothing here keeps the shard: the learner takes it out of the data set, and later ones need its room.
    fitted = [*demos.episodes, *(dataset.episodes if dataset is not None else ())]
    normaliser = _normaliser(config, spec, run, fitted, tell)
    del fitted
    metrics = MetricsLog(
        run.path,
        wandb_project="serl-chunk" if wandb else None,
        wandb_name=f"{config.name}-{run.path.name}",
        config=to_dict(config),
    )
    holder: list[Learner] = []
    evaluate: OwnEvaluation | None = None
    try:
        if config.learner.eval_interval:
            evaluate = OwnEvaluation(
                config, agent, lambda: holder[0].normaliser, run.path, metrics, tell, stopping,
                tick=lambda: holder[0].tick(),
            )  # fmt: skip
        learner = Learner(
            config, spec, agent, normaliser, demos.episodes, run.path,
            publish=publish, metrics=metrics, threaded=threaded, dataset=dataset, evaluate=evaluate, say=tell,
        )  # fmt: skip
        run.write_config()  # not before: until then the files of the previous process stay
        try:
            write_json(run.path / DEMOS, note_of(demos, demo_options.options))
        except OSError as error:
            raise ConfigError(f"{run.path / DEMOS} cannot be written: {error}") from error
    except BaseException:
        metrics.close()  # wandb would wait for this run's end
        if evaluate is not None:
            evaluate.close()
        raise
    holder.append(learner)
    tell(replay_size(config, learner.replay.estimated_bytes))
    return learner


def _normaliser(
    config: ExperimentConfig, spec: RobotSpec, run: RunFolder, episodes: Sequence[Episode], tell: Callable[[str], None]
) -> Normaliser:
    """Fitted to what there is; where that cannot be, a resumed run's own, which it keeps in any case."""
    try:
        return fit_normaliser(spec, config.normaliser, config.chunk.carried, episodes)
    except (ConfigError, DataError) as error:
        saved = next(CheckpointStore(run.path).policies(), None)
        if saved is None or saved.meta["normaliser_mode"] != config.normaliser.actions:
            raise
        tell(f"the run's own normaliser goes on; a new one could not be made: {error}")
        return Normaliser.from_arrays(saved.meta["normaliser_mode"], saved.normaliser)


def welcome_of(learner: Learner) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """What a new actor is told: the action transform, and how far the run is, so that it repeats nothing."""
    normaliser = learner.normaliser
    fields = {"normaliser_mode": normaliser.mode, "normaliser_digest": normaliser.digest()}
    so_far = {"episodes": learner.episodes, "env_steps": learner.env_steps, "human_ticks": learner.human_ticks}
    return {**fields, **so_far}, normaliser.to_arrays()


def run_learner(
    config: ExperimentConfig,
    demo_paths: Sequence[str],
    checkpoint_path: str | None,
    *,
    bind: str,
    port: int,
    insecure: bool,
    wandb: bool,
    keys: str | None = None,
    demo_options: DemoOptions = DemoOptions(),  # noqa: B008 (immutable)
) -> int:
    """Train until `max_steps` or a signal, then write the last checkpoint and the report.

    `keys`: the key folder, where it is not the default one. A learner that other machines reach makes what it lacks.
    `demo_options`: how the demonstrations are read.
    """
    check_port(port)
    spec = spec_of(config)
    print_config(config, spec)
    check_data(config, demo_paths, demo_options)
    agent = make_agent(config, spec)  # first: where it is refused there is no folder yet
    run = open_run(config, spec, checkpoint_path)
    holder: dict[str, Learner] = {}

    def ready() -> Learner:
        if "learner" not in holder:
            raise ConfigError("the learner is still reading its demonstrations and checkpoint")
        return holder["learner"]

    # A robot in real time is never held: its actor reads no allowance, and needs no message about one.
    limited = config.actor.clock == "lockstep"
    shares = StepShares(lambda: ready().steps_allowed() if limited else None, config.transport.timeout_s)

    def on_record(info: SessionInfo, record: Record) -> None:
        ready().ingest.insert(_session(info), record, store.next if store is not None else None)
        if isinstance(record, StepBlock):
            shares.delivered(info.session, record.n)

    def on_silent(info: SessionInfo, gone: bool) -> None:
        ready().ingest.close_session(_session(info), gone=gone, position=store.next if store is not None else None)
        shares.closed(info.session)

    def fetch(step: str) -> tuple[Snapshot, dict[str, Any]]:
        checkpoint = wanted_policy(run.path, CheckpointStore(run.path), step)
        normaliser = Normaliser.from_arrays(checkpoint.meta["normaliser_mode"], checkpoint.normaliser)
        origin = PolicyOrigin(normaliser=normaliser.digest())
        return Snapshot(checkpoint.step, checkpoint.params, origin=origin), {"step": checkpoint.step}

    before_exit(run.discard_fresh)
    with status_line() as status, contextlib.ExitStack() as stack:
        stack.enter_context(run.locked())
        log_to_file(run.path / LOG)
        store = open_store(config, run.path, status.say) if config.transport.journal else None
        if store is not None:
            stack.callback(store.close)
        server_keys = learner_keys(bind, keys, insecure=insecure, tell=status.say)
        server = LearnerServer(
            config.transport,
            bind=bind,
            port=port,
            contract=contract(config, spec, agent.network_shape()),
            welcome=lambda: welcome_of(ready()),
            on_record=on_record,
            allowance=shares.allowed,
            on_silent=on_silent,
            fetch=fetch,
            run_id=run.run_id,
            episode_timeout=config.learner.actor_timeout,
            insecure=insecure,
            store=store,
            keys=server_keys,
        )
        stack.callback(server.close)
        if insecure and not is_loopback(bind):
            status.say(f"WARNING: --insecure: any machine that reaches {bind}:{port} can feed and read this run")
        stop, started = threading.Event(), threading.Event()
        stop_on_signals(stop, STOPPING, started.is_set)
        server.start()  # actors that connect while demonstrations are read receive a "not ready" reply
        if server_keys is not None:
            invite_first(server_keys, bind, port, status.say)
        learner = build_learner(
            config, demo_paths, run, spec,
            publish=server.publish, threaded=True, wandb=wandb, tell=status.say, demo_options=demo_options,
            stopping=stop.is_set,
        )  # fmt: skip
        stack.callback(learner.metrics.close)
        stack.callback(learner.close)
        if store is not None:
            check_retention(config.transport.journal_bytes, learner.replay.estimated_disk_bytes)
            _refill(learner, store, shares, status)
            server.resume()
        holder["learner"] = learner
        status.say(f"listening on {bind}:{port} (and the two ports after it); run folder {run.path}")
        shown = StatusReporter(config, learner, server, status)
        started.set()

        def tell_actors() -> None:
            server.finish(STOPPED)
            time.sleep(TELLING)

        before_exit(tell_actors)
        exit_at_once_while(lambda: not learner.has_trained, GRACE)  # its first update is being compiled
        learner.run(stop, shown.tick)
        exit_at_once_while(never)
        status.update(str(learner.phase), status_fields(config, learner))
        server.finish("training is complete" if learner.phase is Phase.DONE else STOPPED)
        _let_actors_finish(server)
        log_final_checkpoint(learner, status.say)
    return finish_run(learner)


def open_store(config: ExperimentConfig, run: Path, tell: Callable[[str], None]) -> RecordStore:
    """The journal of a run folder; says what of it cannot be read."""
    t, r = config.transport, config.replay
    store = RecordStore(
        run / JOURNAL,
        Limits(t.max_message_bytes, t.max_arrays),
        min_steps=r.capacity + r.human_capacity,
        max_bytes=t.journal_bytes,
        max_age=86400 * t.journal_days or None,
        sync_interval=t.sync_interval,
    )
    if any(store.losses):
        tell(f"WARNING: journal {store.folder}: {store.losses}")
    return store


def _refill(learner: Learner, store: RecordStore, shares: StepShares, status: StatusLine) -> None:
    """Put the journal back into the replay, with progress: tens of gigabytes take a while."""
    shown = time.monotonic()

    def records() -> Iterator[tuple[int, str, Record | None]]:
        nonlocal shown
        for stored in store.replay():
            if stored.delivered:
                yield stored.number, f"{stored.actor_id}/{stored.session}", stored.record
            if time.monotonic() - shown > JOURNAL_PERIOD:
                shown = time.monotonic()
                status.say(f"reading the journal: entry {stored.number:,} of {store.next:,}")

    steps = learner.ingest.refill(records())
    shares.restore((s.session, s.steps) for s in store.session_states())
    if store.next:
        status.say(f"journal: {steps:,} online steps put back from {store.nbytes / 2**20:.0f} MiB")


def _session(info: SessionInfo) -> str:
    return f"{info.actor_id}/{info.session}"


def _let_actors_finish(server: LearnerServer) -> None:
    end = time.monotonic() + FINISH_GRACE
    while any(s["live"] for s in server.sessions()) and time.monotonic() < end:
        server.check()
        time.sleep(0.05)


def log_final_checkpoint(learner: Learner, tell: Callable[[str], None]) -> None:
    """Before a learner is closed: whether that writes a checkpoint."""
    nothing = f"stopped during {learner.phase}: nothing to write"
    tell("writing the last checkpoint" if learner.writes_checkpoint else nothing)


def finish_run(learner: Learner) -> int:
    """Totals and report of a run whose learner is closed; returns 1 where something could not be written, else 0."""
    path = learner.checkpoints.run_dir
    say(f"{learner.updates} updates, {learner.env_steps} online steps, {learner.human_ticks} human ticks")
    status = 0
    say("writing the report")  # which takes seconds, on a busy machine many of them
    try:
        say(f"report: {build_report(path)}")
    except OSError as error:  # a full disk: the checkpoints' fate below is worth more than a traceback
        say(f"WARNING: the report could not be written ({error}); later: serl-chunk report {path}")
        status = 1
    if failed := learner.checkpoints.failed_saves + learner.timed_checkpoints.failed_saves:
        say(f"WARNING: {failed} checkpoints could not be written; newest: "
            f"{learner.checkpoints.steps()[-1:] or 'none'}")  # fmt: skip
        return 1
    return status
