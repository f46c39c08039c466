"""Room of serl_chunk; see docs/architecture.md."""
