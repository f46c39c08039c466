"""The live page in a browser: buttons and keys in each state, two viewers, and a lost actor."""

from __future__ import annotations

import os
import re
import time

import numpy as np
import pytest
from chromium import MISSING, Chromium
from live_desk import NAMES, Recorded, Viewer, serving, step
from processes import Process
from robot_served import wait as wait_until

from serl_chunk.console.bindings import EFFECTIVE, KEYS, REPEAT, STOPS, Action, ActorState
from serl_chunk.console.view import ConsoleState, Obstacle
from serl_chunk.live import server
from serl_chunk.robots.served.cameras import SeenPicture
from serl_chunk.types import Begin, End, Outcome, Source
from serl_chunk_robot.robot_file.camera_views import FLIPS, TURNS, View

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


def ended(feed, outcome: Outcome, ticks: int = 25) -> None:
    feed.begin(Begin("next"))
    for tick in range(ticks):
        feed.step(step(tick, Source.HUMAN if tick < 5 else Source.POLICY), {})
    feed.ended(End("next", ticks, None, True, False, outcome, "operator"))


def test_the_last_episodes_and_how_often_they_succeed(window):
    with serving(Recorded()) as (page, feed):
        window.open(page.url)
        for outcome in (Outcome.FAILURE, *[Outcome.SUCCESS] * 9, Outcome.UNKNOWN):
            ended(feed, outcome)
        first = "document.querySelector('#episodes tr').textContent"
        window.until(f"{first} === '12unknown by operator0.5 shuman 20 %'")  # the first one is under way for ever
        assert window.js("document.querySelectorAll('#episodes tr').length") == 8
        window.until("at('success').textContent === '82 % of 11'")
        feed.correct("discarded")
        window.until("document.querySelector('#episodes .discarded') && at('success').textContent === '90 % of 10'")
        feed.correct("kept")
        window.until("!document.querySelector('#episodes .discarded')")


def test_cameras_are_grey_between_episodes_where_the_control_loop_alone_reads_them(window):
    with serving(Recorded()) as (page, feed):
        feed.step(step(0, image=np.zeros((12, 16, 3), np.uint8)), {})
        window.open(page.url)
        caption = "document.querySelector('figcaption')"
        window.until(f"{caption}.className === 'old'")
        feed.ended(End("episode-1", 1, None, False, True, Outcome.UNKNOWN, "operator"))
        window.until(f"{caption}.className === '' && {caption}.textContent === 'front: not read now'")
        feed.begin(Begin("episode-2"))
        window.until(f"{caption}.className === 'old'")


class Still:
    """The picture of a robot server's camera that no longer comes, as a table of its file shows it."""

    def __init__(self, view: View, image: np.ndarray) -> None:
        x, y, width, height = view.crop
        self.seen = SeenPicture(view.apply(image), 1, 0.0, [x, y, width, height, view.rotate, view.flip])

    def newest(self):
        return {"front": self.seen}

    def rest(self) -> None: ...


def test_a_dragged_crop_is_a_line_for_the_robots_file_and_a_click_zooms(window):
    image = np.arange(240 * 320 * 3).reshape(240, 320, 3).astype(np.uint8)
    picture, code = "figure img", "document.querySelector('figure code').textContent"
    with serving(Recorded(), cameras=Still(View((30, 50, 200, 100), 90, "horizontal"), image)) as (page, feed):
        feed.ended(End("episode-1", 1, None, False, True, Outcome.UNKNOWN, "operator"))
        window.open(page.url)
        window.until("document.querySelector('figure img').naturalWidth === 100")
        assert window.js("document.querySelector('figcaption').className") == "old"  # it should come now, too
        for turn in TURNS:
            for flip in ("", *FLIPS):
                view = View((30, 50, 200, 100), turn, flip)
                shown = view.apply(image)
                height, width = shown.shape[:2]
                camera = {"view": [*view.crop, turn, flip], "width": width, "height": height}
                corners = [10 / width, 20 / height, 40 / width, 90 / height]
                crop = window.js(f"cropOf({camera}, {corners})")
                assert np.array_equal(View(tuple(crop), turn, flip).apply(image), shown[20:90, 10:40]), (turn, flip)
        small = window.js("document.querySelector('figure img').height")
        window.drag(picture, (0.25, 0.25), (0.75, 0.75))
        window.until(f"{code}.startsWith('crop = [')")
        crop = [int(n) for n in re.findall(r"\d+", window.js(code))]
        assert np.allclose(crop, [80, 75, 100, 50], atol=3)
        window.drag(picture, (0.5, 0.5), (0.5, 0.5))  # a click takes the crop away, the next one zooms
        window.until(f"{code} === ''")
        window.drag(picture, (0.5, 0.5), (0.5, 0.5))
        window.until(f"document.querySelector('figure img').height > 1.5 * {small}")
        assert window.faults == []
    with serving(Recorded()) as (page, feed):
        feed.step(step(0, image=np.zeros((12, 16, 3), np.uint8)), {})
        window.open(page.url)
        window.until("document.querySelector('figure img').naturalWidth === 16")
        window.drag(picture, (0.25, 0.25), (0.75, 0.75))
        window.until(f"{code} === 'img[3:9, 4:12]'")


def test_a_human_drives_with_the_page_and_nothing_is_recorded(window, tmp_path):
    words = ["teleoperate", "--exp_name", "fake_single_arm", "--config.actor.intervention=scripted", "--viewer", "0",
             "--config.robot.max_episode_steps=5000"]  # fmt: skip
    (home := tmp_path / "home").mkdir()
    process = Process(words, tmp_path / "log", {**os.environ, "HOME": str(home)}, cwd=home)
    try:
        process.says("live page: ")
        window.open(re.findall(r"http://127\S+", process.output)[0])
        for outcome, key in (("success", "s"), ("failure", "f")):
            window.until("state.word === 'HUMAN' && state.event.inside && state.ticks.at(-1).tick > 5")
            window.until("document.querySelector('figure img').naturalWidth > 0")
            window.key(key)
            window.until(f"document.querySelector('#episodes td.{outcome}')")
        window.until("at('progress').textContent === 'nothing is recorded: 2 episodes driven'")
        window.until("state.word === 'HUMAN' && state.event.inside")
        window.key("q")
        window.until("at('question').textContent !== ''")
        time.sleep(2 * REPEAT)
        window.key("q")
        process.says("ends after this episode")
        window.key("s")
        window.until("at('word').textContent === 'THE ACTOR HAS ENDED'")
        assert "episodes driven, nothing recorded" in process.ends(0)
    finally:
        process.close()
    assert [*home.rglob("*.hdf5")] == []


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
