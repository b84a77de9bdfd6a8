"""Demo: a small model, and a server of it."""
