"""A bimanual ALOHA look-alike in numpy: pick a cube, hand it over, place it."""
