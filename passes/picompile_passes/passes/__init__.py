"""The passes, one a file. `picompile_passes.registry` finds them here."""
