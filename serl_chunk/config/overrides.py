"""`--config.agent.lr=1e-4`: typed overrides of a tree of frozen dataclasses."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeVar

from serl_chunk.config.fields import choices_in_words, require
from serl_chunk.types import ConfigError

T = TypeVar("T")


def apply_overrides(config: T, overrides: Iterable[tuple[str, str]], changes: Mapping[str, Any] | None = None) -> T:
    """Return `config` with each (dotted path, text) replaced, the text parsed by the field's annotation.

    `changes` are values of `config`'s own fields; overrides win over them. All are applied before anything is validated
    again, so that two fields that must agree can be changed together. Raises ConfigError naming the path, what is valid
    there and the nearest field.
    """
    tree: dict[str, Any] = {}
    for path, text in overrides:
        node, parts = tree, path.split(".")
        for part in parts[:-1]:
            node = node.setdefault(part, {})
            require(isinstance(node, dict), path, f"{part!r} was given a value already")
        node[parts[-1]] = (path, text)
    return _rebuild(config, tree, "", changes or {}) if tree or changes else config


def _rebuild(config: Any, tree: dict[str, Any], prefix: str, before: Mapping[str, Any]) -> Any:
    hints = typing.get_type_hints(type(config))
    names = [f.name for f in dataclasses.fields(config)]
    changes = dict(before)
    for name, value in tree.items():
        here = f"{prefix}{name}"
        if name not in names:
            near = getattr(config, "CALLED", {}).get(name) or next(iter(difflib.get_close_matches(name, names, 1)), "")
            hint = f" (did you mean {near!r}?)" if near else ""
            raise ConfigError(
                f"{type(config).__name__} has no field {name!r}{hint}. Valid: {', '.join(names)}", parameter=here
            )
        old = before.get(name, getattr(config, name))
        if isinstance(value, dict):
            require(dataclasses.is_dataclass(old), here, f"it is a value ({old!r}) without fields of its own")
            changes[name] = _rebuild(old, value, here + ".", {})
        elif dataclasses.is_dataclass(old):
            fields = ", ".join(f.name for f in dataclasses.fields(old))
            raise ConfigError(f"it is a group. Set one of its fields: {fields}", parameter=here)
        else:
            changes[name] = parse(value[1], hints[name], value[0])
    return dataclasses.replace(config, **changes)


def parse(text: str, annotation: Any, path: str) -> Any:
    """Return `text` as a value of `annotation`; raise ConfigError with what is expected at `path`."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is str:
        return text
    if annotation in _WORDS:
        if text.lower() not in _WORDS[annotation]:
            raise _unreadable(text, "true or false" if annotation is bool else "none", path)
        return _WORDS[annotation][text.lower()]
    if annotation in (int, float):
        try:
            return float(text) if annotation is float else _integer(text)
        except (ValueError, OverflowError):  # int(float("inf"))
            raise _unreadable(text, "an integer" if annotation is int else "a number", path) from None
    if origin is Literal:
        for value in args:
            if text == str(value):
                return value
        near = difflib.get_close_matches(text, [str(v) for v in args if v != ""], 1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise _unreadable(text, f"one of {choices_in_words(args)}{hint}", path)
    if origin in (typing.Union, types.UnionType):
        expected = []
        for option in sorted(args, key=lambda a: a is str):  # str accepts everything and comes last
            try:
                return parse(text, option, path)
            except ConfigError as error:
                expected.append(error.message.partition("expected ")[2])
        raise _unreadable(text, " or ".join(expected), path)
    if origin is tuple:
        items = [t.strip() for t in text.strip("()[] ").split(",") if t.strip()]
        kinds = args[:1] * len(items) if args[1:] == (Ellipsis,) else args
        if len(items) != len(kinds):
            raise _unreadable(text, f"{len(kinds)} values with commas between them", path)
        return tuple(parse(t.strip("'\""), kind, path) for t, kind in zip(items, kinds, strict=True))
    raise ConfigError(
        f"it cannot be set on the command line, got {text!r}. Set it in the experiment's file.", parameter=path
    )


_WORDS: dict[Any, dict[str, Any]] = {
    bool: dict.fromkeys(("true", "1", "yes", "on"), True) | dict.fromkeys(("false", "0", "no", "off"), False),
    type(None): {"none": None, "null": None},
}


def _unreadable(text: str, expected: str, path: str) -> ConfigError:
    return ConfigError(f"got {text!r}, expected {expected}", parameter=path)


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:  # 1e6 is a common way to write a step count
        value = float(text)
        if not value.is_integer():
            raise ValueError(text) from None
        return int(value)


def to_dict(config: Any) -> Any:
    """Plain containers for config.json: callables become their qualified names, dataclasses name their class."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        out = {f.name: to_dict(getattr(config, f.name)) for f in dataclasses.fields(config)}
        kind = getattr(type(config), "kind", "")
        return {"kind": kind, **out} if kind else out
    if isinstance(config, tuple):
        return [to_dict(v) for v in config]
    if callable(config):
        named = config.func if isinstance(config, functools.partial) else config
        named = named if hasattr(named, "__qualname__") else type(named)  # an object with __call__
        return f"{named.__module__}:{named.__qualname__}"
    return config


def difference(old: Any, new: Any, prefix: str = "") -> list[str]:
    """One line `path: old -> new` for every leaf in which two `to_dict` results differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        lines = []
        for key in [*old, *(k for k in new if k not in old)]:
            lines += difference(old.get(key), new.get(key), f"{prefix}{key}.")
        return lines
    return [] if old == new else [f"{prefix[:-1]}: {old} -> {new}"]
