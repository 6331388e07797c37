"""Models by name: what a name says, which files of a repository it needs, and their download from the hub.

`resolve_model` is the way in: it takes what a user wrote for MODEL and returns a path on this machine.
"""

from picompile.hub.download import Download, download, download_config, remove_downloads
from picompile.hub.names import ModelName, parse_model
from picompile.hub.resolve import resolve_model

__all__ = ["Download", "ModelName", "download", "download_config", "parse_model", "remove_downloads", "resolve_model"]
