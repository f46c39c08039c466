"""Ways of training, one a file: phases (offline, warm-up, online)."""
