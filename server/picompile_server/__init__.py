"""The server of picompile: many requests on one engine, and the HTTP server in front of it."""
