"""Exactly-once, encrypted transport between learner and actors."""
