"""The actor's end."""
