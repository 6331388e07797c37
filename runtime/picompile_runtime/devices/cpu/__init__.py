"""Native code on the CPU."""
