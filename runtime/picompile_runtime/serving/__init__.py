"""Serving: many requests on one engine, and the HTTP server in front of it. It needs the extra `serve`."""
