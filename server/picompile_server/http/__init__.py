"""The HTTP server: OpenAI's API on starlette and uvicorn."""
