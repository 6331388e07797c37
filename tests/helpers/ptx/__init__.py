"""PTX, NVRTC's output, run on the CPU: translated to C++ for the emulation of helpers/kernels, and checked as text."""
