"""pi0 and pi0.5 as functions of a tree whose paths and shapes are those of openpi's released checkpoints."""
