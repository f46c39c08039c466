"""The state machine of a record stream against a plain model: a list of what was sent, delivered once and in order."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from properties import examples

from serl_chunk.transport.storage.record_store import SessionState, Verdict
from serl_chunk.transport.wire.records import AMEND, BEGIN, END, LOST, STEPS, Item

START = SessionState("s", "a", 1, 0, 0, 0, None)


@st.composite
def streams(draw):
    """A stream as an actor numbers it: episodes, corrections, and numbers that its disk lost."""
    items, first, episode, name = [], 0, None, 0
    for _ in range(draw(st.integers(1, 25))):
        kind = draw(st.sampled_from([BEGIN, STEPS, STEPS, STEPS, END, AMEND, LOST]))
        if kind == BEGIN:
            name, episode = name + 1, f"e{name + 1}"
        span = draw(st.integers(1, 5)) if kind in (STEPS, LOST) else 1
        lost = draw(st.integers(0, span)) if kind == LOST else 0
        items.append(Item(kind, first, span, draw(st.sampled_from([episode or "none", "other"])), lost))
        first += span
        episode = None if kind in (END, LOST) else episode
    return items


class Model:
    """What a reader has of each number, by the rules in words."""

    def __init__(self, items):
        self.owner = [i for i in items for _ in range(i.span)]
        self.next, self.open = 0, None
        self.delivered, self.dropped = 0, 0  # steps

    def verdict(self, item):
        if item.first > self.next:
            return Verdict.GAP
        if all(n < self.next for n in range(item.first, item.end)):
            return Verdict.DUPLICATE
        return Verdict.ORPHAN if item.kind in (STEPS, END) and item.episode != self.open else Verdict.NEW

    def take(self, item, delivered):
        new = [n for n in range(item.first, item.end) if n >= self.next]
        self.next = new[-1] + 1
        if item.kind == STEPS:
            self.delivered += delivered * len(new)
            self.dropped += (not delivered) * len(new)
        if item.kind == BEGIN:
            self.open = item.episode
        if item.kind == LOST:
            self.dropped += item.lost_steps
        if item.kind == LOST or (item.kind == END and delivered):
            self.open = None


@settings(max_examples=examples(80), deadline=None)
@given(items=streams(), data=st.data())
def test_whatever_is_sent_again_cut_or_left_out_each_number_passes_once(items, data):
    model, state, passed = Model(items), START, []
    sent = 0
    while model.next < len(model.owner):
        i = data.draw(st.integers(0, min(sent + 1, len(items) - 1)))  # again, next, or past what was sent
        item = items[i]
        if item.kind == STEPS and item.span > 1 and data.draw(st.booleans()):  # blocks are cut anew by a successor
            cut = data.draw(st.integers(1, item.span - 1))
            item = data.draw(
                st.sampled_from([item._replace(span=cut), item._replace(first=item.first + cut, span=item.span - cut)])
            )
        verdict = state.judge(item)
        assert verdict is model.verdict(item)
        if verdict in (Verdict.NEW, Verdict.ORPHAN):
            passed += range(state.expected, item.end)
            delivered = verdict is Verdict.NEW and data.draw(st.booleans() if item.kind == END else st.just(True))
            state = state.after(item, delivered=delivered)
            model.take(item, delivered)
            sent = max(sent, i)
        elif data.draw(st.booleans()):  # progress
            sent = next(k for k, other in enumerate(items) if other.end > state.expected)
        assert (state.expected, state.open_episode) == (model.next, model.open)
        assert (state.steps, state.steps_offset) == (model.delivered, model.dropped)
        assert SessionState.from_row(list(state)) == state
    assert passed == list(range(len(model.owner)))


def test_a_reader_that_missed_something_goes_on_without_the_open_episode():
    begun = START.after(Item(BEGIN, 0, 1, "e"), delivered=True)
    later = begun.after(Item(STEPS, 1, 3, "e"), delivered=True)
    assert later.resumed(later) == later
    assert later.resumed(begun) == later._replace(open_episode=None)
    assert later.resumed(None) == later._replace(open_episode=None)
    assert later.resumed(begun._replace(expected=4, open_episode=None)).open_episode is None
