"""The learner's memory: records go in, training windows come out."""
