"""Tiering: assignment of a block's tokens to tiers, by importance, quota or threshold."""
