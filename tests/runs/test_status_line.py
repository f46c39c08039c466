import pytest

from serl_chunk.runs.status_line import LOG_PERIOD, STATUS_LOGGER, StatusLine, format_status, pacing

FIELDS = {
    "done": 1_200, "total": 20_000, "step": 5_200, "updates_per_s": 214.4, "env_steps": 9_000, "episodes": 85,
    "success": 0.85, "human": 0.034, "learner_wait": 0.4, "actor_wait": 0.02, "version": 24,
}  # fmt: skip


class Clock:
    def __init__(self):
        self.now = 50.0

    def __call__(self):
        return self.now


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


def test_the_line_says_everything_in_one_order():
    assert format_status("train", FIELDS, 3_725.0) == (
        "train 1,200/20,000 | eta 1:02:05 | step 5,200 | 214 updates/s | 9,000 env steps | 85 episodes | "
        "success without intervention 85% (of the last 20) | human 3.4% | normal pacing: learner is ahead | snapshot 24"
    )
    numbered = {"phase_number": 3, "phase_total": 5, "done": 4, "total": 20, "episodes": 1}
    assert format_status("warm-up", numbered) == "3/5 warm-up 4/20 | 1 episode"


def test_what_is_not_known_is_left_out():
    assert format_status("waiting for an actor", {}) == "waiting for an actor"
    assert format_status("train", {"step": 3, "success": None, "human": None}) == "train | step 3"


@pytest.mark.parametrize(
    ("half", "words"),
    [
        ("demo", "both busy | online data only, demo half is empty | snapshot 1"),
        ("online", "both busy | demo data only, online half is empty | snapshot 1"),
        (None, "both busy | snapshot 1"),
    ],
)
def test_a_half_that_has_nothing_to_give_is_named(half, words):
    fields = {"learner_wait": 0.0, "actor_wait": 0.0, "empty_half": half, "version": 1}
    assert format_status("train", fields) == f"train | {words}"


@pytest.mark.parametrize(
    ("learner", "actor", "words"),
    [(0.5, 0.1, "learner is ahead"), (0.1, 0.5, "actor is ahead"), (0.09, 0.05, "both busy")],
)
def test_which_side_is_ahead(learner, actor, words):
    assert pacing({"learner_wait": learner, "actor_wait": actor}).removeprefix("normal pacing: ") == words


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"steps_missing": 312}, "normal pacing: learner is ahead, needs 312 more steps"),
        ({"steps_missing": 1_000}, "normal pacing: learner is ahead, needs 1,000 more steps"),
        ({"steps_missing": 1, "actors": ("left",)}, "normal pacing: learner is ahead, needs 1 more step"),
        ({"steps_missing": 0}, "normal pacing: learner is ahead"),
        ({"steps_missing": 40, "actors": ()}, "no actor is connected: learner waits, needs 40 more steps"),
        ({"actors": ()}, "no actor is connected: learner waits"),
        ({"may_record": 5}, "normal pacing: learner is ahead"),
    ],
)
def test_what_the_learner_waits_for(fields, words):
    assert pacing({"learner_wait": 0.5, "actor_wait": 0.1, **fields}) == words


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"may_record": 120, "updates_due": 1_030, "actors": ("left_cell",)},
         ", 1,030 updates due, left_cell may record 120 more steps"),
        ({"may_record": 0, "updates_due": 3, "actors": ("a", "b")}, ", 3 updates due, actors may record 0 more steps"),
        ({"may_record": 9}, ", 0 updates due, actors may record 9 more steps"),
        ({"may_record": None, "updates_due": 3, "actors": ("a",)}, ""),
        ({"steps_missing": 4}, ""),
    ],
)  # fmt: skip
def test_what_the_actors_wait_for(fields, words):
    assert pacing({"learner_wait": 0.1, "actor_wait": 0.5, **fields}) == "normal pacing: actor is ahead" + words
    assert pacing({"learner_wait": 0.0, "actor_wait": 0.0, **fields}) == "both busy"


def test_an_evaluation_under_way_is_said():
    fields = {"done": 5, "total": 9, "evaluating": True, "step": 3}
    assert format_status("train", fields, 60) == "train 5/9 | evaluating | eta 1:00 | step 3"
    assert "evaluating" not in format_status("train", {**fields, "evaluating": False})


def test_a_learner_that_takes_nothing_says_so():
    fields = {"learner_wait": 0.0, "actor_wait": 0.0, "stalled": "the disk is full", "version": 1}
    assert (
        format_status("train", fields) == "train | both busy | the disk is full, nothing is acknowledged | snapshot 1"
    )
    assert "acknowledged" not in format_status("train", {**fields, "stalled": ""})


def test_a_log_gets_a_line_at_most_every_ten_seconds_and_the_last_state(clock, logged):
    with StatusLine(clock=clock) as status:
        for step in range(300):
            status.update("train", {"step": step})
            clock.now += LOG_PERIOD / 128  # exact in binary
    assert logged() == [f"train | step {step}" for step in (0, 128, 256, 299)]


def test_a_state_already_shown_is_not_repeated_at_the_end(clock, logged):
    with StatusLine(clock=clock) as status:
        status.update("train", {"step": 1})
    assert logged() == ["train | step 1"]


def test_an_evaluation_that_begins_is_shown_at_once(clock, logged):
    with StatusLine(clock=clock) as status:
        status.update("train", {"step": 1, "evaluating": False})
        for _ in range(3):
            clock.now += 0.1
            status.update("train", {"step": 1, "evaluating": True})
        clock.now += 0.1
        status.update("train", {"step": 1, "evaluating": False})
    assert logged() == ["train | step 1", "train | evaluating | step 1", "train | step 1"]


def test_who_is_held_up_just_now_is_not_said_to_be_waited_for():
    """A first update compiles while the shares are still those of the warm-up."""
    fields = {"learner_wait": 0.9, "actor_wait": 0.0, "may_record": 0, "updates_due": 50, "actors": ("left_cell",)}
    assert pacing(fields) == "normal pacing: actor is ahead, 50 updates due, left_cell may record 0 more steps"
    for other in ({"updates_due": 0}, {"may_record": 3}, {"may_record": None}):
        assert pacing(fields | other) == "normal pacing: learner is ahead"


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
        status.update("offline", {"done": 0, "total": 101, "paused": 5.0})
        status.update("offline", {"done": 1, "total": 101, "paused": 5.0})
        clock.now += 30
        status.update("offline", {"done": 51, "total": 101, "paused": 25.0})
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
