"""The view survives its way through the address bar, whoever wrote the address."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.analyses.labels import HEAD_SCORES, INDUCTION_SCORES, SINK_SCORES
from workbench.app.registry import PAGES as PAGE_MODULES
from workbench.app.state import MAX_INLINE, PAGES, TextStore, View, from_query, to_query
from workbench.errors import WorkbenchError

spans = st.none() | st.tuples(st.integers(0, 5000), st.integers(1, 5000)).map(lambda s: (s[0], s[0] + s[1]))
text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=200)
views = st.builds(
    View,
    model=text,
    text=text,
    max_tokens=st.none() | st.integers(1, 10**6),
    page=st.sampled_from(PAGES),
    layer=st.none() | st.integers(0, 200),
    head=st.none() | st.integers(0, 200),
    score=st.sampled_from(list(HEAD_SCORES)),
    x=st.sampled_from(list(HEAD_SCORES)),
    y=st.sampled_from(list(HEAD_SCORES)),
    pooling=st.sampled_from(["max", "mean"]),
    scale=st.sampled_from(["linear", "sqrt"]),
    queries=spans,
    keys=spans,
    induction_score=st.sampled_from(list(INDUCTION_SCORES)),
    sink_score=st.sampled_from(list(SINK_SCORES)),
    length=st.integers(4, 4096),
    sequences=st.integers(1, 512),
    seed=st.integers(0, 2**31 - 1),
)


@given(views)
def test_a_view_comes_back_from_its_address(view: View) -> None:
    assert from_query(to_query(view), View()) == (view, [])


@given(views)
def test_an_address_means_the_same_on_a_server_that_opens_on_another_model(view: View) -> None:
    assert from_query(to_query(view), View(model="elsewhere", page="sinks"))[0] == view


def test_every_field_is_in_the_address_and_defaults_are_left_out() -> None:
    changed = View(
        model="m", text="t", max_tokens=5, page="sinks", layer=1, head=2, score="entropy", x="self_weight",
        y="sink_mass", pooling="mean", scale="sqrt", queries=(1, 2), keys=(3, 4), show="layer", first_token="apart",
        weighting="value", unit="word", induction_score="previous_token", sink_score="sink_mass", length=8, sequences=9,
        seed=10, off=("L1H2", "L2:>0"), position=6, lens_position=7, task="greater_than", own_prompts="{}",
        measure="entropy", ablation="mean", prompt=3, target="yes", foil="no", new_tokens=3, temperature=0.5, draw=4,
        step=2, step_score="max_weight", asked=("copying", "purpose"), other_model="n", other_text="u", other_layer=0,
        other_head=1, compared_score="entropy", opened="head_statistics.0",
    )  # fmt: skip
    assert all(getattr(changed, f.name) != getattr(View(), f.name) for f in dataclasses.fields(View))
    assert from_query(to_query(changed), View())[0] == changed
    assert to_query(View()) == "?v=1&page=heads&model=demo"


@given(st.text(max_size=300))
def test_no_address_is_an_error(query: str) -> None:
    view, notices = from_query(query, View())
    assert from_query(to_query(view), View())[0] == view
    assert all(isinstance(notice, str) for notice in notices)


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("?v=1&layer=-1", "“layer” must be a whole number from 0 to 9999"),
        ("?v=1&layer=1e3", "“layer” must be a whole number"),
        ("?v=1&head=99999999999999999999", "“head” must be a whole number"),
        ("?v=1&page=admin", "“page” must be one of heads, pattern, induction, sinks"),
        ("?v=1&score=nonsense", "“score” must be one of prefix_matching"),
        ("?v=1&queries=9-3", "“queries” must be two increasing whole numbers"),
        ("?v=1&sequences=100000", "“sequences” must be a whole number from 1 to 512"),
        ("?v=1&temperature=1e3", "“temperature” must be a number from 0 to 5"),
        ("?v=1&temperature=0.0000001", "with at most 4 decimal places"),
        ("?v=1&queries=3", "“queries” must be two increasing whole numbers"),
        ("?v=1&new=1000", "“new” must be a whole number from 1 to 256"),
        ("?v=1&asked=everything", "“asked” must be some of circuit, copying"),
        ("?v=1&colour=red", "“colour” is unknown here"),
        ("?v=2&layer=3", "another version"),
    ],
)
def test_what_cannot_be_used_is_said_and_ignored(query: str, said: str) -> None:
    view, notices = from_query(query, View())
    assert view == View()
    assert len(notices) == 1 and said in notices[0]


def test_the_pages_of_the_address_are_the_pages_there_are() -> None:
    assert tuple(page.NAME for page in PAGE_MODULES) == PAGES


def test_long_texts_stand_in_the_address_by_their_digest() -> None:
    texts, long = TextStore(), "word " * MAX_INLINE
    assert texts.put("short") == "short" and texts.get("short") == "short"
    stored = texts.put(long)
    assert len(to_query(View(text=stored))) < 100
    assert texts.get(stored) == long
    assert texts.get(texts.put("@home")) == "@home"  # what merely looks like a digest is text
    with pytest.raises(WorkbenchError, match="paste it again"):
        TextStore().get(stored)


def test_the_oldest_texts_are_let_go() -> None:
    texts = TextStore(keep=2)
    first, second, third = (texts.put(letter * (MAX_INLINE + 1)) for letter in "abc")
    assert texts.get(second) and texts.get(third)
    with pytest.raises(WorkbenchError):
        texts.get(first)


def test_a_server_may_open_on_a_text_and_addresses_mean_the_same_there() -> None:
    default = View(text="of a file")
    assert from_query("", default)[0] == default
    assert from_query("?page=pattern", default)[0].text == "of a file"  # typed by hand: it says nothing of the text
    assert from_query(to_query(View()), default)[0] == View()


def test_a_text_is_kept_for_good_where_that_is_asked() -> None:
    store = TextStore(keep=2)
    first, *others = ["x" * 2000, *(str(i) * 2000 for i in range(3))]
    name = store.put(first, for_good=True)
    names = [store.put(other) for other in others]
    assert store.get(name) == first and store.get(names[2]) == others[2]
    with pytest.raises(WorkbenchError, match="no longer holds it"):
        store.get(names[0])
