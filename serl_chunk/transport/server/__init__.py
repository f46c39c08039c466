"""The learner's end."""
