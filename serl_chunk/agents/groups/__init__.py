"""Training in iterations on groups of episodes: advantages, rows, and the agent."""
