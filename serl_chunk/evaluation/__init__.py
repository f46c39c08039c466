"""Evaluation of policies: episodes from held-out starts, in turns, by an operator, or by a learner as it trains."""
