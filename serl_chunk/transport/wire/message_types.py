"""Kinds of control messages; those of records, snapshots and the handshake are in their own modules."""

WHO, PING, BYE, FETCH = "who", "ping", "bye", "fetch"  # actor -> learner
ENROL, ENROLLED = "enrol", "enrolled"  # a robot PC that joins -> learner, and its answer
INSPECT, FINDINGS = "inspect", "findings"  # any peer that may connect -> learner, and its answer: see probe.py
ECHO, ECHOED = "echo", "echoed"  # likewise
IDENTITY = "identity"  # learner -> actor, before anything else: which run this is
STATUS, REJOIN, FETCHED, FETCH_FAILED = "status", "rejoin", "fetched", "fetch_failed"  # learner -> actor
ACK = "ack"  # learner -> actor, on the data socket
