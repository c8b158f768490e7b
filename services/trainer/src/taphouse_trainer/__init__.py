"""The trainer service: follows the ledger and trains an EAGLE-3 draft model."""

__version__ = "0.1.0"
