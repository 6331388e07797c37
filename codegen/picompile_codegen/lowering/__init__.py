"""From the final graph to kernel calls over planned buffers."""
