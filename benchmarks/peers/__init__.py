"""picompile beside other engines."""
