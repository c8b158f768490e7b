"""The `taphouse` command: a terminal's view of the extractor's API and of shard files.

Reading order: `main` (error boundary, exit codes) → `app` (the commands) → `session` (what every command
has) → one file a command group → `render` and `live` (wire models in, rich renderables out).
"""
