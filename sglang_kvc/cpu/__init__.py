"""CPU platform: servers without an accelerator."""
