"""The devices that run a program: the host's CPU, and an accelerator, a GPU or a second partition of the CPU."""
