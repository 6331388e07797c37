"""Where a program runs: on the host's CPU, and on an accelerator, which is a GPU or a second partition of the CPU."""
