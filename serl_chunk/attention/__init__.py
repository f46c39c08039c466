"""Attention: whether the operator should look, from the critic's values of the chunks that a policy executes."""
