"""Whether a checkpoint may be resumed with the settings, target and store at hand."""

from __future__ import annotations

from taphouse.ledger import Ledger
from taphouse_trainer.checkpoint import Stored
from taphouse_trainer.errors import SettingsConflict, VocabularyError
from taphouse_trainer.settings import Settings
from taphouse_trainer.verifier import Verifier
from taphouse_trainer.vocabulary import load_vocabulary


def check_resume(stored: Stored, settings: Settings, verifier: Verifier, ledger: Ledger) -> None:
    """Refuse to resume with what the checkpoint wasn't trained with.

    Raises:
        SettingsConflict, VocabularyError: which settings differ, and what to do.
    """
    state, new = stored.state, settings.pinned()
    differ = [f"{k}={new[k]!r} (was {v!r})" for k, v in state.pinned.items() if new.get(k) != v]
    if settings.layers is not None and settings.layers != state.layers:
        differ.append(f"layers={settings.layers} (was {state.layers})")
    if verifier.config_sha256 != state.target:
        differ.append(f"target={verifier.path} (its config.json is another one)")
    if differ:
        raise SettingsConflict(
            f"{stored.path} was trained with other settings: {', '.join(differ)}; use a new output"
        )
    stored.vocabulary.check(min(settings.draft_vocab_size, verifier.vocab_size), verifier.vocab_size)
    if settings.vocabulary is not None and load_vocabulary(settings.vocabulary) != stored.vocabulary:
        raise VocabularyError(
            f"{settings.vocabulary} is not the mapping {stored.path} was trained with; use a new output"
        )
    begun = state.position.begun
    if begun > ledger.head():
        raise SettingsConflict(
            f"{stored.path} has read {begun} ledger entries, the store has {ledger.head()}: "
            "it is another store, or its ledger was lost; use a new output"
        )
    last = ledger.entry(begun) if begun else None
    if last is not None and state.reached_at not in (None, last.created_at):
        raise SettingsConflict(
            f"{stored.path} has read another ledger entry {last.seq} than the store has, and would pass over "
            "what it has not read: it is another store, or was restored from a backup; use a new output"
        )
