"""Policies of chunks: flows, heads and pi0. They read a `Context`; the agent bounds what they give to model space."""
