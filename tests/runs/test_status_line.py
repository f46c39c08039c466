import io

import pytest

from serl_chunk.runs.status_line import LOG_PERIOD, TTY_PERIOD, StatusLine, format_status, waits, who_waits

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


def test_the_line_says_everything_in_one_order():
    assert format_status("train", FIELDS, 3_725.0) == (
        "train 1,200/20,000 | eta 1:02:05 | step 5,200 | 214 updates/s | 9,000 env steps | 85 episodes | "
        "success without intervention 85% (of the last 20) | human 3.4% | learner waits for actor | snapshot 24"
    )


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
    [(0.5, 0.1, "learner waits for actor"), (0.1, 0.5, "actor waits for learner"), (0.09, 0.05, "both busy")],
)
def test_who_waits_for_whom(learner, actor, words):
    assert who_waits(learner, actor) == words


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"steps_missing": 312}, "learner waits for 312 more steps"),
        ({"steps_missing": 1_000}, "learner waits for 1,000 more steps"),
        ({"steps_missing": 1, "actors": ("left",)}, "learner waits for 1 more step"),
        ({"steps_missing": 0}, "learner waits for actor"),
        ({"steps_missing": 40, "actors": ()}, "learner waits for 40 more steps, no actor is connected"),
        ({"actors": ()}, "learner waits for actor, no actor is connected"),
        ({"may_record": 5}, "learner waits for actor"),
    ],
)
def test_what_the_learner_waits_for(fields, words):
    assert waits({"learner_wait": 0.5, "actor_wait": 0.1, **fields}) == words


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"may_record": 120, "updates_due": 1_030, "actors": ("left_cell",)},
            "actor waits for learner: left_cell may record 120 more steps, 1,030 updates are due",
        ),
        ({"may_record": 0, "updates_due": 3, "actors": ("a", "b")},
         "actor waits for learner: actors may record 0 more steps, 3 updates are due"),
        ({"may_record": 9}, "actor waits for learner: actors may record 9 more steps, 0 updates are due"),
        ({"may_record": None, "updates_due": 3, "actors": ("a",)}, "actor waits for learner"),
        ({"steps_missing": 4}, "actor waits for learner"),
    ],
)  # fmt: skip
def test_what_the_actors_wait_for(fields, words):
    assert waits({"learner_wait": 0.1, "actor_wait": 0.5, **fields}) == words
    assert waits({"learner_wait": 0.0, "actor_wait": 0.0, **fields}) == "both busy"


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


def test_a_log_gets_a_line_at_most_every_ten_seconds_and_the_last_state(clock):
    out = io.StringIO()
    with StatusLine(out, tty=False, clock=clock) as status:
        for step in range(300):
            status.update("train", {"step": step})
            clock.now += LOG_PERIOD / 128  # exact in binary
    assert out.getvalue().splitlines() == [f"train | step {step}" for step in (0, 128, 256, 299)]


def test_a_state_already_shown_is_not_repeated_at_the_end(clock):
    out = io.StringIO()
    with StatusLine(out, tty=False, clock=clock) as status:
        status.update("train", {"step": 1})
    assert out.getvalue() == "train | step 1\n"


def test_say_is_printed_at_once_between_lines(clock):
    out = io.StringIO()
    with StatusLine(out, tty=False, clock=clock) as status:
        status.update("train", {"step": 1})
        status.say("checkpoint 1 written [bold]")
        assert out.getvalue() == "train | step 1\ncheckpoint 1 written [bold]\n"


def test_an_evaluation_that_begins_is_shown_at_once(clock):
    out = io.StringIO()
    with StatusLine(out, tty=False, clock=clock) as status:
        status.update("train", {"step": 1, "evaluating": False})
        for _ in range(3):
            clock.now += 0.1
            status.update("train", {"step": 1, "evaluating": True})
        clock.now += 0.1
        status.update("train", {"step": 1, "evaluating": False})
    assert out.getvalue().splitlines() == ["train | step 1", "train | evaluating | step 1", "train | step 1"]


def test_who_is_held_up_just_now_is_not_said_to_be_waited_for():
    """A first update compiles while the shares are still those of the warm-up."""
    fields = {"learner_wait": 0.9, "actor_wait": 0.0, "may_record": 0, "updates_due": 50, "actors": ("left_cell",)}
    held = "actor waits for learner: left_cell may record 0 more steps, 50 updates are due"
    assert waits(fields) == held
    assert waits(fields | {"updates_due": 0}) == "learner waits for actor"
    assert waits(fields | {"may_record": 3}) == "learner waits for actor"
    assert waits(fields | {"may_record": None}) == "learner waits for actor"


def test_time_left_comes_from_the_speed_within_the_phase(clock):
    out = io.StringIO()
    with StatusLine(out, tty=False, clock=clock) as status:
        status.update("pretrain", {"done": 0, "total": 10})
        clock.now += 100
        status.update("train", {"done": 100, "total": 200})  # resumed in the middle: no speed known yet
        clock.now += 10
        status.update("train", {"done": 100, "total": 200})  # standing still: nor now
        clock.now += 10
        status.update("train", {"done": 120, "total": 200})
    assert out.getvalue().splitlines() == [
        "pretrain 0/10", "train 100/200", "train 100/200", "train 120/200 | eta 1:20",
    ]  # fmt: skip


def test_a_terminal_redraws_in_place_with_messages_above(clock):
    out = io.StringIO()
    with StatusLine(out, tty=True, clock=clock) as status:
        status.update("train", {"step": 1})
        status.update("train", {"step": 2})  # too soon
        assert "step 2" not in out.getvalue()
        status.say("[red] said")
        clock.now += TTY_PERIOD
        status.update("train", {"step": 3})
    text = out.getvalue()
    assert text.index("step 1") < text.index("[red] said") < text.rindex("step 3")
    assert "\x1b[" in text
    assert "step 2" not in text


def test_the_stream_decides_whether_it_is_a_terminal(clock):
    out = io.StringIO()
    with StatusLine(out, clock=clock) as status:
        status.update("train", {"step": 1})
    assert "\x1b" not in out.getvalue()


def test_a_long_line_that_is_said_stays_one_line(clock, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    out = io.StringIO()
    line = f"  serl-chunk keys join '{'x' * 200}'"
    with StatusLine(out, tty=True, clock=clock) as status:
        status.update("train", {"step": 1})
        status.say(f"paste it:\n\n{line}\n\nthere")
    assert line in out.getvalue()


def test_a_narrow_terminal_shows_the_whole_line_also_below_a_message(clock, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    out = io.StringIO()
    with StatusLine(out, tty=True, clock=clock) as status:
        status.update("train", FIELDS)
        assert "snapshot" in out.getvalue()  # the last of the words
        status.say("checkpoint 1 written")
        below = out.getvalue().split("checkpoint 1 written")[1]
        assert "snapshot" in below


def test_time_left_goes_without_what_was_no_training(clock):
    out = io.StringIO()
    with StatusLine(out, tty=False, clock=clock) as status:
        status.update("offline", {"done": 0, "total": 100, "paused": 5.0})
        clock.now += 30
        status.update("offline", {"done": 50, "total": 100, "paused": 25.0})
    assert out.getvalue().splitlines()[-1] == "offline 50/100 | eta 0:10"
