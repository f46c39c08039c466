"""The operator's console: keys in, the state out, on a terminal where there is one."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Iterator, Mapping

from serl_chunk.console.bindings import STOPS, Action, Keys, help_table, hints
from serl_chunk.console.terminal import CLOSED, Terminal, is_usable
from serl_chunk.console.view import ConsoleState, lines, plain, rings
from serl_chunk.types import ShownRobot

HELP = "?"  # the key that shows and hides the table of keys, where it is mapped to nothing

logger = logging.getLogger(__name__)


class OperatorConsole:
    """Keys and view of an actor. No method waits; call `actions` and `show` on every tick.

    Without a terminal there are no keys, and each change of the state is a line of the log. Use it as a context.

    `gestures` are shown only; `source` and `target` are descriptors of the terminal. Raises OSError: it has gone.
    """

    def __init__(
        self, keys: Mapping[str, Action] | None = None, gestures: Mapping[str, Action] | None = None,
        *, source: int = 0, target: int = 1,
    ) -> None:  # fmt: skip
        self._keys, self._gestures = Keys(keys), gestures
        self._stops = {name for name, action in self._keys.bindings.items() if action in STOPS}
        self._before: ConsoleState | None = None
        self._help = self._emptied = False
        self.shown: ShownRobot | None = None
        """The robot that stood on the screen when the key of the newest action was pressed."""
        self.terminal = Terminal(source, target) if is_usable(source, target) else None

    def __enter__(self) -> OperatorConsole:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def actions(self) -> Iterator[Action]:
        """Yield what the operator requested since the last call. After `empty`, only stops of this call are left.

        A terminal that has gone is reported once, as HOLD: no operator reads the view.
        """
        events = [] if self.terminal is None else self.terminal.read()
        self._emptied = False
        for name, stamp, content in events:
            if name == CLOSED:
                logger.warning("terminal closed: the robot holds, and no key works")
                yield Action.HOLD
                continue
            if name == HELP and HELP not in self._keys.bindings:
                self._help = not self._help
            if not self._emptied or name in self._stops:
                action = self._keys.press(name, stamp)
                self.shown = content if isinstance(content, ShownRobot) else None
                if action is not None:
                    yield action

    def empty(self) -> None:
        """Drop what was typed ahead, but for stops. Call it at each change of state."""
        self._emptied = True
        self._keys.empty()
        if self.terminal is not None:
            self.terminal.empty(keep=self._stops)

    def show(self, state: ConsoleState) -> None:
        """Show the state, and ring where it needs attention. The question of a first key comes before the state's."""
        state = state._replace(question=self._keys.question(time.monotonic()) or state.question)
        before, self._before = self._before, state
        if self.terminal is None:
            if text := plain(state, before):
                logger.info(text)
            return
        if rings(state, before):
            self.terminal.screen.bell()
        self.terminal.screen.show(functools.partial(self._draw, state, self._help), state.robot)

    def line(self, text: str) -> None:
        """Show a line of the log above the state. Without a terminal the log's own output shows it."""
        if self.terminal is not None:
            self.terminal.screen.line(text)

    def close(self) -> None:
        """Give the terminal back. A second call does nothing."""
        if self.terminal is not None:
            self.terminal.close()

    def _draw(self, state: ConsoleState, with_help: bool, columns: int, rows: int) -> list[str]:
        keys = hints(state.word, self._keys.bindings)
        if not with_help:
            return lines(state, columns, rows, [*keys, f"{HELP} help"] if HELP not in self._keys.bindings else keys)
        table = [line[:columns] for line in help_table(self._keys.bindings, self._gestures)]
        return [*lines(state, columns, max(1, rows - len(table) - 1)), "", *table][:rows]
