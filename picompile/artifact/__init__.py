"""Writing an artifact."""
