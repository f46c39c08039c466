"""The page of a run: its figures, curves, tables and films, and the comparison of several runs."""

import base64
import html.parser
import json
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from errors import naming
from matplotlib.figure import Figure
from metric_logs import Clock, add_episode, add_evaluation, open_log

from serl_chunk.runs.evaluations import VALIDATION, save
from serl_chunk.runs.folder import CONFIG, FORMAT
from serl_chunk.runs.metrics import METRICS_FILE, Counters, MetricsLog, RunMetrics, read_metrics
from serl_chunk.runs.report import panels
from serl_chunk.runs.report.panels import rolling_mean
from serl_chunk.runs.report.report import build_comparison, build_report
from serl_chunk.runs.report.tables import robot_time
from serl_chunk.types import ConfigError, DataError
from serl_chunk.viz.plots import MAX_POINTS, PAGE_INK, downsample

pytestmark = pytest.mark.compiles

FIGURES = {
    "success": "Success rate of 30 episodes",
    "return": "Undiscounted return of 30 episodes",
    "intervention": "Share of human steps",
    "q-return": "critic's value at decisions",
    "losses": "critic/critic_loss, actor/actor_loss",
    "rates": "Updates and environment steps per second",
}


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
    for film in FILMS:
        (run / film).parent.mkdir(parents=True)
        (run / film).write_bytes(b"mp4")
    (run / "videos/training/films.json").write_text(json.dumps([{"number": 28, "file": "000028.mp4"}]))
    return build_report(run)


FILMS = ("videos/290_mean/mean_000_success.mp4", "videos/training/000028.mp4")


@pytest.fixture(scope="module")
def page(full):
    return Page(full)


def test_the_page_has_every_plot_with_its_alternative_text_over_every_axis(full, page):
    assert full.name == "report.html"
    assert set(page.images) == set(FIGURES)
    for key, words in FIGURES.items():
        assert words in page.images[key]["alt"]
        assert page.images[key]["src"].startswith("data:image/svg+xml;base64,")
        assert ET.fromstring(svg_of(page, key)).tag.endswith("svg")
    for key in ("success", "return", "intervention"):
        for label in ("environment steps", "human ticks", "wall time (min)"):
            assert svg_of(page, key).count(f">{label}</text>") == 1
    assert "Evaluations, which have no interventions, decide" in page.texts["success"]


def test_the_headline_numbers_are_those_of_the_run(page):
    assert {name: page.headline[name] for name in HEADLINE} == HEADLINE


HEADLINE = {
    "Evaluation":
        "97.0 % success in 100 episodes (95 % Wilson interval 91.5 % to 99.0 %), mean policy of checkpoint 290",
    "Success without intervention, last 20 episodes": "7 of 20 (35.0 %)",
    "Success with or without intervention, last 20": "13 of 20 (65.0 %)",
    "Duration": "6:15", "Critic updates": "290", "Environment steps": "3,000",
    "Human ticks": "200 (4.0 s, 6.7 % of environment steps)", "Episodes": "30 (6 of them warm-up)",
}  # fmt: skip


def test_the_page_needs_nothing_but_itself_and_follows_the_readers_colour_scheme(full, page):
    text = full.read_text()
    assert not any(part in text for part in ("http://", "https://", "<script", "<b>"))
    assert all(a.startswith("data:image/svg+xml;base64,") or a in FILMS for a in page.addresses)
    for key in page.images:
        svg = ET.fromstring(svg_of(page, key))
        links = [value for element in svg.iter() for name, value in element.attrib.items() if name.endswith("href")]
        assert all(link.startswith(("#", "data:")) for link in links)
    svg = svg_of(page)
    assert ("prefers-color-scheme:dark" in svg, "currentColor" in svg, PAGE_INK in svg) == (True, True, False)


def test_versions_host_and_changed_settings_are_shown_by_path_and_escaped(page):
    for value in ("0.1.0, commit abc-dirty", "gpu7", "serl-chunk --seed 3", "3.11.9", "0.10.0"):
        assert value in page.texts["origin"]
    changed, others = page.texts["configuration"].split("other settings")
    for text in ("discount0.90.985", "agent.lr0.0010.0003", "robot.task", "pick <b>it</b>"):
        assert text in changed
    assert "seed42" in others
    assert "process" not in changed


def test_the_picture_is_a_png_of_four_panels(full):
    data = (full.parent / "report.png").read_bytes()
    assert data.startswith(b"\x89PNG")
    assert (int.from_bytes(data[16:20]), int.from_bytes(data[20:24])) == (1400, 1000)
    reports = sorted(path.name for path in full.parent.iterdir() if path.name.startswith("report"))
    assert reports == ["report.html", "report.json", "report.png"]


def test_episodes_are_listed_with_their_films(page):
    films = [address for address in page.addresses if address.endswith("mp4")]
    assert sorted(films) == sorted(FILMS * 2)  # a player and a link each
    for text in (
        "training episode 28: success, 100 steps, human 20%",
        "evaluation of checkpoint 290, mean policy, episode 0: success, 75 steps",
        "10 earlier episodes",  # 20 of 30 are shown
        "a human acts", "In the 10 episodes in which control passed",
        "at most 37 rad/s² there and 42 rad/s² at other ticks",
    ):  # fmt: skip
        assert text in page.texts["episodes"]


def test_curves_hold_the_right_values(full):
    metrics = read_metrics(full.parent)
    x, alone = line(panels.draw_success, metrics, "without intervention", "env_steps")
    assert (x[-1], alone[-1]) == (3_000, 7 / 20)  # of episodes 10..29, those of the human included
    x, every_episode = line(panels.draw_success, metrics, "with or without intervention", "wall")
    assert (x[-1], every_episode[-1]) == (6.25, pytest.approx(13 / 20))
    assert line(panels.draw_intervention, metrics, "of steps", "human_ticks")[1][-1] == pytest.approx(6 * 20 / 2_000)
    ax = Figure().subplots()
    assert panels.calibration_panel(None)(ax, metrics)
    values, returns = ax.containers[0].lines[0].get_data()
    assert values.min() == pytest.approx(0.4)
    assert returns[values == 0.6].mean() == pytest.approx(0.5, abs=0.1)
    assert [line(panels.draw_replay, metrics, half)[1][-1] for half in ("online", "demo")] == [3_000, 400]
    assert line(panels.draw_waits, metrics, "learner waits for actors")[1] == pytest.approx([0.2] * 30)


def test_success_without_intervention_begins_where_humans_helped_everywhere(tmp_path):
    """A run whose first episodes are all a human's work begins at 0, and does not begin at 100 % to fall from there."""
    with open_log(tmp_path) as log:
        for i in range(40):
            add_episode(log, Counters(i, 100 * i, 0), intervention_count=int(i < 20))
    _, alone = line(panels.draw_success, read_metrics(tmp_path), "without intervention", "env_steps")
    assert np.nan_to_num(alone)[:20].tolist() == [0.0] * 20
    assert alone[-1] == 1.0
    assert (np.diff(alone[20:]) >= 0).all()


@pytest.mark.parametrize(("losses", "scale"), [((1.0, 0.1), "log"), ((1.0, 0.2), "linear"), ((1.0, -0.01), "linear")])
def test_a_loss_is_logarithmic_where_it_spans_a_decade(tmp_path, losses, scale):
    with open_log(tmp_path) as log:
        for step, loss in enumerate(losses):
            log.train(Counters(step, 0, 0), {"critic/critic_loss": loss})
    ax = Figure().subplots()
    assert panels.loss_panel("critic/critic_loss")(ax, read_metrics(tmp_path))
    assert ax.get_yscale() == scale


def test_means_look_back_twenty_episodes_and_long_curves_are_thinned_to_their_ends():
    means = rolling_mean([0.0] * 20 + [1.0] * 10)
    assert (means[19], means[24], means[29]) == pytest.approx((0.0, 0.25, 0.5))
    assert rolling_mean([1.0, 0.0])[-1] == 0.5
    x, y = downsample(np.arange(100_000.0), np.arange(100_000.0))
    assert (len(x), x[0], y[-1]) == (MAX_POINTS, 0.0, 99_999.0)


def test_an_empty_run_says_what_is_missing(tmp_path):
    (tmp_path / METRICS_FILE).write_text("")
    page = Page(build_report(tmp_path))
    assert page.images == {}
    for section, text in (("success", "No episode has finished in this run yet."),
                          ("losses", "No training step has been logged"),
                          ("evaluations", "No evaluation has been made")):  # fmt: skip
        assert text in page.texts[section]
    assert page.headline["Evaluation"] == "not evaluated yet"
    assert page.texts["origin"].count("not recorded") == 5
    assert (tmp_path / "report.png").stat().st_size > 0
    (tmp_path / CONFIG).write_text("{")
    with pytest.raises(ConfigError, match=naming("config.json", "damaged")):
        build_report(tmp_path)
    with pytest.raises(DataError, match=naming(tmp_path / "nowhere", "metrics.jsonl")):
        build_report(tmp_path / "nowhere")


def test_a_run_without_human_training_or_evaluation_shows_what_it_has(tmp_path):
    page = Page(build_report(write_run(tmp_path, episodes=3, human=False, train=False, evaluate=False)))
    assert set(page.images) == {"success", "return", "q-return"}
    assert "No human has acted in this run." in page.texts["intervention"]
    assert "A human" not in page.texts["success"]
    assert ">wall time (min)</text>" in svg_of(page)  # and no empty place where human ticks would be
    assert "human ticks" not in svg_of(page) + page.images["success"]["alt"]
    assert page.headline["Human ticks"] == "0 (0.0 % of environment steps)"


def test_rows_with_null_values_do_not_stop_the_report(tmp_path):
    nan, at = float("nan"), Counters(1, 10, 0)
    with open_log(tmp_path) as log:
        for loss in (nan, 0.5, float("inf")):
            log.train(at, {"critic/critic_loss": loss, "wait/learner_s": loss, "rates/updates_per_s": loss})
        add_episode(log, at, ret=nan, succeed=None, intervention_count=0, q=[nan], g=[0.5])
        for repeat in (True, False, None):
            add_evaluation(log, at, starts_repeat=repeat, success_rate=nan, n=0, low=nan, high=nan, mean_time_s=nan)
    page = Page(build_report(tmp_path))
    assert page.headline["Evaluation"] == "not evaluated yet"
    assert page.headline["Success without intervention, last 20 episodes"] == "none yet"
    assert "losses" in page.images
    assert "critic/critic_loss is not finite" in page.texts["events"]
    for text in ("unknown", "held-out", "ignore the seed", "not compared"):  # and what starts do about the seed
        assert text in page.texts["evaluations"]


def test_a_resumed_run_with_a_torn_line_is_counted_once_and_says_so(tmp_path):
    write_run(tmp_path, episodes=10, evaluate=False)
    with MetricsLog(tmp_path, wandb_project=None, wandb_name="", config={}) as log:
        log.resumed(Counters(40, 500, 40), episodes=5)
    with (tmp_path / METRICS_FILE).open("a") as file:
        file.write('{"kind": "tra')
    report = build_report(tmp_path)
    page = Page(report)
    assert page.headline["Episodes"] == "5 (5 of them warm-up)"
    assert page.headline["Environment steps"] == "500"
    assert "resumed at step 40" in page.texts["events"]
    for text in ("10 rows that a previous process wrote", "1 line of metrics.jsonl skipped"):
        assert text in report.read_text()


def test_an_evaluation_made_later_stands_where_its_checkpoint_was_written(tmp_path):
    write_run(tmp_path, evaluate=False)
    with MetricsLog(tmp_path, wandb_project=None, wandb_name="", config={}, clock=iter([0.0, 600.0]).__next__) as log:
        add_evaluation(log, Counters(100, 1_100, 20))
    metrics = read_metrics(tmp_path)
    assert metrics["eval"][0]["wall"] == 375 + 600
    ax = Figure().subplots()
    panels.draw_success(ax, metrics, "wall")
    assert ax.containers[0].lines[0].get_xdata() == pytest.approx([11 * 12.5 / 60])
    page = Page(build_report(tmp_path))
    assert "1,100 steps, 2:18" in page.texts["evaluations"]
    names = ("Critic updates", "Environment steps", "Duration")
    assert [page.headline[name] for name in names] == ["290", "3,000", "6:15"]


def test_an_offline_run_has_its_curve_over_updates_and_over_time_and_one_for_each_arm(tmp_path):
    with open_log(tmp_path, clock := Clock()) as log:
        for step in (20, 10, 30):  # in any order
            clock.now += 60
            log.train(Counters(step, 0, 0), {"critic/critic_loss": 1.0})
            add_evaluation(log, Counters(step, 0, 0), success_rate=step / 30, by="learner", arm="one")
            add_evaluation(log, Counters(step, 0, 0), success_rate=0.8, by="learner", arm="best")
    save(tmp_path, 20, VALIDATION, [{"success_rate": r, "n": 9, "arm": arm} for arm, r in (("one", 0.7), ("best", 1))])
    page = Page(build_report(tmp_path))
    ax = Figure().subplots()
    panels.draw_success(ax, read_metrics(tmp_path), "step")
    curves = [c.lines[0] for c in ax.containers]
    assert [c.get_xdata().tolist() for c in curves] == [[10, 20, 30]] * 2
    assert [c.get_ydata().tolist() for c in curves] == [[pytest.approx(s / 30) for s in (10, 20, 30)], [0.8] * 3]
    for label in ("critic updates", "wall time (min)"):
        assert f">{label}</text>" in svg_of(page)
    assert "environment steps" not in svg_of(page)
    for wanted in ("mean one policy, its last checkpoints: mean 66.7 %, deviation 27.2, lowest 33.3 %, of 3",
                   "deviation 0.0", "best was better than one on validation starts (100 and 70 % of 9)"):  # fmt: skip
        assert wanted in page.texts["evaluations"]


def test_runs_are_compared_on_one_page(tmp_path):
    runs = [write_run(tmp_path / name, episodes=n) for name, n in (("a", 30), ("b", 12))]
    for run, lr in zip(runs, (1e-3, 3e-4), strict=True):
        write_config(run, {"name": "x", "agent": {"kind": "acfql", "lr": lr, "candidates": 8}, "run_id": run.name})
    path = build_comparison(runs)
    assert path == runs[0] / "report_vs_b.html"
    page = Page(path)
    assert {"Success", "Evaluations", "Return", "Intervention", "Critic"} == set(page.images)
    assert page.texts["configuration"].strip().endswith("settingabagent.lr0.0010.0003")
    assert "Environment steps3,0001,200" in page.texts["numbers"].replace("\n", "")
    with pytest.raises(ConfigError, match=naming("run_dirs", runs[0])):
        build_comparison([runs[0], runs[0]])


def ended(length, succeed, helped=0):
    row = {"kind": "episode", "wall": 1.0, "step": 1, "env_steps": 1, "human_ticks": 90}
    return row | {"episode/l": length, "succeed": succeed, "intervention_count": helped}


def test_cost_and_gain_are_counted_in_the_robots_time():
    lost = [ended(1, 0)] * 4  # as long a streak as no success makes
    rows = [*lost, ended(600, 1), ended(300, 1), ended(600, 1, helped=1), ended(200, 1), ended(100, 1), ended(400, 1),
            ended(900, 0), ended(50, None)]  # fmt: skip
    found = robot_time(RunMetrics(episode=rows), 10.0, [150, 100, 250], window=5)
    assert found.robot_minutes == pytest.approx(3154 / 600)
    assert found.successes_per_10_min == pytest.approx(3 / (2200 / 6000))  # the first of the five was helped
    assert (found.human_seconds, found.longest_streak) == (9.0, 3)
    assert (found.success_s, found.demonstration_s) == (20.0, 15.0)
    nothing = robot_time(RunMetrics(episode=[], eval=[]), 10.0, [], window=5)
    assert nothing == (0.0, 0.0, None, 0, None, None)
