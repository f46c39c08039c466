"""Records on disk: the learner's journal and the actor's spool."""
