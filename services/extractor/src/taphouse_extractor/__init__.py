"""The extractor service: an API and workers that turn prompts into shards."""

__version__ = "0.1.0"
