"""The command lines of benchmarks: options that many have, figures as JSON, and the plan of a folder of runs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

Setting = tuple[str, str]  # a field's path and its text, as `apply_overrides` takes them


def make_parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with a script's text and the option `--json` of `write_figures`."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    return parser


def write_figures(args: argparse.Namespace, figures: Any) -> None:
    """Write figures as JSON where `--json` names a file."""
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1, default=float) + "\n")


def add_settings(parser: argparse.ArgumentParser, what: str) -> None:
    """The option `--set FIELD=VALUE`, any number of times; `what` says of which rows."""
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help=f"override, {what}")


def settings(parser: argparse.ArgumentParser, texts: Sequence[str]) -> list[Setting]:
    """`--set`'s texts as paths and values; ends the program where one has no `=`."""
    if bad := [text for text in texts if "=" not in text]:
        parser.error(f"--set {bad[0]}: expected FIELD=VALUE")
    return [split(text) for text in texts]


def split(setting: str) -> Setting:
    """("field", "value") of `field=value`."""
    path, _, value = setting.partition("=")
    return path, value


def chosen(parser: argparse.ArgumentParser, text: str, valid: Collection[str], noun: str) -> list[str]:
    """Names separated by commas, or `all` of them; ends the program at the first that is not valid."""
    names = list(valid) if text == "all" else text.split(",")
    if unknown := [name for name in names if name not in valid]:
        parser.error(f"unknown {noun} {unknown[0]!r}; valid: {', '.join(valid)}; or all")
    return names


def keep_plan(file: Path, plan: Sequence[Any], made: Path) -> None:
    """Write down how the runs in `made` are made; refuses to go on with those that were made another way.

    What is finished is not run again, and would otherwise be shown for what is asked now. Raises SystemExit.
    """
    said = json.dumps(list(plan))
    if file.exists() and json.loads(file.read_text()) != json.loads(said):
        raise SystemExit(f"{made} was made as {file.read_text()}, and now {said} is asked for: give another --out")
    file.write_text(said)
