"""The engine: a loaded artifact that reads tokens and gives logits."""
