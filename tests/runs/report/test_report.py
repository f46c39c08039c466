import base64
import html.parser
import json
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from errors import naming
from matplotlib.figure import Figure
from metric_logs import Clock, add_evaluation, open_log

from serl_chunk.runs.evaluations import VALIDATION, save
from serl_chunk.runs.folder import CONFIG, FORMAT
from serl_chunk.runs.metrics import METRICS_FILE, Counters, MetricsLog, read_metrics
from serl_chunk.runs.report import panels
from serl_chunk.runs.report.compare import build_comparison
from serl_chunk.runs.report.panels import rolling_mean
from serl_chunk.runs.report.report import build_report
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


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    run = tmp_path_factory.mktemp("fake_aloha") / "run1"
    run.mkdir()
    config = {"name": "fake_aloha", "robot": {"task": "pick <b>it</b>", "control_hz": 50.0}, "chunk": {"horizon": 5}}
    write_config(run, config)
    write_run(run)
    return build_report(run)


def test_the_page_has_every_plot_with_its_alternative_text(full):
    page = Page(full)
    assert full.name == "report.html"
    assert set(page.images) == set(FIGURES)
    for key, words in FIGURES.items():
        assert words in page.images[key]["alt"]
        kind, data = page.images[key]["src"].split(",")
        assert kind == "data:image/svg+xml;base64"
        assert ET.fromstring(base64.b64decode(data)).tag.endswith("svg")


@pytest.mark.parametrize("key", ["success", "return", "intervention"])
def test_curves_stand_over_steps_human_ticks_and_time(full, key):
    svg = base64.b64decode(Page(full).images[key]["src"].split(",")[1]).decode()
    for label in ("environment steps", "human ticks", "wall time (min)"):
        assert svg.count(f">{label}</text>") == 1


def test_a_run_with_a_human_shows_how_far_to_trust_its_success(full):
    assert "Evaluations, which have no interventions, decide" in Page(full).texts["success"]


def test_the_headline_numbers_are_those_of_the_run(full):
    headline = Page(full).headline
    assert headline["Evaluation"] == (
        "97.0 % success in 100 episodes (95 % Wilson interval 91.5 % to 99.0 %), mean policy of checkpoint 290"
    )
    assert headline["Success without intervention, last 20 episodes"] == "7 of 20 (35.0 %)"
    assert headline["Success with or without intervention, last 20"] == "13 of 20 (65.0 %)"
    assert headline["Duration"] == "6:15"
    assert headline["Critic updates"] == "290"
    assert headline["Environment steps"] == "3,000"
    assert headline["Human ticks"] == "200 (4.0 s, 6.7 % of environment steps)"
    assert headline["Episodes"] == "30 (6 of them warm-up)"


def test_the_page_needs_nothing_but_itself(full):
    text = full.read_text()
    assert "http://" not in text
    assert "https://" not in text
    assert "<script" not in text
    assert all(address.startswith("data:image/svg+xml;base64,") for address in Page(full).addresses)
    for image in Page(full).images.values():
        svg = ET.fromstring(base64.b64decode(image["src"].split(",")[1]))
        links = [value for element in svg.iter() for name, value in element.attrib.items() if name.endswith("href")]
        assert all(link.startswith(("#", "data:")) for link in links)


def test_plots_follow_the_readers_colour_scheme(full):
    svg = base64.b64decode(Page(full).images["success"]["src"].split(",")[1]).decode()
    assert "prefers-color-scheme:dark" in svg
    assert "currentColor" in svg
    assert PAGE_INK not in svg


def test_configuration_is_listed_by_path_and_escaped(full):
    text = Page(full).texts["configuration"]
    assert "robot.task" in text
    assert "pick <b>it</b>" in text
    assert "<b>" not in full.read_text()


def test_the_picture_is_a_png_of_four_panels(full):
    data = (full.parent / "report.png").read_bytes()
    assert data.startswith(b"\x89PNG")
    assert (int.from_bytes(data[16:20]), int.from_bytes(data[20:24])) == (1400, 1000)
    assert sorted(path.name for path in full.parent.iterdir() if path.name.startswith("report")) == [
        "report.html", "report.json", "report.png",
    ]  # fmt: skip


def test_curves_hold_the_right_values(full):
    metrics = read_metrics(full.parent)
    x, alone = line(panels.draw_success, metrics, "without intervention", "env_steps")
    assert (x[-1], alone[-1]) == (3_000, 7 / 20)  # of episodes 10..29, those of the human included
    x, every_episode = line(panels.draw_success, metrics, "with or without intervention", "wall")
    assert x[-1] == 6.25
    assert every_episode[-1] == pytest.approx(13 / 20)  # of episodes 10..29
    _, share = line(panels.draw_intervention, metrics, "of steps", "human_ticks")
    assert share[-1] == pytest.approx(6 * 20 / 2_000)
    ax = Figure().subplots()
    assert panels.calibration_panel(None)(ax, metrics)
    (bars,) = ax.containers
    values, returns = bars.lines[0].get_data()
    assert values.min() == pytest.approx(0.4)
    assert returns[values == 0.6].mean() == pytest.approx(0.5, abs=0.1)
    assert line(panels.draw_replay, metrics, "online")[1][-1] == 3_000
    assert line(panels.draw_replay, metrics, "demo")[1][-1] == 400
    _, waits = line(panels.draw_waits, metrics, "learner waits for actors")
    assert waits == pytest.approx([0.2] * 30)


def test_success_without_intervention_begins_where_humans_helped_everywhere(tmp_path):
    """A run whose first episodes are all a human's work begins at 0, and does not begin at 100 % to fall from there."""
    with MetricsLog(tmp_path, wandb_project=None, wandb_name="", config={}) as log:
        for i in range(40):
            helped = i < 20
            log.episode(
                Counters(i, 100 * i, 0), actor_id="a", ret=1.0, length=100, succeed=True, phase="train",
                intervention_steps=20 * helped, intervention_count=int(helped),
            )  # fmt: skip
    metrics = read_metrics(tmp_path)
    _, alone = line(panels.draw_success, metrics, "without intervention", "env_steps")
    assert np.nan_to_num(alone)[:20].tolist() == [0.0] * 20
    assert alone[-1] == 1.0
    assert (np.diff(alone[20:]) >= 0).all()


def test_an_evaluation_made_later_stands_where_its_checkpoint_was_written(tmp_path):
    write_run(tmp_path, evaluate=False)
    with MetricsLog(tmp_path, wandb_project=None, wandb_name="", config={}, clock=iter([0.0, 600.0]).__next__) as log:
        log.evaluation(Counters(100, 1_100, 20), success_rate=0.5, n=10, low=0.2, high=0.8, mode="mean",
                       mean_time_s=1.5, mean_length=75.0, checkpoint=100)  # fmt: skip
    metrics = read_metrics(tmp_path)
    assert metrics["eval"][0]["wall"] == 375 + 600
    ax = Figure().subplots()
    panels.draw_success(ax, metrics, "wall")
    (bars,) = ax.containers
    assert bars.lines[0].get_xdata() == pytest.approx([11 * 12.5 / 60])
    page = Page(build_report(tmp_path))
    assert "1,100 steps, 2:18" in page.texts["evaluations"]
    assert (page.headline["Critic updates"], page.headline["Environment steps"]) == ("290", "3,000")
    assert page.headline["Duration"] == "6:15"


@pytest.mark.parametrize(("repeat", "shown"), [(True, "held-out"), (False, "ignore the seed"), (None, "not compared")])
def test_starts_that_ignore_the_seed_stand_in_the_table_of_evaluations(tmp_path, repeat, shown):
    with open_log(tmp_path, Clock()) as log:
        add_evaluation(log, Counters(5, 9, 0), starts_repeat=repeat)
    assert shown in Page(build_report(tmp_path)).texts["evaluations"]


@pytest.mark.parametrize(("losses", "scale"), [((1.0, 0.1), "log"), ((1.0, 0.2), "linear"), ((1.0, -0.01), "linear")])
def test_a_loss_is_logarithmic_where_it_spans_a_decade(tmp_path, losses, scale):
    with open_log(tmp_path, Clock()) as log:
        for step, loss in enumerate(losses):
            log.train(Counters(step, 0, 0), {"critic/critic_loss": loss})
    ax = Figure().subplots()
    assert panels.loss_panel("critic/critic_loss")(ax, read_metrics(tmp_path))
    assert ax.get_yscale() == scale


def test_rolling_mean_looks_back_twenty_episodes():
    means = rolling_mean([0.0] * 20 + [1.0] * 10)
    assert (means[19], means[24], means[29]) == pytest.approx((0.0, 0.25, 0.5))
    assert rolling_mean([1.0, 0.0])[-1] == 0.5


def test_long_curves_are_thinned_to_their_ends():
    import numpy as np

    x, y = downsample(np.arange(100_000.0), np.arange(100_000.0))
    assert len(x) == MAX_POINTS
    assert (x[0], y[-1]) == (0.0, 99_999.0)


def test_an_empty_run_says_what_is_missing(tmp_path):
    (tmp_path / METRICS_FILE).write_text("")
    page = Page(build_report(tmp_path))
    assert page.images == {}
    assert "No episode has finished in this run yet." in page.texts["success"]
    assert "No training step has been logged" in page.texts["losses"]
    assert "No evaluation has been made" in page.texts["evaluations"]
    assert page.headline["Evaluation"] == "not evaluated yet"
    assert (tmp_path / "report.png").stat().st_size > 0


def test_a_run_without_human_training_or_evaluation_shows_what_it_has(tmp_path):
    page = Page(build_report(write_run(tmp_path, episodes=3, human=False, train=False, evaluate=False)))
    assert set(page.images) == {"success", "return", "q-return"}
    assert "No human has acted in this run." in page.texts["intervention"]
    assert "A human" not in page.texts["success"]
    svg = base64.b64decode(page.images["success"]["src"].split(",")[1]).decode()
    assert ">wall time (min)</text>" in svg  # and no empty place where human ticks would be
    assert "human ticks" not in svg + page.images["success"]["alt"]
    assert page.headline["Human ticks"] == "0 (0.0 % of environment steps)"


def test_rows_with_null_values_do_not_stop_the_report(tmp_path):
    at = Counters(1, 10, 0)
    with MetricsLog(tmp_path, wandb_project=None, wandb_name="", config={}) as log:
        for loss in (float("nan"), 0.5, float("inf")):
            log.train(at, {"critic/critic_loss": loss, "wait/learner_s": loss, "rates/updates_per_s": loss})
        log.episode(at, actor_id="a", ret=float("nan"), length=10, succeed=None, intervention_steps=0,
                    intervention_count=0, phase="train", q=[float("nan")], g=[0.5])  # fmt: skip
        log.evaluation(at, success_rate=float("nan"), n=0, low=float("nan"), high=float("nan"), mode="mean",
                       mean_time_s=float("nan"), mean_length=float("nan"), checkpoint=1)  # fmt: skip
    page = Page(build_report(tmp_path))
    assert page.headline["Evaluation"] == "not evaluated yet"
    assert page.headline["Success without intervention, last 20 episodes"] == "none yet"
    assert "losses" in page.images
    assert "critic/critic_loss is not finite" in page.texts["events"]
    assert "unknown" in page.texts["evaluations"]


def test_a_resumed_run_is_counted_once_and_says_so(tmp_path):
    write_run(tmp_path, episodes=10, evaluate=False)
    with MetricsLog(tmp_path, wandb_project=None, wandb_name="", config={}) as log:
        log.resumed(Counters(40, 500, 40), episodes=5)
    report = build_report(tmp_path)
    page = Page(report)
    assert page.headline["Episodes"] == "5 (5 of them warm-up)"
    assert page.headline["Environment steps"] == "500"
    assert "resumed at step 40" in page.texts["events"]
    assert "10 rows that a previous process wrote" in report.read_text()


def test_a_folder_that_is_no_run_and_a_broken_configuration_are_named(tmp_path):
    with pytest.raises(DataError, match=naming(tmp_path / "nowhere", "metrics.jsonl")):
        build_report(tmp_path / "nowhere")
    (tmp_path / METRICS_FILE).write_text("")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=naming("config.json", "damaged")):
        build_report(tmp_path)


def test_an_offline_run_has_its_curve_over_updates_and_over_time(tmp_path):
    with open_log(tmp_path, clock := Clock()) as log:
        for step in (20, 10, 30):  # in any order
            clock.now += 60
            log.train(Counters(step, 0, 0), {"critic/critic_loss": 1.0})
            add_evaluation(log, Counters(step, 0, 0), success_rate=step / 100, by="learner")
    build_report(tmp_path)
    metrics = read_metrics(tmp_path)
    ax = Figure().subplots()
    panels.draw_success(ax, metrics, "step")
    curve = ax.containers[0].lines[0]
    assert curve.get_xdata().tolist() == [10, 20, 30]
    assert curve.get_ydata().tolist() == [0.1, 0.2, 0.3]
    svg = base64.b64decode(Page(tmp_path / "report.html").images["success"]["src"].split(",")[1]).decode()
    for label in ("critic updates", "wall time (min)"):
        assert f">{label}</text>" in svg
    assert "environment steps" not in svg


def test_arms_are_curves_of_their_own_with_their_spread_and_which_was_better(tmp_path):
    with open_log(tmp_path) as log:
        for step, rate in ((10, 0.5), (20, 0.9), (30, 1.0)):
            add_evaluation(log, Counters(step, 0, 0), success_rate=rate, arm="one")
            add_evaluation(log, Counters(step, 0, 0), success_rate=0.8, arm="best")
    save(tmp_path, 20, VALIDATION, [{"success_rate": r, "n": 9, "arm": arm} for arm, r in (("one", 0.7), ("best", 1))])
    build_report(tmp_path)
    text = Page(tmp_path / "report.html").texts["evaluations"]
    for wanted in ("mean one policy, its last checkpoints: mean 80.0 %, deviation 21.6, lowest 50.0 %, of 3",
                   "deviation 0.0", "best was better than one on validation starts (100 and 70 % of 9)"):  # fmt: skip
        assert wanted in text
    ax = Figure().subplots()
    panels.draw_success(ax, read_metrics(tmp_path), "step")
    assert [c.lines[0].get_ydata().tolist() for c in ax.containers] == [[0.5, 0.9, 1.0], [0.8, 0.8, 0.8]]


def test_versions_host_and_changed_settings_are_shown(tmp_path):
    (tmp_path / METRICS_FILE).write_text("")
    config = {
        "name": "x", "seed": 42, "discount": 0.9, "robot": {"kind": "fake_aloha", "control_hz": 25.0, "image_size": 64},
        "agent": {"kind": "acfql", "lr": 1e-3}, "serl_chunk": {"version": "0.1.0", "commit": "abc-dirty"},
        "process": {"host": "gpu7", "command": "serl-chunk --seed 3", "python": "3.11.9", "jax": "0.10.0"},
    }  # fmt: skip
    write_config(tmp_path, config)
    texts = Page(build_report(tmp_path)).texts
    for value in ("0.1.0, commit abc-dirty", "gpu7", "serl-chunk --seed 3", "3.11.9", "0.10.0"):
        assert value in texts["origin"]
    changed, others = texts["configuration"].split("other settings")
    for text in ("discount0.90.985", "agent.lr0.0010.0003", "robot.control_hz25.050.0"):
        assert text in changed
    assert "seed42" in others
    assert "process" not in changed


def test_an_origin_that_is_not_recorded(full):
    assert Page(full).texts["origin"].count("not recorded") == 5


def test_episodes_are_listed_with_their_films(tmp_path):
    write_run(tmp_path)
    (tmp_path / "evaluations").mkdir()
    episodes = [
        {"outcome": outcome, "length": 75, "total_reward": 1.0, "human_ticks": 0} for outcome in ("success", "failure")
    ]
    results = [{"mode": "mean", "episodes": episodes}]
    evaluation = {"checkpoint": 290, "purpose": "learner", "results": results}
    (tmp_path / "evaluations" / "learner_290.json").write_text(json.dumps(evaluation))
    (tmp_path / "evaluations" / "learner_150.json").write_text("{")  # damaged: left out
    for film in ("290_mean/mean_000_success.mp4", "training/000028.mp4"):
        (tmp_path / "videos" / film).parent.mkdir(parents=True)
        (tmp_path / "videos" / film).write_bytes(b"mp4")
    (tmp_path / "videos/training/films.json").write_text(json.dumps([{"number": 28, "file": "000028.mp4"}]))
    report = build_report(tmp_path)
    page = Page(report)
    films = [address for address in page.addresses if address.endswith("mp4")]
    assert sorted(set(films)) == ["videos/290_mean/mean_000_success.mp4", "videos/training/000028.mp4"]
    assert len(films) == 4  # a player and a link each
    text = page.texts["episodes"]
    assert "training episode 28: success, 100 steps, human 20%" in text
    assert "evaluation of checkpoint 290, mean policy, episode 0: success, 75 steps" in text
    assert "10 earlier episodes" in text  # 20 of 30 are shown
    assert "a human acts" in text
    assert "In the 10 episodes in which control passed" in text
    assert "at most 37 rad/s² there and 42 rad/s² at other ticks" in text


def test_a_torn_and_an_old_metrics_file_are_reported(tmp_path):
    write_run(tmp_path, episodes=3)
    file = tmp_path / METRICS_FILE
    file.write_bytes(file.read_bytes()[:-20])
    report = build_report(tmp_path)
    assert "1 line of metrics.jsonl skipped" in report.read_text()


def test_runs_are_compared_on_one_page(tmp_path):
    runs = [write_run(tmp_path / name, episodes=n) for name, n in (("a", 30), ("b", 12))]
    for run, lr in zip(runs, (1e-3, 3e-4), strict=True):
        config = {"name": "x", "agent": {"kind": "acfql", "lr": lr, "candidates": 8}, "run_id": run.name}
        write_config(run, config)
    path = build_comparison(runs)
    assert path == runs[0] / "report_vs_b.html"
    page = Page(path)
    assert {"Success", "Evaluations", "Return", "Intervention", "Critic"} == set(page.images)
    assert page.texts["configuration"].strip().endswith("settingabagent.lr0.0010.0003")
    assert "Environment steps3,0001,200" in page.texts["numbers"].replace("\n", "")
    assert build_comparison(runs, tmp_path / "c.html") == tmp_path / "c.html"
    with pytest.raises(ConfigError, match=naming("run_dirs", runs[0])):
        build_comparison([runs[0], runs[0]])
