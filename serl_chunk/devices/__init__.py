"""Sources of human interventions."""
