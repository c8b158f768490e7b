"""What the plan of a step promises, for every picture of the scheduler."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from taphouse_tap.core.plan import Plan, Production, Running, View, Waiting, plan
from taphouse_tap.quota import Quota

BLOCK = 16


def quota(**fields: object) -> Quota:
    return Quota(**{"busy_ms": 2.0, "quiet_ms": 100.0, "slots": 8, "kv_share": 0.5, **fields})  # type: ignore[arg-type]


def view(**fields: object) -> View:
    facts = {
        "production": Production(),
        "running": (),
        "waiting": (),
        "tokens": 512,
        "slots": 8,
        "blocks": 100,
        "free_blocks": 100,
        "block_size": BLOCK,
    }
    return View(**{**facts, **fields})  # type: ignore[arg-type]


def running(name: str, need: int = 100, blocks: int = 10, *, generates: bool = False) -> Running:
    return Running(name, need, blocks, reserved=blocks + 5, generates=generates)


def test_alone_extraction_has_what_fits_the_step() -> None:
    made = plan(
        view(waiting=[Waiting("a", 200, 14), Waiting("b", 200, 14), Waiting("c", 10, 2)]), quota(), 300
    )
    assert made.admit == ("a", "b")  # the second one's prompt fills the step
    assert made.tokens == 300


def test_a_step_with_production_has_productions_tokens_and_the_quota() -> None:
    made = plan(view(production=Production(3, need=3, blocks=3), running=[running("a")]), quota(), 20)
    assert made.allowed == {"a": 20}
    assert made.tokens == 23


def test_production_that_waits_goes_first_and_nothing_begins_beside_it() -> None:
    waiting = Production(1, need=1, blocks=1, waiting=1, waiting_blocks=20)
    made = plan(view(production=waiting, waiting=[Waiting("a", 10, 2)], running=[running("b")]), quota(), 30)
    assert made.admit == () and made.preempt == ()
    assert made.tokens is None
    assert made.allowed == {"b": 30}


def test_slots_that_production_waits_for_are_taken_from_the_newest() -> None:
    waiting = Production(5, need=5, blocks=5, waiting=2, waiting_blocks=4)
    made = plan(view(production=waiting, running=[running("a"), running("b"), running("c")]), quota(), 30)
    assert made.preempt == ("c", "b")
    assert set(made.allowed) == {"a"}


def test_blocks_that_production_needs_are_taken_from_the_newest() -> None:
    needs = Production(2, need=40, blocks=12)
    made = plan(view(production=needs, running=[running("a"), running("b")], free_blocks=5), quota(), 30)
    assert made.preempt == ("b",)


def test_one_that_generates_gets_all_it_needs_or_nothing() -> None:
    drafts = [running("a", need=4, generates=True), running("b", need=4, generates=True)]
    assert plan(view(running=drafts), quota(), 6).allowed == {"a": 4, "b": 0}


def test_one_that_computes_again_what_it_had_generated_does_so_in_pieces() -> None:
    """Preempted with hundreds of tokens, it would never fit a step of sixteen as a whole."""
    assert plan(view(running=[running("a", need=300)]), quota(), 16).allowed == {"a": 16}


def test_what_vllm_would_not_begin_with_the_tokens_that_are_left_is_not_admitted() -> None:
    """A prompt of one token beside drafts: a step of a decode, or nothing."""
    there = view(waiting=[Waiting("a", 4, 2, least=4)], production=Production(1, need=4, blocks=2))
    assert plan(there, quota(), 3).admit == ()
    made = plan(there, quota(), 6)
    assert (made.admit, made.tokens) == (("a",), 8)


def test_the_least_is_what_the_oldest_that_can_go_on_has_use_for() -> None:
    drafts, prompt, waits = running("a", 4, generates=True), running("b", 90), Waiting("c", 4, 2, least=4)
    assert view(running=[drafts, prompt]).least == 4, "a younger one's token must not keep it waiting"
    assert view(running=[running("a", 0, generates=True), prompt], waiting=[waits]).least == 1
    assert view(waiting=[waits]).least == 4 and view().least == 1


def test_alone_the_last_block_can_be_filled() -> None:
    last = view(running=[running("a", need=1, blocks=99)], free_blocks=0)
    assert plan(last, quota(), 16).allowed == {"a": 1}
    beside = view(running=[running("a", need=1, blocks=90)], free_blocks=3, production=Production(1, 1, 2))
    assert plan(beside, quota(), 16).allowed == {"a": 0}, "the block may be production's"


def test_the_share_of_the_cache_bounds_what_begins_but_one_alone_always_may() -> None:
    waiting = [Waiting("a", 10, 30), Waiting("b", 10, 30)]
    assert plan(view(waiting=waiting), quota(), 500).admit == ("a",)
    assert plan(view(waiting=[Waiting("a", 10, 80)]), quota(), 500).admit == ("a",)
    assert plan(view(waiting=waiting), quota(kv_share=0), 500).admit == ()


def test_prompts_that_are_computed_whole_begin_in_the_quiet_however_long() -> None:
    waiting = [Waiting("a", 200, 14), Waiting("b", 20, 2)]
    alone = plan(view(waiting=waiting, whole=True), quota(), 16)
    assert (alone.admit, alone.tokens) == (("a",), 200)
    beside = plan(view(waiting=waiting, whole=True, production=Production(1, 1, 1)), quota(), 16)
    assert (beside.admit, beside.tokens) == ((), 1)
    short = plan(view(waiting=waiting[1:], whole=True, production=Production(1, 1, 1)), quota(), 30)
    assert (short.admit, short.tokens) == (("b",), 21)
    there = view(waiting=waiting, whole=True, production=Production(1, 1, 1))
    tried = plan(there, quota(), 0, tries_whole=True)
    assert (tried.admit, tried.tokens) == (("a",), 201)
    assert plan(there, quota(stopped=True), 0, tries_whole=True).admit == ()
    assert plan(view(waiting=waiting, whole=True), quota(stopped=True), 16).admit == ()


def test_stopped_means_nothing() -> None:
    made = plan(
        view(
            running=[running("a")], waiting=[Waiting("b", 10, 2)], production=Production(1, need=1, blocks=1)
        ),
        quota(stopped=True),
        100,
    )
    assert made == Plan({"a": 0}, (), (), 1)


requests = st.lists(st.tuples(st.integers(1, 600), st.integers(0, 30), st.booleans()), max_size=6)
pictures = st.builds(
    view,
    production=st.builds(
        Production,
        running=st.integers(0, 8),
        need=st.integers(0, 700),
        blocks=st.integers(0, 60),
        waiting=st.integers(0, 5),
        waiting_blocks=st.integers(0, 60),
    ),
    running=requests.map(
        lambda found: [running(f"r{n}", *one[:2], generates=one[2]) for n, one in enumerate(found)]
    ),
    waiting=requests.map(lambda found: [Waiting(f"w{n}", one[0], one[1] + 1) for n, one in enumerate(found)]),
    free_blocks=st.integers(0, 100),
)


@given(pictures, st.integers(0, 512), st.integers(0, 8), st.floats(0, 1))
def test_the_promises_hold_for_every_picture(picture: View, tokens: int, slots: int, kv_share: float) -> None:
    made = plan(picture, quota(slots=slots, kv_share=kv_share), tokens)
    assert sum(made.allowed.values()) <= tokens
    assert set(made.allowed) | set(made.preempt) == {request.id for request in picture.running}
    assert not set(made.allowed) & set(made.preempt)
    if made.preempt:  # only for production's sake
        short = picture.production.blocks + picture.production.waiting_blocks > picture.free_blocks
        assert short or picture.production.waiting
    if picture.production.waiting:
        assert made.admit == () and made.tokens is None
    else:
        assert made.tokens is not None
        assert made.tokens <= picture.production.need + tokens
        assert made.tokens >= min(picture.tokens, picture.production.need)
    assert len(made.admit) <= max(0, slots - len(made.allowed))
    assert picture.production.running + len(made.allowed) + len(made.admit) <= max(
        picture.slots, picture.production.running + len(made.allowed)
    )
