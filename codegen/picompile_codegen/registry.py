"""The back ends by name: ours, and those that packages offer by an entry point of the group `picompile.backends`."""

from picompile_codegen import cpu, cuda
from picompile_codegen.backend import BackEnd
from picompile_passes.plugins import Registry

BACK_ENDS: Registry[BackEnd] = Registry("back end", "picompile.backends", BackEnd, (cpu.BACK_END, cuda.BACK_END))
