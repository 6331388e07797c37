"""Graph dialect, pass contract, pipelines and passes of picompile."""
