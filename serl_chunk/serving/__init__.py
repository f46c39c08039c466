"""Policies over WebSockets, by the protocol of openpi-client: a server, a client, and their messages."""
