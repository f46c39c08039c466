"""Settings as dataclass fields with their meaning: help, unit, range, and requirements.

The checks of values and of unused settings, `serl-chunk config` and the handshake's contract read this metadata.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

from serl_chunk.io import plural
from serl_chunk.types import ConfigError

ABSENT = object()  # the value of a setting that a configuration does not have


class Requirement(NamedTuple):
    """A state of the experiment in which a setting has an effect."""

    needs: str
    met: Callable[[Any], bool]  # of the ExperimentConfig


CRITIC = Requirement("an agent with a critic (acfql or acrlpd)", lambda c: c.agent.has_critic)
TRAINED = Requirement("a policy that is trained: agent.pi0.trainable other than none", lambda c: c.agent.trains_policy)
NOT_CONSTANT = Requirement(
    "agent.pi0.trainable other than none", lambda c: c.agent.as_pi0 is None or c.agent.as_pi0.trainable != "none"
)
CAMERAS = Requirement("cameras in agent.image_keys", lambda c: bool(c.agent.image_keys))
LEARNED_GRIPPER = Requirement(
    "agent.gripper.choices, or a learned-gripper setup_mode", lambda c: c.agent.gripper.composition == "learned"
)


def value_at(config: Any, path: str) -> Any:
    """Return the setting at a dotted path, or ABSENT."""
    for name in path.split("."):
        config = getattr(config, name, ABSENT)
    return config


def needs(path: str, *values: Any, note: str = "") -> Requirement:
    """Require one of `values` at `path`; met where the agent does not have that setting."""
    text = f"{path}={' or '.join(map(str, values))}" + (f" ({note})" if note else "")
    return Requirement(text, lambda c: value_at(c, path) in (*values, ABSENT))


def not_by(*rules: str) -> Requirement:
    """Require a rule other than these, by which pi0 follows its critic."""
    return Requirement(f"agent.improve_by other than {' and '.join(rules)}", lambda c: c.agent.improvement not in rules)


def ticks_of(seconds: float, control_hz: float) -> int:
    """Return a limit in seconds as whole ticks of the control loop, the nearest number, 1 at least."""
    return max(1, round(seconds * control_hz))


class Setting(NamedTuple):
    """The meaning of one field.

    Args:
        help: one line; also the place for a source or the meaning of 0 and none.
        unit: `s`, `ticks`, `updates`, `bytes`, ...; empty for none.
        least, above, most, below: range of a number, or of each number of a tuple.
        items: least number of values of a tuple.
        acts: how the field decides what a policy does with given parameters. `value`: learner and actor compare it
            under its path. `derived`: they compare it under another name. `shape`: the shapes of the parameters show
            it. Empty: it only decides how a policy is trained. None: as the group that holds it.
        requires: all that must hold for the field, or for the fields of the group, to have an effect.
        off: the value that has its meaning whatever `requires` says.
    """

    help: str
    unit: str = ""
    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    items: int = 0
    acts: Literal["", "value", "derived", "shape"] | None = None
    requires: tuple[Requirement, ...] = ()
    off: Any = ABSENT

    def valid(self) -> str:
        """Return the range in words; empty for none."""
        low = next(((f"{v}", mark) for v, mark in ((self.least, "["), (self.above, "(")) if v is not None), None)
        high = next(((f"{v}", mark) for v, mark in ((self.most, "]"), (self.below, ")")) if v is not None), None)
        if low and high:
            return f"in {low[1]}{low[0]}, {high[0]}{high[1]}"
        if low:
            return f"{'at least' if self.above is None else 'above'} {low[0]}"
        return f"{'at most' if self.below is None else 'below'} {high[0]}" if high else ""

    def holds(self, number: float) -> bool:
        """Return whether a number is in the range and finite, or a duration; NaN never is."""
        return (
            (self.unit in ("s", "days") or math.isfinite(number))
            and (self.least is None or number >= self.least)
            and (self.above is None or number > self.above)
            and (self.most is None or number <= self.most)
            and (self.below is None or number < self.below)
        )


def setting(default: Any, help: str, **meaning: Any) -> Any:
    """Return a dataclass field with a default and its `Setting`; a class as default is called for each instance."""
    requires = meaning.pop("requires", ())
    requires = (requires,) if isinstance(requires, Requirement) else requires
    metadata = {"setting": Setting(help, requires=requires, **meaning)}
    if isinstance(default, type | functools.partial):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def optional(default: Any, help: str, **meaning: Any) -> Any:
    """Return a setting whose default has its meaning whatever it requires."""
    return setting(default, help, off=default, **meaning)


acting = functools.partial(setting, acts="value")
derived = functools.partial(setting, acts="derived")
shaping = functools.partial(setting, acts="shape")
widths = functools.partial(shaping, items=1, least=1)


@functools.cache
def settings_of(group: type) -> dict[str, tuple[Setting, Any]]:
    """Return name -> (meaning, annotation) of a group's fields; a redefined field keeps the meaning of its base's."""
    hints = typing.get_type_hints(group)
    out = {}
    for field in dataclasses.fields(group):
        own = [base.__dict__.get("__dataclass_fields__", {}).get(field.name) for base in group.__mro__]
        marked = [f.metadata["setting"] for f in own if f is not None and "setting" in f.metadata]
        out[field.name] = (marked[0] if marked else Setting(""), hints[field.name])
    return out


class Group:
    """A group of settings, whose values are checked when it is built: each alone, then by `_check` of every class."""

    PATH: ClassVar[str] = ""
    CALLED: ClassVar[Mapping[str, str]] = {}  # settings of other groups in its place -> what does the same here

    def __init_subclass__(cls, path: str | None = None, without: Sequence[str] = ()) -> None:
        """Set the prefix of the fields' names, with a dot at its end; subclasses inherit it.

        `without`: settings of a base that this group does not have. Its class attributes are their values.
        """
        cls.PATH = cls.PATH if path is None else path
        cls.__annotations__.update(dict.fromkeys(without, ClassVar))  # to `dataclass` that is no field

    def __post_init__(self) -> None:
        own: Any = type(self)
        for name, (meaning, hint) in settings_of(own).items():
            value = getattr(self, name)
            if problem := _problem(value, meaning, hint):
                raise ConfigError(f"must be {problem}, got {value!r}", parameter=self.PATH + name)
        for base in reversed(own.__mro__):
            if check := base.__dict__.get("_check"):
                check(self)


def _problem(value: Any, meaning: Setting, hint: Any) -> str:
    """Return what a value must be; empty where it is."""
    choices, valid = _choices(hint), meaning.valid()
    if choices:
        valid += f"{' or ' if valid else ''}one of {choices_in_words(choices)}"
        if isinstance(value, str) or typing.get_origin(hint) is Literal:
            return "" if value in choices else valid
    values = value if isinstance(value, tuple) else (value,)
    if len(values) < meaning.items:
        return f"{plural(meaning.items, 'value')} or more, each {valid}"
    numbers = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
    if all(map(meaning.holds, numbers)):
        return ""
    return valid if all(map(math.isfinite, numbers)) else f"{valid} and finite".removeprefix(" and ")


def range_in_words(config: Any, path: str) -> str:
    """Return the values that the setting `path` of a configuration may have; empty where all of its type may."""
    group, _, name = path.rpartition(".")
    owner: Any = type(value_at(config, group) if group else config)
    meaning, hint = settings_of(owner)[name]
    parts = [meaning.valid(), choices_in_words(_choices(hint)), "none" if type(None) in typing.get_args(hint) else ""]
    return " or ".join(part for part in parts if part)


def _choices(hint: Any) -> tuple[Any, ...]:
    if typing.get_origin(hint) is Literal:
        return typing.get_args(hint)
    return tuple(c for option in typing.get_args(hint) for c in _choices(option))


def choices_in_words(values: Sequence[Any]) -> str:
    """Return the values that a field may hold, for a message; an empty text, which would be invisible, is `nothing`."""
    named = ", ".join(str(v) for v in values if v != "")
    return f"{named}, or nothing" if "" in values else named


def require(condition: bool, parameter: str, message: str) -> None:
    """Raise ConfigError for `parameter` unless `condition`."""
    if not condition:
        raise ConfigError(message, parameter=parameter)


class Leaf(NamedTuple):
    """A setting of a configuration, with its place in the tree."""

    path: str
    value: Any
    default: Any  # ABSENT where there is none
    setting: Setting
    requires: tuple[Requirement, ...]  # those of its groups included
    acts: str


def default_of(field: dataclasses.Field[Any]) -> Any:
    """Return a new default of a field, or ABSENT."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return ABSENT if field.default is dataclasses.MISSING else field.default


def leaves(
    config: Any, default: Any = ABSENT, prefix: str = "", requires: tuple[Requirement, ...] = (), acts: str = ""
) -> Iterator[Leaf]:
    """Iterate over all settings of a configuration, in the order of their declaration.

    The other arguments are of a group within it: its default, its path with a dot, and what its fields inherit.
    """
    own: Any = type(config)
    fields = {f.name: f for f in dataclasses.fields(own)}
    for name, (meaning, _) in settings_of(own).items():
        value = getattr(config, name)
        usual = getattr(default, name) if type(default) is own else default_of(fields[name])
        below = (*requires, *meaning.requires)
        acting = acts if meaning.acts is None else meaning.acts
        if dataclasses.is_dataclass(value):
            yield from leaves(value, usual, f"{prefix}{name}.", below, acting)
        else:
            yield Leaf(prefix + name, value, usual, meaning, below, acting)


def as_text(value: Any) -> str:
    """Format a setting's value as it is given on the command line."""
    if value is None:
        return "none"
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def check_unused(config: Any, paths: Iterable[str]) -> None:
    """Raise ConfigError for the first of the settings `paths` (dotted) that has no effect in this experiment.

    An experiment's file may set what another choice would read; a value on the command line is expected to have an
    effect.
    """
    known = {leaf.path: leaf for leaf in leaves(config)}
    for leaf in (known[path] for path in paths if path in known):
        for requirement in leaf.requires:
            wrong = f"the value {as_text(leaf.value)} has no effect, it needs {requirement.needs}"
            met = leaf.value == leaf.setting.off or requirement.met(config)
            require(met, leaf.path, f"{wrong}. Set that too, or leave it out.")
