"""A robot behind a robot server as an environment: arms, cameras, the operator's requests, a simulated task."""
