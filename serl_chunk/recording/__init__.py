"""Recording by hand or script: demonstrations, labelled frames, and their stream to a learner."""
