"""Where a program runs: the host's CPU, and a GPU or a CPU partition as its accelerator."""
