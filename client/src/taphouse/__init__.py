"""Taphouse: client, command, wire models and shard format."""

__version__ = "0.1.0"
