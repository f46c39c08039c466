"""One module for each thing a user can ask `serl-chunk` to do; on top of all other rooms."""
