"""The operator's console on a terminal: keys, what they do, and the view of the state."""
