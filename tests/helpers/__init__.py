"""Tools of the tests: models, toy artifacts, stand-ins for devices, and what compares results."""
