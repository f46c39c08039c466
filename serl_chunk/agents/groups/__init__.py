"""Training in iterations on groups of episodes: advantages, losses, rows, and the agent."""
