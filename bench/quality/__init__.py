"""Answers of real models on real tasks, through a running server."""
