"""Server options: their types, checks and refusals, the model facts that they depend on, and request quality."""
