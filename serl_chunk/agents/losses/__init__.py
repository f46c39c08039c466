"""Losses and targets that agents share. Each is a function of the parameters it trains and of nothing else."""
