"""A learner, an actor of the counting robot, and what that robot says it did."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

from counting_robot import LOG
from processes import Cluster, Process, learner_totals
from system_accounts import Account, settle

from serl_chunk.runs.metrics import read_metrics

ROBOT = str(Path(__file__).with_name("counting_robot.py"))
TAIL = 5  # steps a killed actor may have handed over and not recorded; two ticks are promised where the machine is idle


class Lab:
    """Starts both, breaks neither; `stop` ends them and counts. `listen`: flags of the learner for its address."""

    def __init__(self, folder: Path, environment: Mapping[str, str], *, listen: Sequence[str] = ()) -> None:
        self.log = folder / "executed.txt"
        self.run, self.spool = folder / "run", folder / "spool"
        self._listen = listen
        self._cluster = Cluster(folder, folder / "none", {**environment, LOG: str(self.log)})
        self.port, self.close = self._cluster.port, self._cluster.close

    def learner(self, *more: str, kind: type[Process] = Process) -> Process:
        flags = ["--learner", "--debug", "--checkpoint_path", str(self.run), *self._listen]
        return self._cluster.start(*self._shared, *flags, *more, kind=kind)

    def actor(self, *more: str, prefix: Sequence[str] = (), kind: type[Process] = Process) -> Process:
        flags = ["--actor", "--spool_path", str(self.spool)]
        return self._cluster.start(*self._shared, *flags, *more, prefix=prefix, kind=kind)

    def local(self, *more: str, kind: type[Process] = Process) -> Process:
        """One process on the run folder alone: both loops, or an evaluation."""
        return self._cluster.start("--exp_name", ROBOT, "--checkpoint_path", str(self.run), *more, kind=kind)

    @property
    def _shared(self) -> list[str]:
        return ["--exp_name", ROBOT, "--port", str(self.port)]

    def executed(self) -> int:
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0

    def goes_on(self, steps: int, *processes: Process) -> None:
        """Wait until the robot has made that many more steps while the first of these processes runs."""
        goal = self.executed() + steps
        processes[0].until(lambda: self.executed() >= goal, "the robot stands still")

    def updates(self) -> int:
        rows = read_metrics(self.run)["train"] if (self.run / "metrics.jsonl").exists() else []
        return max((row["step"] for row in rows), default=0)

    def trains(self, learner: Process, updates: int = 20) -> None:
        goal = self.updates() + updates
        learner.until(lambda: self.updates() >= goal, "no training")

    def stop(self, learner: Process, actor: Process) -> tuple[str, str, Account]:
        """End both in order; returns (learner's output, actor's output, account)."""
        actor.signal(signal.SIGTERM)
        said = actor.ends()
        learner.signal(signal.SIGTERM)
        output = learner.ends()
        account = self.settled()
        assert learner_totals(output)[1] == account.steps
        assert account.steps + sum(account.cut.values()) == account.executed
        return output, said, account

    def settled(self) -> Account:
        """What the learner's journal holds, compared with what the robot did. No process may have the journal open."""
        return settle(self.run, self.log)
