"""Kinds of control messages; those of records, snapshots and the handshake stand in their own modules."""

PING, BYE, FETCH = "ping", "bye", "fetch"  # actor -> learner
STATUS, REJOIN, FETCHED, FETCH_FAILED = "status", "rejoin", "fetched", "fetch_failed"  # learner -> actor
ACK = "ack"  # learner -> actor, on the data socket
