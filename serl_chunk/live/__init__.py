"""The page of a running actor: its state, pictures and plans in browsers of this machine, and the operator's keys."""
