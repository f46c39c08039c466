"""Several processes of a run, started and watched together."""
