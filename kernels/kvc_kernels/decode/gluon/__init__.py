"""Decode attention in Gluon."""
