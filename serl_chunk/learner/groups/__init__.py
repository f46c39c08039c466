"""Groups of episodes for training in iterations: their starts, their tickets, and what was collected."""
