"""Tiering: which tokens of a block go to which tier, by importance, quota or threshold."""
