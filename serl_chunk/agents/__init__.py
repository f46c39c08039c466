"""Learning algorithms: pure functions over one state, compiled once per shape."""
