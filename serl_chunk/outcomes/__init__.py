"""Outcomes: what ends an episode as a success or a failure, and with which reward."""
