"""Writing an artifact: its machine code, its weights, its program, and what report and manifest say of them."""
