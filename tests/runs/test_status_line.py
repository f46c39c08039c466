"""What the status line says, and how often it is shown."""

import pytest
from metric_logs import Clock

from serl_chunk.runs.status_line import LOG_PERIOD, STATUS_LOGGER, StatusLine, format_status, pacing

FIELDS = {
    "done": 1_200, "total": 20_000, "step": 5_200, "updates_per_s": 214.4, "env_steps": 9_000, "episodes": 85,
    "success": 0.85, "human": 0.034, "learner_wait": 0.4, "actor_wait": 0.02, "version": 24,
}  # fmt: skip
BUSY = {"learner_wait": 0.0, "actor_wait": 0.0, "version": 1}


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def logged(caplog):
    caplog.set_level("INFO", STATUS_LOGGER)
    return lambda: [record.getMessage() for record in caplog.records if record.name == STATUS_LOGGER]


class Screen:
    def __init__(self):
        self.shown: list[str] = []
        self.kept = 0

    def state(self, text):
        self.shown.append(text)

    def keep(self):
        self.kept += 1


@pytest.mark.parametrize(
    ("phase", "fields", "text"),
    [
        ("train", FIELDS,
         "train 1,200/20,000 | eta 1:02:05 | step 5,200 | 214 updates/s | 9,000 env steps | 85 episodes | success "
         "without intervention 85% (of the last 20) | human 3.4% | normal pacing: learner is ahead | snapshot 24"),
        ("warm-up", {"phase_number": 3, "phase_total": 5, "done": 4, "total": 20, "episodes": 1},
         "3/5 warm-up 4/20 | eta 1:02:05 | 1 episode"),
        ("waiting for an actor", {}, "waiting for an actor"),
        ("train", {"step": 3, "success": None, "human": None, "evaluating": True}, "train | evaluating | step 3"),
        ("train", BUSY | {"empty_half": "demo"},
         "train | both busy | online data only, demo half is empty | snapshot 1"),
        ("train", BUSY | {"stalled": "the disk is full"},
         "train | both busy | the disk is full, nothing is acknowledged | snapshot 1"),
    ],
)  # fmt: skip
def test_the_line_says_what_is_known_in_one_order(phase, fields, text):
    assert format_status(phase, fields, 3_725.0 if "done" in fields else None) == text


AHEAD = {"learner_wait": 0.5, "actor_wait": 0.1}
BEHIND = {"learner_wait": 0.1, "actor_wait": 0.5}
# A first update compiles while the shares are still those of the warm-up.
COMPILING = {"learner_wait": 0.9, "actor_wait": 0.0, "may_record": 0, "updates_due": 50, "actors": ("left",)}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"learner_wait": 0.09, "actor_wait": 0.05}, "both busy"),
        (AHEAD | {"steps_missing": 1_000}, "learner is ahead, needs 1,000 more steps"),
        (AHEAD | {"steps_missing": 40, "actors": ()}, "no actor is connected: learner waits, needs 40 more steps"),
        (AHEAD | {"actors": ()}, "no actor is connected: learner waits"),
        (BEHIND | {"may_record": 120, "updates_due": 1_030, "actors": ("left",)},
         "actor is ahead, 1,030 updates due, left may record 120 more steps"),
        (BEHIND | {"may_record": 9}, "actor is ahead, 0 updates due, actors may record 9 more steps"),
        (BEHIND | {"steps_missing": 4}, "actor is ahead"),
        (COMPILING, "actor is ahead, 50 updates due, left may record 0 more steps"),
        (COMPILING | {"updates_due": 0}, "learner is ahead"),
    ],
)  # fmt: skip
def test_which_side_is_ahead_and_what_the_other_waits_for(fields, words):
    assert pacing(fields).removeprefix("normal pacing: ") == words


def test_a_log_gets_a_line_at_most_every_ten_seconds_the_last_state_and_an_evaluation_at_once(clock, logged):
    with StatusLine(clock=clock) as status:
        for step in range(300):
            status.update("train", {"step": step})
            clock.now += LOG_PERIOD / 128  # exact in binary
        status.update("train", {"step": 300, "evaluating": True})
    assert logged() == [*(f"train | step {step}" for step in (0, 128, 256)), "train | evaluating | step 300"]


def test_time_left_comes_from_the_speed_since_the_first_progress_in_the_phase(clock, logged):
    with StatusLine(clock=clock) as status:
        for phase, done, total, seconds in (
            ("pretrain", 0, 10, 100),
            ("train", 100, 1_101, 60),  # resumed in the middle: the first update compiles
            ("train", 101, 1_101, 49),
            ("train", 150, 1_101, 10),  # less than a twentieth of what is left
            ("train", 160, 1_101, 0),
        ):
            status.update(phase, {"done": done, "total": total})
            clock.now += seconds
    assert logged() == [
        "pretrain 0/10", "train 100/1,101", "train 101/1,101", "train 150/1,101", "train 160/1,101 | eta 15:41",
    ]  # fmt: skip


def test_time_left_goes_without_what_was_no_training(clock, logged):
    with StatusLine(clock=clock) as status:
        for done, paused in ((0, 5.0), (1, 5.0), (51, 25.0)):
            clock.now += 30 * (done == 51)
            status.update("offline", {"done": done, "total": 101, "paused": paused})
    assert logged()[-1] == "offline 51/101 | eta 10 s"


def test_a_screen_shows_a_state_five_times_a_second_and_keeps_the_last(clock, logged):
    screen = Screen()
    with StatusLine(screen, clock=clock) as status:
        for step in range(9):
            status.update("train", {"step": step})
            clock.now += 0.0625
        assert screen.kept == 0
    assert screen.shown == [f"train | step {step}" for step in (0, 4, 8, 8)]
    assert screen.kept == 1
    assert logged() == ["train | step 0", "train | step 8"]
