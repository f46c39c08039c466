"""gym-aloha's two bimanual tasks in MuJoCo (extra: aloha-sim)."""
