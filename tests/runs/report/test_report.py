"""The page of a run: figures, curves, calibration, tables and films, and the comparison of several runs."""

import base64
import html.parser
import json
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from coded_replay import coded
from errors import naming
from journal_runs import Run
from matplotlib.figure import Figure
from metric_logs import add_episode, open_log

from serl_chunk.cli.runs import write_episodes
from serl_chunk.config.agents.acfql import AcfqlConfig, DecoupledConfig
from serl_chunk.config.agents.acrlpd import AcrlpdConfig
from serl_chunk.config.experiment import ChunkConfig, ExperimentConfig, RewardConfig
from serl_chunk.config.outcome import OutcomeConfig
from serl_chunk.config.overrides import to_dict
from serl_chunk.config.robots import FakeAlohaConfig
from serl_chunk.runs.folder import CONFIG, FORMAT
from serl_chunk.runs.metrics import KINDS, METRICS_FILE, Counters, MetricsLog, RunMetrics, read_metrics
from serl_chunk.runs.report import panels, report, tables
from serl_chunk.runs.report.panels import binned, decisions, value_range
from serl_chunk.runs.report.report import build_comparison, build_report
from serl_chunk.runs.report.tables import robot_time
from serl_chunk.types import ConfigError, DataError, Source

pytestmark = pytest.mark.compiles


class Page(html.parser.HTMLParser):
    """Images and text of each section, the headline by name, and every address the page mentions."""

    def __init__(self, path):
        super().__init__()
        self.images, self.texts, self.headline, self.addresses, self.open = {}, {}, {}, [], []
        self.section, self._name = "", ""
        self.feed(path.read_text())
        self.close()
        assert not self.open, f"tags left open: {self.open}"

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        if tag not in ("meta", "img"):
            self.open.append(tag)
        if tag == "section":
            self.section = attrs["id"]
        if tag == "img":
            self.images[self.section] = attrs
        self.addresses += [attrs[name] for name in ("src", "href", "srcset") if name in attrs]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts[self.section] = self.texts.get(self.section, "") + data
        if self.open and self.open[-1] == "dt":
            self._name = data
        if self.open and self.open[-1] == "dd":
            self.headline[self._name] = data


def write_config(run, config):
    (run / CONFIG).write_text(json.dumps(config | {"format": FORMAT}))


def write_run(run, episodes=30, human=True, train=True, evaluate=True):
    """Every third episode has an intervention and succeeds; of the others every second one does."""
    now = [0.0]
    with MetricsLog(run, wandb_project=None, wandb_name="", config={}, clock=lambda: now[0]) as log:
        for i in range(episodes):
            now[0] += 12.5
            took = human and i % 3 == 0
            at = Counters(10 * i, 100 * (i + 1), 20 * (i // 3 + 1) if human else 0)
            good = took or i % 2 == 0
            log.episode(
                at, actor_id="a", ret=float(good), length=100, succeed=good, intervention_steps=20 * took,
                intervention_count=int(took), phase="warmup" if i < 6 else "train", q=[0.4, 0.6], g=[0.5 * good, good],
                number=i + 1, seam_acceleration=10.0 + i if took else None, acceleration=15.0 + i,
            )  # fmt: skip
            if train:
                values = {"critic/critic_loss": 0.1, "actor/actor_loss": -0.2, "rates/updates_per_s": 200.0,
                          "wait/learner_s": 2.5, "wait/actor_s": 0.0, "timer/train": 0.004}  # fmt: skip
                values |= dict(zip(panels.REPLAY, (100 * (i + 1), 400), strict=True))
                log.train(at, values)
            if evaluate and i in (15, 29):
                for mode, rate in (("mean", 0.97), ("sampled", 0.9)):
                    log.evaluation(at, success_rate=rate, n=100, low=0.915, high=0.99, mode=mode, mean_time_s=1.5,
                                   mean_length=75.0, checkpoint=at.step)  # fmt: skip
    return run


def write_iterations(run, figures, tasks="ab"):
    """Two iterations of four groups of two episodes each, of which the last ones to end are failures."""
    now = [0.0]
    with MetricsLog(run, wandb_project=None, wandb_name="", config={}, clock=lambda: now[0]) as log:
        for i in range(2):
            now[0] += 60
            at = Counters(i, 800 * (i + 1), 0)
            for k in range(8):
                log.episode(at, actor_id="a", ret=float(k < 3), length=100, succeed=k < 3, phase="train", number=k + 1)
            values = {"group/success": 3 / 8, "group/groups": 4, "group/mixed": 2, "group/solved": i,
                      "group/given_up": 0, "group/reissued": 0, "group/dropped": 0, "group/mastered": 0,
                      "time/collect_s": 9.0, "time/train_s": 3.0, "rates/env_steps_per_s": 80.0}  # fmt: skip
            values |= {f"group/success/{task}": 0.5 for task in tasks}
            log.train(at._replace(step=i + 1), values | figures)
        log.evaluation(Counters(0, 0, 0), success_rate=0.2, n=10, low=0.05, high=0.51, mode="mean", checkpoint=0)
    write_config(run, {"name": "x", "agent": {"kind": "group"}, "group": {"size": 2}, "robot": {"control_hz": 10.0}})
    return run


def line(draw, metrics, label, *x_key):
    """The (x, y) of the curve called `label` in one panel."""
    ax = Figure().subplots()
    draw(ax, metrics, *x_key)
    (found,) = [curve for curve in ax.lines if curve.get_label() == label]
    return found.get_xdata(), found.get_ydata()


def svg_of(page, key="success"):
    return base64.b64decode(page.images[key]["src"].split(",")[1]).decode()


ORIGIN = {
    "serl_chunk": {"version": "0.1.0", "commit": "abc-dirty"},
    "process": {"host": "gpu7", "command": "serl-chunk --seed 3", "python": "3.11.9", "jax": "0.10.0"},
}
CONFIGURED = {
    "name": "fake_aloha", "seed": 42, "discount": 0.9, "agent": {"kind": "acfql", "lr": 1e-3},
    "robot": {"kind": "fake_aloha", "task": "pick <b>it</b>", "control_hz": 50.0, "image_size": 64}, **ORIGIN,
}  # fmt: skip


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    """The report of a run with everything, films included."""
    run = tmp_path_factory.mktemp("fake_aloha") / "run1"
    run.mkdir()
    write_config(run, CONFIGURED)
    write_run(run)
    (run / "evaluations").mkdir()
    episode = {"length": 75, "total_reward": 1.0, "human_ticks": 0}
    results = [{"mode": "mean", "episodes": [episode | {"outcome": o} for o in ("success", "failure")]}]
    evaluation = {"checkpoint": 290, "purpose": "learner", "results": results}
    (run / "evaluations" / "learner_290.json").write_text(json.dumps(evaluation))
    (run / "evaluations" / "learner_150.json").write_text("{")  # damaged: left out
    (run / "policy_checks").mkdir()
    check = {"checkpoint": 0, "lines": ["never <closes>"], "findings": ["never"], "dimensions": [
        {"name": "action 6", "error": 0.5, "held_error": 0.25, "mean_error": 1.0, "saturated": 0.125}]}  # fmt: skip
    (run / "policy_checks" / "0.json").write_text(json.dumps(check))
    (run / "policy_checks" / "100.json").write_text("[]")  # damaged: left out
    (run / "episodes.json").write_text(json.dumps([{"number": 30, "file": PLAYED}]))
    for film in FILMS:
        (run / film).parent.mkdir(parents=True)
        (run / film).write_bytes(b"mp4")
    (run / "videos/training/films.json").write_text(json.dumps([{"number": 28, "file": "000028.mp4"}]))
    return build_report(run)


PLAYED = "episodes.html#29"
FILMS = ("videos/290_mean/mean_000_success.mp4", "videos/training/000028.mp4")


@pytest.fixture(scope="module")
def page(full):
    return Page(full)


def test_the_page_has_the_runs_figures_and_films_and_needs_nothing_but_itself(full, page):
    headline = {
        "Success without intervention, last 20 episodes": "7 of 20 (35.0 %)",
        "Success with or without intervention, last 20": "13 of 20 (65.0 %)",
        "Duration": "6:15",
        "Critic updates": "290",
        "Environment steps": "3,000",
        "Human ticks": "200 (4.0 s, 6.7 % of environment steps)",
        "Episodes": "30 (6 of them warm-up)",
    }
    assert page.headline | headline == page.headline
    assert page.headline["Evaluation"].startswith("97.0 % success in 100 episodes")
    assert page.headline["Evaluation"].endswith("mean policy of checkpoint 290; checkpoint 150: 97.0 %")
    assert set(page.images) == {"success", "return", "intervention", "q-return", "losses", "rates"}
    text = full.read_text()
    assert not any(part in text for part in ("http://", "https://", "<script", "<b>"))
    for key in page.images:
        svg = ET.fromstring(svg_of(page, key))
        links = [value for element in svg.iter() for name, value in element.attrib.items() if name.endswith("href")]
        assert all(link.startswith(("#", "data:")) for link in links)
    films = [address for address in page.addresses if not address.startswith("data:image/svg+xml;base64,")]
    assert sorted(films) == sorted((*FILMS * 2, PLAYED))  # a player and a link each
    assert "11 to 20" in page.texts["intervention"]
    for words in ("never <closes>", "action 60.50.25112.5%"):
        assert words in page.texts["check"]
    for words in ("training episode 28: success, 100 steps, human 20%", "10 earlier episodes"):  # 20 of 30 are shown
        assert words in page.texts["episodes"]
    assert "at most 37 rad/s² there and 42 rad/s² at other ticks" in page.texts["episodes"]
    for value in ("0.1.0, commit abc-dirty", "gpu7", "serl-chunk --seed 3", "3.11.9", "0.10.0"):
        assert value in page.texts["origin"]
    changed, _ = page.texts["configuration"].split("other settings")
    for words in ("discount0.90.985", "agent.lr0.0010.0003", "pick <b>it</b>"):
        assert words in changed
    assert (full.parent / "report.png").read_bytes().startswith(b"\x89PNG")


def test_iterations_on_groups_have_figures_of_their_own(tmp_path):
    page = Page(build_report(write_iterations(tmp_path, RATIOS)))
    headline = {
        "Success of sampled episodes, last iteration": "37.5 %; first iteration: 37.5 %",
        "Groups, last iteration": "4: 2 mixed, 1 solved",
        "Iterations": "2",
        "Successes per 10 min, last 8 episodes": "22.5",  # of 20 all would be counted
    }
    assert page.headline | headline == page.headline
    assert not {"Human ticks", "Critic updates", "Successes in a row, without intervention"} & page.headline.keys()
    assert set(page.images) == {"success", "groups", "losses"}
    assert not {"return", "intervention", "q-return", "rates"} & page.texts.keys()
    begun = dict(report.headline(RunMetrics({kind: [] for kind in KINDS}), {"agent": {"kind": "group"}}))
    assert (begun["Iterations"], begun["Groups, last iteration"]) == ("0", "none yet")


RATIOS = {"actor/approx_kl": 0.02, "actor/clip_fraction": 0.1, "actor/ppo_loss": 0.1}
WEIGHTS = {f"actor/mean_weight{of}": 0.5 for of in ("", "_successes", "_failures")}
ALWAYS = [["mixed", "solved"], ["collecting", "training"], ["environment steps"]]


@pytest.mark.parametrize(("figures", "tasks", "more"), [
    ({}, "a", []),
    (RATIOS, "ab", [["approximate KL", "clip fraction"], ["a", "b"]]),
    (WEIGHTS | {"group/reissued": 3}, "a",
     [["w of all", "w of successes", "w of failures"], ["mastered", "reissued", "dropped", "given up"]]),
])  # fmt: skip
def test_panels_of_groups_are_of_what_is_recorded(figures, tasks, more, tmp_path):
    metrics, labels = read_metrics(write_iterations(tmp_path, figures, tasks)), []
    for draw in panels.group_panels(metrics):
        ax = Figure().subplots()
        assert draw(ax, metrics)
        labels.append([curve.get_label() for curve in ax.lines])
    assert sorted(labels) == sorted([*ALWAYS, *more])
    x, y = line(panels.draw_iterations, metrics, "sampled episodes", "env_steps")
    assert (list(x), list(y)) == ([800, 1600], [3 / 8, 3 / 8])


def test_an_empty_run_has_a_page_and_a_damaged_or_missing_one_is_named(tmp_path):
    (tmp_path / METRICS_FILE).write_text("")
    page = Page(build_report(tmp_path))
    assert (page.images, page.headline["Evaluation"]) == ({}, "not evaluated yet")
    assert "No episode has finished in this run yet." in page.texts["success"]
    (tmp_path / CONFIG).write_text("{")
    with pytest.raises(ConfigError, match=naming("config.json", "damaged")):
        build_report(tmp_path)
    with pytest.raises(DataError, match=naming(tmp_path / "nowhere", "metrics.jsonl")):
        build_report(tmp_path / "nowhere")


def test_runs_are_compared_on_one_page(tmp_path):
    (tmp_path / "b").mkdir()
    runs = [write_run(tmp_path / "a"), write_iterations(tmp_path / "b", {})]
    for run, lr in zip(runs, (1e-3, 3e-4), strict=True):
        write_config(run, {"name": "x", "agent": {"kind": "acfql", "lr": lr, "candidates": 8}, "run_id": run.name})
    path = build_comparison(runs)
    assert path == runs[0] / "report_vs_b.html"
    page = Page(path)
    assert page.texts["configuration"].strip().endswith("settingabagent.lr0.0010.0003")
    for words in ("Critic updates290", "Iterations2", "Environment steps3,0001,600"):  # what a run has none of is empty
        assert words in page.texts["numbers"].replace("\n", "")
    assert "critic updates" not in svg_of(page, "Success")
    with pytest.raises(ConfigError, match=naming("run_dirs", runs[0])):
        build_comparison([runs[0], runs[0]])


def ended(length, succeed, helped=0, number=1):
    row = {"kind": "episode", "wall": 1.0, "step": 1, "env_steps": 1, "human_ticks": 90, "number": number}
    helped_for = {"intervention_count": helped, "intervention_steps": 50 * helped}
    return row | {"episode/l": length, "succeed": succeed, **helped_for}


def test_cost_and_gain_are_counted_in_the_robots_time():
    lost = [ended(1, 0)] * 4  # as long a streak as no success makes
    rows = [*lost, ended(600, 1), ended(300, 1), ended(600, 1, helped=1), ended(200, 1), ended(100, 1), ended(400, 1),
            ended(900, 0), ended(50, None)]  # fmt: skip
    found = robot_time(RunMetrics(episode=rows), 10.0, [150, 100, 250], window=5)
    assert found.robot_minutes == pytest.approx(3154 / 600)
    assert found.successes_per_10_min == pytest.approx(3 / (2200 / 6000))  # the first of the five was helped
    assert (found.human_seconds, found.longest_streak, found.success_s, found.demonstration_s) == (9.0, 3, 20.0, 15.0)
    nothing = robot_time(RunMetrics(episode=[], eval=[]), 10.0, [], window=5)
    assert nothing == (0.0, 0.0, None, 0, None, None, None, 0.0, 0.0)


def test_robot_time_without_a_reset_is_that_of_both_tasks():
    starts = [("reset", 0, 300), ("again", 300, 200), ("other", 900, 100), ("reset", 0, 600)]
    rows = [ended(length, 1) | {"start": start, "since_reset": since} for start, since, length in starts]
    found = robot_time(RunMetrics(episode=rows), 10.0, [], window=5)
    assert (found.resets, found.unreset_minutes, found.longest_unreset_minutes) == (2, 0.5, pytest.approx(1000 / 600))


def test_a_humans_minutes_are_compared_with_the_policys_own_successes():
    assert tables.stretches(RunMetrics(episode=[ended(100, 1, 0, n) for n in range(40)]), 10.0) == []  # no human acted
    early = [ended(100, n % 2, n % 2, n) for n in range(10)]  # each success was helped
    late = [ended(100, None if n == 19 else n % 3 > 0, 0, n) for n in range(10, 20)]
    found = tables.stretches(RunMetrics(episode=early + late), 10.0)
    assert found == [(0, 9, 100.0, 25.0, 0, 10), (10, 19, 100.0, 0.0, 6, 9)]
    assert tables.gain(found).startswith("+160 points of success without intervention (0 to 67 % for 0.4 min)")
    for cell in ("0 to 9", "1:40", "25 s", "25%", "6 of 9 (67%)", "+67 points"):
        assert f"<td>{cell}</td>" in tables.human_time_table(found)
    assert (tables.gain(found[1:]), tables.human_time_table([])) == ("", "")


def test_curves_hold_the_right_values(full):
    metrics = read_metrics(full.parent)
    for draw, label, axis, wanted in (
        (panels.draw_success, "without intervention", "env_steps", (3_000, 7 / 20)),  # of episodes 10..29
        (panels.draw_success, "with or without intervention", "wall", (6.25, 13 / 20)),
        (panels.draw_intervention, "of steps", "human_ticks", (200, 6 * 20 / 2_000)),
    ):
        x, y = line(draw, metrics, label, axis)
        assert (x[-1], y[-1]) == pytest.approx(wanted)
    assert [line(panels.draw_replay, metrics, half)[1][-1] for half in ("online", "demo")] == [3_000, 400]
    assert line(panels.draw_waits, metrics, "learner waits for actors")[1] == pytest.approx([0.2] * 30)


def test_an_interval_by_hand():
    found = decisions([{"q": [0.5, None], "g": [1.0, 0.0]}, {"q": [0.2, 0.4], "g": [None, 0.5]}])  # both are needed
    assert [c.tolist() for c in (found.value, found.realised, found.episode)] == [[0.5, 0.4], [1.0, 0.5], [0, 1]]
    assert found.bias == pytest.approx(-0.3)
    same = [{"q": [0.5, 0.5], "g": [g, g]} for g in (0.0, 1.0, 1.0, 1.0, 0.0)]
    (found,) = binned(decisions(same), 1)
    assert (found.value, found.realised) == (0.5, 0.6)
    # five independent numbers, however often each is said: 1.96 * s / sqrt(5), s the sample deviation
    assert found.half == pytest.approx(1.96 * np.std([0, 1, 1, 1, 0], ddof=1) / np.sqrt(5))
    (few,) = binned(decisions(same[:4]), 1)
    assert np.isnan(few.half)


@pytest.mark.parametrize(("agent", "values", "expected"), [
    (AcfqlConfig(), {}, (0.0, 1.0)),
    (DecoupledConfig(), {"reward": RewardConfig(scale=2.0, offset=-1.0, failure_reward=-100.0),
                         "chunk": ChunkConfig(critic_horizon=10, return_steps=10)}, (-100.0, 1.0)),
    (AcfqlConfig(), {"outcome": OutcomeConfig(classifier="c", stages=("a>b>c",), stage_reward=0.25)}, (0.0, 1.5)),
    (AcrlpdConfig(), {}, None),
])  # fmt: skip
def test_the_range_follows_from_the_runs_configuration(agent, values, expected):
    config = ExperimentConfig("x", FakeAlohaConfig(), agent, discount=0.99, **values)
    found = value_range(to_dict(config))
    assert (found, config.value_range) == (expected if expected is None else pytest.approx(expected), found)
    assert value_range({}) is None


def test_the_newest_episodes_that_the_journal_has_are_filmed_with_the_ticks_of_a_human(tmp_path, monkeypatch):
    filmed = {}

    class Video:
        def __init__(self, path, control_hz):
            self.path, self.shown = path, []
            path.parent.mkdir(parents=True, exist_ok=True)

        def add(self, images, *, human=False):
            assert set(images) == {"images/a", "images/b"}
            self.shown.append(human)

        def finish(self, name):
            filmed[name] = self.shown
            self.path.write_bytes(b"mp4")

    monkeypatch.setattr(tables, "EpisodeVideo", Video)
    monkeypatch.setattr(tables, "ffmpeg_program", lambda: "ffmpeg")
    run = Run(tmp_path / "run")
    episodes = [coded(k, n, "success") for k, n in enumerate((12, 10, 9))]
    episodes[2].source[2:5] = Source.HUMAN
    with run.opened():
        run.feed(episodes)
    with open_log(run.path) as log:
        for number, length in enumerate((12, 11, 9), 1):  # the second is of another length than its row
            add_episode(log, Counters(0, 0, 0), length=length, number=number)
    assert [tables.film_training_episodes(run.path, n) for n in (1, 3)] == [1, 2]
    assert filmed == {"000003.mp4": [False] * 2 + [True] * 3 + [False] * 4, "000001.mp4": [False] * 12}
    index = json.loads((run.path / "videos/training/films.json").read_text())
    assert index == [{"number": 3, "file": "000003.mp4"}, {"number": 1, "file": "000001.mp4"}]
    for _ in range(2):  # the second page takes the place of the first
        write_episodes(run.path, 2)
    assert '"episodes":{"2":{' in (run.path / "episodes.html").read_text()
    index = json.loads((run.path / "episodes.json").read_text())
    assert index == [{"number": 3, "file": "episodes.html#2"}, {"number": 1, "file": "episodes.html#0"}]
