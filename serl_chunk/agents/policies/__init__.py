"""Policies of chunks, one file each. They read a `Context`; the agent bounds what they give to model space."""
