"""From a checkpoint, or from any decoder written in PyTorch, to a captured graph."""
