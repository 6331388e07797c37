"""ReLUfication: a SwiGLU model learns to answer as before with ReLU in place of SiLU."""
