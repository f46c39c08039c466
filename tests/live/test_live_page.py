"""The live page in a browser: buttons and keys in each state, two viewers, and a lost actor."""

from __future__ import annotations

import numpy as np
import pytest
from chromium import MISSING, Chromium
from live_desk import NAMES, Recorded, Viewer, serving, step
from robot_served import wait as wait_until

from serl_chunk.console.bindings import EFFECTIVE, KEYS, STOPS, Action, ActorState
from serl_chunk.console.view import ConsoleState, Obstacle
from serl_chunk.live import server
from serl_chunk.types import Source

pytestmark = [pytest.mark.system, pytest.mark.skipif(bool(MISSING), reason=f"needs {' and '.join(MISSING)}")]
DOM = {"space": " ", "enter": "Enter", "escape": "Escape", "backspace": "Backspace"}


@pytest.fixture(scope="module")
def browser():
    with Chromium() as browser:
        yield browser


@pytest.fixture
def window(browser):
    return browser.renew()


def show(window: Chromium, operator: Recorded, state: ConsoleState) -> None:
    operator.view = state
    window.until(f"state.event && state.event.state.word === '{state.word}' && state.event.control.mine")
    window.until(f"state.event.state.question === '{state.question}'")


def test_every_button_and_key_in_every_state(window):
    operator = Recorded()
    with serving(operator) as (page, _):
        window.open(page.url)
        for word in ActorState:
            show(window, operator, ConsoleState(word))
            assert window.js("at('word').textContent") == word
            for action, keys in KEYS.items():
                counts = action in STOPS or action in EFFECTIVE[word]
                made = f"document.querySelector('[data-action={action}]')"
                assert window.js(f"{made}.disabled") is not counts, (word, action)
                expected = [action] * counts
                window.js(f"{made}.click()")
                for key in keys:
                    window.key(DOM.get(key, key))
                    expected += [action] * counts
                window.js("chain")
                wait_until(lambda expected=expected: len(operator.requested) >= len(expected))
                assert operator.taken() == expected, (word, action)
    refused = [fault for fault in window.faults if "409" not in str(fault)]
    assert refused == []


def test_space_and_enter_press_no_button_that_has_the_focus(window):
    operator = Recorded()
    with serving(operator) as (page, _):
        window.open(page.url)
        for word in (ActorState.POLICY, ActorState.HOLD):
            show(window, operator, ConsoleState(word))
            for action in (Action.SUCCESS, Action.DISCARD, Action.QUIT):
                window.js(f"document.querySelector('[data-action={action}]').focus()")
                assert window.js("document.activeElement.dataset.action") == action
                window.key(" ")
                window.key("Enter")
                window.js("chain")
                wanted = [Action.HOLD, Action.GO] if word is ActorState.HOLD else [Action.HOLD]
                wait_until(lambda wanted=wanted: len(operator.requested) >= len(wanted))
                # Each key is a request of its own: what stops waits for none, and may come first or last.
                assert sorted(operator.taken()) == sorted(wanted)
        window.js("at('release').focus()")
        window.key("Enter")
        window.js("chain")
        assert window.js("state.control.mine")


def test_a_second_viewer_watches_stops_and_takes_control(window):
    operator = Recorded()
    with serving(operator) as (page, _):
        first = Viewer(page.url, NAMES[0])
        first.post("here")
        window.open(page.url)
        window.until("state.control && !state.control.mine && state.control.holder === 1")
        assert window.js("document.querySelector('[data-action=success]').disabled")
        window.key("s")
        window.until("at('notice').textContent.includes('viewer 1 has control')")
        window.js("document.querySelector('[data-action=stop]').click()")
        window.key(" ")
        wait_until(lambda: len(operator.requested) == 2)
        assert operator.taken() == [Action.STOP, Action.HOLD]
        window.until("state.control.mine")  # the first one is gone for some seconds
        window.js("at('release').click()")
        window.until("state.control.holder === null && !at('take').disabled")
        window.js("at('take').click()")
        window.until("state.control.mine")


def test_what_is_shown(window):
    operator = Recorded()
    nasty = "<img src=x onerror=alert(1)>"
    with serving(operator) as (page, feed):
        feed.decided(0, np.zeros((5, 3), np.float32), {"q": np.float32(0.25), "q_spread": np.float32(0.1)})
        for tick in range(20):
            image = np.full((12, 16, 3), 10 * tick, np.uint8)
            feed.step(step(tick, Source.HUMAN if tick > 10 else Source.POLICY, image=image), {})
        window.open(page.url)
        show(window, operator, ConsoleState(ActorState.HOLD, countdown=1.5, obstacles=(Obstacle(nasty, "start it"),)))
        window.until("document.querySelector('figure img').naturalWidth === 16")
        window.until("at('q_value').textContent === '0.25' && at('v0').textContent === '-19'")
        assert window.js("at('countdown').textContent") == "moves in 2 s"
        assert window.js("document.querySelectorAll('#obstacles img').length") == 0
        assert nasty in window.js("at('obstacles').textContent")
        wait = "document.querySelector('figcaption.old').textContent.includes('s old')"
        window.until(wait)  # no new frame comes
        page.close()
        window.until("at('word').textContent === 'THE ACTOR HAS ENDED'")
    assert window.dialogs == []


def test_a_page_without_events_moves_nothing(window, monkeypatch):
    operator = Recorded()
    with serving(operator) as (page, _):
        window.open(page.url)
        show(window, operator, ConsoleState(ActorState.HOLD))
        monkeypatch.setattr(server, "PERIOD", 3600.0)  # of what comes after the next event, which is the last
        window.until("at('word').textContent === 'NO CONNECTION'")
        window.key("Enter")
        window.js("chain")
        window.key("x")
        wait_until(lambda: operator.requested)
        assert operator.taken() == [Action.STOP]
