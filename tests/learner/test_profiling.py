"""Traces of some updates, by JAX's own profiler."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from serl_chunk.learner.profiling import UpdateTrace


def test_a_trace_begins_behind_the_first_call_and_ends_with_its_last_update(tmp_path, monkeypatch, caplog):
    folder, calls = tmp_path / "profile", []
    start, stop = jax.profiler.start_trace, jax.profiler.stop_trace
    monkeypatch.setattr(jax.profiler, "start_trace", lambda path: (calls.append("start"), start(path)))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: (calls.append("stop"), stop()))
    trace = UpdateTrace(folder, 4)
    for i in range(5):
        calls.append(i)
        trace.updated(2, {"loss": jnp.square(jnp.float32(i))})
    trace.close()
    assert calls == [0, "start", 1, 2, "stop", 3, 4]
    assert any(file.stat().st_size for file in folder.rglob("*.xplane.pb"))
    assert "a trace of 4 updates" in caplog.text

    calls.clear()
    for updates, expected in ((0, []), (3, ["start", "stop"])):  # the run ends before the trace does
        trace = UpdateTrace(folder, updates)
        for _ in range(2):
            trace.updated(1, {})
        trace.close()
        assert calls == expected
    assert "a trace of 1 updates" in caplog.text
