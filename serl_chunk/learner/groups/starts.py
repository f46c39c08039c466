"""Init states that groups start from: which there are, what is known of each, and the order of their draws."""

from __future__ import annotations

import dataclasses
import hashlib
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from serl_chunk.config.fields import require
from serl_chunk.config.groups import GroupConfig
from serl_chunk.types import EVAL_SEED_BASE, MAX_TICKET_TEXT, TRAINING_SEED_BASE, Begin

_MAX_REST = 16  # iterations that a start which was never solved is left alone at most
_SETTING = "group.init_states"

Start = tuple[str, str]  # task, id of the init state


class StartRecord(NamedTuple):
    """What the groups of one start showed so far."""

    in_a_row: int = 0  # successes since the last failure
    solved: bool = False  # once at least
    failed_groups: int = 0  # before the first success
    rests_until: int = 0  # iteration from which it is drawn again like the others


@dataclasses.dataclass(frozen=True)
class Memory:
    """What the iterations so far showed: a value, which `after` replaces when an iteration is over."""

    starts: Mapping[Start, StartRecord] = dataclasses.field(default_factory=dict)
    barren: int = 0  # iterations in a row, up to now, that gave nothing to train on

    def after(self, iteration: int, groups: Iterable[tuple[Start, Sequence[bool]]], *, barren: bool) -> Memory:
        """Return the memory with the successes of an iteration's groups, in their order.

        A start without a single success so far rests for 1, 2, 4, ... iterations after each group of it.
        """
        starts = dict(self.starts)
        for start, successes in groups:
            known = starts.get(start, StartRecord())
            in_a_row = known.in_a_row
            for success in successes:
                in_a_row = in_a_row + 1 if success else 0
            solved = known.solved or any(successes)
            failed = 0 if solved else known.failed_groups + 1
            rest = 0 if solved else iteration + 1 + min(2 ** (failed - 1), _MAX_REST)
            starts[start] = StartRecord(in_a_row, solved, failed, rest)
        return Memory(starts, self.barren + 1 if barren else 0)

    def to_json(self) -> dict[str, Any]:
        return {"barren": self.barren, "starts": [[*start, *record] for start, record in self.starts.items()]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Memory:
        rows = data["starts"]
        return cls({(task, name): StartRecord(*record) for task, name, *record in rows}, data["barren"])


class Starts:
    """A set of init states of each task, or all seeds of training.

    Args:
        seed: of the run.
        ids: by task; None: `seed-N` with any N of training's, which is drawn once and not remembered.
    """

    def __init__(self, seed: int, ids: Mapping[str, Sequence[str]] | None = None) -> None:
        for name in (name for of_task in (ids or {}).values() for name in of_task):
            require(
                len(name) <= MAX_TICKET_TEXT,
                _SETTING,
                f"{name[:40]!r}... has {len(name)} characters, at most {MAX_TICKET_TEXT} are valid. Shorten the id",
            )
        self._seed, self._ids = seed, ids

    @property
    def remembered(self) -> bool:
        """Whether an init state comes again, so that it is worth to note what is known of it."""
        return self._ids is not None

    def digest(self) -> str:
        """Return sixteen hex digits that change when the set does."""
        ids = None if self._ids is None else {task: list(ids) for task, ids in self._ids.items()}
        return hashlib.sha256(repr((self._seed if ids is None else 0, ids)).encode()).hexdigest()[:16]

    def mastered(self, memory: Memory, config: GroupConfig) -> set[Start]:
        """Return the starts whose last `group.mastered` episodes all succeeded."""
        known = memory.starts.items()
        return {start for start, record in known if 0 < config.mastered <= record.in_a_row}

    def draws(self, task: str, iteration: int, memory: Memory, config: GroupConfig) -> Iterator[str]:
        """Yield the init states of a task's groups in an iteration, without an end.

        A function of the run's seed and the arguments alone. Each start comes once before one comes again; resting
        ones come where no other is left, and mastered ones as a share `group.retest` of the draws.
        """
        rng = np.random.default_rng([self._seed, zlib.crc32(task.encode()), iteration])
        if self._ids is None:
            while True:
                yield _training_start(rng)
        mastered = [name for name in self._ids[task] if (task, name) in self.mastered(memory, config)]
        others = [name for name in self._ids[task] if name not in set(mastered)]
        awake = [n for n in others if memory.starts.get((task, n), StartRecord()).rests_until <= iteration]
        while True:
            for at in rng.permutation(len(pool := awake or others or mastered)):
                while others and mastered and rng.random() < config.retest:
                    yield mastered[rng.integers(len(mastered))]
                yield pool[at]


def _training_start(rng: np.random.Generator) -> str:
    return f"seed-{rng.integers(TRAINING_SEED_BASE, 2**31)}"


def make_starts(
    config: GroupConfig,
    tasks: Sequence[str],
    seed: int,
    *,
    demos: Iterable[Begin] = (),
    saved: Mapping[str, Sequence[str]] | None = None,
) -> Starts:
    """Return the starts that `group.init_states` names. None of them is one of the evaluations'.

    Args:
        seed: of the run.
        demos: of the demonstrations. One without a task is of every task.
        saved: ids of the saved states that the robot offers for each task, see `RobotEnv.states_of`.

    Raises ConfigError where there is none for a task.
    """
    kind, _, number = config.init_states.partition(":")
    if kind == "seeds" and not number:
        return Starts(seed)
    if kind == "seeds":
        rng, drawn = np.random.default_rng(seed), dict[str, None]()
        while len(drawn) < int(number):
            drawn[_training_start(rng)] = None
        return Starts(seed, dict.fromkeys(tasks, tuple(drawn)))
    if kind == "saved":
        states = {task: tuple((saved or {}).get(task, ())) for task in tasks}
        require(all(states.values()), _SETTING, "this robot offers no saved states. Set seeds, seeds:N or demos")
        return Starts(seed, states)
    begins = [begin for begin in demos if begin.init_state and not _held_out(begin.init_state)]
    ids = {task: tuple(dict.fromkeys(b.init_state for b in begins if b.task in ("", task))) for task in tasks}
    for task, of_task in ids.items():
        require(
            bool(of_task),
            _SETTING,
            f"no demonstration of task {task!r} names its start, apart from those of evaluations. Record some "
            "(serl-chunk record stores it), or set seeds or seeds:N",
        )
    return Starts(seed, ids)


def _held_out(init_state: str) -> bool:
    """Return whether an init state is a seed in the range of the evaluations' and validations'."""
    match = re.fullmatch(r"seed-(\d+)", init_state)
    return match is not None and EVAL_SEED_BASE <= int(match[1]) < TRAINING_SEED_BASE
