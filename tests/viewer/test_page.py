"""The page in a browser: list, filters, keys, playing, labels, and the page that needs no viewer."""

from __future__ import annotations

from pathlib import Path

import pytest
import viewed
from chromium import MISSING, Chromium
from metric_logs import add_episode, add_evaluation, open_log
from viewed import LENGTH, viewing

from serl_chunk.data.paths import open_episodes
from serl_chunk.data.source import ReadOptions
from serl_chunk.runs.episodes import RunSource
from serl_chunk.runs.metrics import Counters
from serl_chunk.types import ConfigError, Outcome
from serl_chunk.viewer import run_page
from serl_chunk.viewer.export import write_page
from serl_chunk.viewer.run_page import RunPageProcess

pytestmark = [pytest.mark.system, pytest.mark.skipif(bool(MISSING), reason=f"needs {' and '.join(MISSING)}")]


@pytest.fixture(scope="module")
def browser():
    with Chromium() as browser:
        yield browser


@pytest.fixture
def window(browser):
    return browser.renew()


def address(browser) -> str:
    return f"http://127.0.0.1:{browser.port}{browser.prefix}"


def set_filter(window: Chromium, name: str, value: str) -> None:
    window.js(
        f"(() => {{ const e = document.querySelector('[name={name}]'); e.value = '{value}'; "
        "e.dispatchEvent(new Event('input', {bubbles: true})) })()"
    )


def listed(window: Chromium) -> list[int]:
    """Numbers of the rows that the page shows."""
    return window.js("[...document.querySelectorAll('#rows .row')].map((row) => Number(row.children[0].textContent))")


def test_a_run_is_listed_filtered_played_and_labelled(tmp_path, window):
    folder = viewed.run_folder(tmp_path / "run")
    with viewing(folder) as browser:
        window.open(address(browser))
        window.until("document.querySelectorAll('#rows .row').length === 4 && state.episode")
        assert listed(window) == [0, 1, 2, 3]
        set_filter(window, "outcome", "success")
        assert listed(window) == [0, 3]
        set_filter(window, "outcome", "")
        set_filter(window, "q_max", "-1.5")
        assert listed(window) == [2, 3]
        set_filter(window, "q_max", "")
        set_filter(window, "human_min", "10")
        assert listed(window) == [2, 3]
        set_filter(window, "human_min", "")
        window.js("document.querySelector('[data-name=lowest_q]').click()")
        assert listed(window) == [3, 2, 1, 0]
        window.js("document.querySelector('[data-name=number]').click()")

        for _ in range(2):
            window.key("ArrowDown")
        window.until("state.chosen === 2 && state.episode.id === 'e2'")
        window.key("ArrowRight")
        window.key("ArrowRight", shift=True)
        assert window.js("state.tick") == 11
        window.key("Home")
        window.until("[...document.querySelectorAll('figure img')].every((i) => i.naturalWidth > 0)")
        window.key(" ")
        window.until(f"!state.playing && state.tick === {LENGTH - 1}")
        assert "frame of tick 9" in window.js("document.querySelectorAll('figcaption')[1].textContent")

        window.key("s")
        window.until("document.querySelector('#labelled').textContent === 'written'")
        assert window.js("document.querySelector('[data-label=success]').getAttribute('aria-pressed')") == "true"
        window.key("ArrowDown")
        window.until("state.chosen === 3 && state.episode.id === 'e3'")
        window.key("Backspace")
        window.until("state.rows[3].label === 'discard'")
        assert len(window.dialogs) == 1
    assert window.faults == []
    source = RunSource(folder)
    assert source.about("a/e2").outcome is Outcome.SUCCESS
    assert "b/e3" not in source.keys()


def test_keys_that_are_typed_into_a_filter_label_nothing(tmp_path, window):
    folder = viewed.hdf5_folder(tmp_path / "demos")
    with viewing(folder) as browser:
        window.open(address(browser))
        window.until("state.episode && state.rows.length === 4")
        window.key("/")
        for letter in "sfu":
            window.key(letter)
        window.key("Backspace")
        assert window.js("document.querySelector('[name=text]').value") in ("sfu", "sf")
        assert not any(row["label"] for row in browser.rows())
    assert not (folder / "labels.json").exists()


def test_an_unreadable_episode_is_shown_with_its_reason_and_sorted_last(tmp_path, window):
    folder = viewed.hdf5_folder(tmp_path / "demos")
    (folder / "episode_1.hdf5").write_bytes(b"no HDF5")
    with viewing(folder) as browser:
        window.open(address(browser) + "#1")
        window.until("state.rows.length === 4 && document.querySelector('#fault').textContent")
        assert "episode_1.hdf5" in window.js("document.querySelector('#fault').textContent")
        for expected in ([3, 2, 0, 1], [0, 2, 3, 1]):
            window.js("document.querySelector('[data-name=lowest_q]').click()")
            assert listed(window) == expected
        set_filter(window, "outcome", "error")
        assert listed(window) == [1]


def test_names_of_episodes_are_text(tmp_path, window):
    """What a file names must not become part of the page."""
    folder = tmp_path / "demos"
    folder.mkdir()
    episode = viewed.episodes()[0]
    nasty = "<img src=x onerror=alert(1)>"
    viewed.write_episode(folder / "a.hdf5", episode._replace(begin=episode.begin._replace(task=nasty)), viewed.SPEC)
    with viewing(folder) as browser:
        window.open(address(browser))
        window.until("state.episode")
        assert window.js("document.querySelectorAll('#facts img').length") == 0
        assert nasty in window.js("document.querySelector('#facts').textContent")
    assert window.dialogs == []
    assert window.faults == []


def test_the_written_page_works_without_a_viewer(tmp_path: Path, window):
    source = open_episodes(viewed.hdf5_folder(tmp_path / "demos"), ReadOptions(labels=False))
    write_page(tmp_path / "page.html", source, [1, 2], 5_000_000)
    window.open((tmp_path / "page.html").as_uri())
    window.until("state.episode && state.rows.length === 4")
    assert window.js("state.chosen") == 1
    window.until("document.querySelector('figure img').naturalWidth > 0")
    assert window.js("getComputedStyle(document.querySelector('#labels')).display") == "none"
    window.key("s")
    window.key("ArrowDown")
    window.key("ArrowDown")  # number 3 has its row alone
    window.until("state.chosen === 3 && document.querySelector('#fault').textContent")
    assert window.js("getComputedStyle(document.querySelector('#player')).display") == "none"
    assert window.js("state.rows.some((row) => row.label)") is False
    assert window.faults == []


def test_the_page_of_a_run_follows_its_learner_and_leads_to_each_episode(tmp_path, window, monkeypatch):
    folder, figures = viewed.run_folder(tmp_path / "run"), {"updates_due": 7.0, "env_steps": 3.0}
    monkeypatch.setattr(run_page, "PERIOD", 0.1)
    with open_log(folder) as log:
        log.train(Counters(10, 20, 3), {"critic/critic_loss": 0.5, "rates/updates_per_s": 30.0, "wait/actor_s": 0.0})
        for k in range(2):
            add_episode(log, Counters(10, 20, 3), actor_id="s", number=k + 1, episode=f"s/{'ab'[k]}/e{k}")
        page = RunPageProcess(folder, 0, lambda: figures)
        try:
            window.open(page.url)
            window.until("at('figures').textContent === 'updates due 7'")
            figures["updates_due"] = 8.0
            window.until("at('figures').textContent === 'updates due 8'")
            window.until("document.querySelectorAll('svg').length >= 4")
            titles = window.js("[...document.querySelectorAll('figcaption b')].map((b) => b.textContent)")
            assert {"success, last 20", "human acting", "critic/critic_loss", "per second"} <= {*titles}
            add_episode(log, Counters(10, 60, 3), actor_id="s", number=3, episode="s/a/e2", succeed=False)
            add_evaluation(log, Counters(10, 60, 3))
            window.until("document.querySelector('#episodes td.failure') && at('head').textContent.includes('90.0%')")
            window.open(window.js("document.querySelector('#episodes a').href"))
            window.until("state.chosen === 2 && state.episode.id === 'e2'")
            root = page.url.removesuffix("run/")
            window.open(f"{root}?again#key=c%2Fe9")
            window.until("at('empty').textContent.includes('not listed yet')")
        finally:
            page.close()
        with pytest.raises(ConfigError, match="65536"):
            run_page.RunPage(folder, 65536, parameter="run_page")
    assert [fault for fault in window.faults if "ERR_CONNECTION_REFUSED" not in str(fault)] == []
