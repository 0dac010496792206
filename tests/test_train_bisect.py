"""The smallest set that must stay float32: the search, and what it finds in a model."""

import itertools

import jax
import numpy as np
import pytest
from small_run import flags

import jaxamp
from jaxamp.sensitivity import error
from train.enquiry.bisect import (
    Bisection,
    _finer,
    _OutOfTries,
    _Tried,
    _Tries,
    all_scopes,
    as_pattern,
    bisect,
    smallest,
)
from train.enquiry.case import of_config
from train.enquiry.evidence import Evidence
from train.enquiry.trial import gradient_fn
from train.parse import parse

MEMBERS = tuple("abcdefghij")


@pytest.mark.parametrize("seed", range(3))
def test_no_member_of_the_smallest_can_be_left_out(seed):
    rng = np.random.default_rng(seed)
    for _ in range(50):
        # Enough is what holds one of a few sets: monotone, and there may be several ways.
        ways = [set(rng.choice(MEMBERS, rng.integers(1, 5), replace=False)) for _ in range(3)]
        enough = lambda some: any(way <= set(some) for way in ways)  # noqa: B023, E731
        found = smallest(MEMBERS, enough)
        assert enough(found)
        assert not any(enough(set(found) - {member}) for member in found)


def test_a_set_is_run_once_and_tries_run_out():
    ran = []
    tries = _Tries(lambda some: ran.append(some) or _Tried(False, "so"), most=2)
    assert not tries(("b", "a")) and not tries(("a", "b")) and not tries(("a",))
    assert ran == [("a", "b"), ("a",)] and tries.words(["b", "a"]) == "so"
    with pytest.raises(_OutOfTries):
        tries(("c",))
    assert not tries(("a",))


def test_a_scope_gives_way_to_a_part_of_its_inside():
    tries = _Tries(lambda some: _Tried("b/2" in some or "b" in some, ""), most=99)
    assert _finer(("a", "b"), "b", ("b/1", "b/2", "b/3"), tries) == ("a", "b/2")
    all_of_it = _Tries(lambda some: _Tried("b" in some or {"b/1", "b/2"} <= set(some), ""), 99)
    assert _finer(("a", "b"), "b", ("b/1", "b/2"), all_of_it) == ("a", "b")
    assert _finer(("a", "b"), "b", (), all_of_it) == ("a", "b")


def test_scopes_become_patterns_that_match_them():
    scope = "blocks/attention/BTNH,BSNH->BNTS"
    pattern = as_pattern(scope)
    jaxamp.get_policy("c=bf16").replace(full=(pattern,))  # is a legal glob
    assert jaxamp.scopes.matching([pattern], scope) == [pattern]


def test_what_is_printed():
    words = ["norms finite", "it is not", ("head",), "compute=f16,full=head", "it is", True, 6]
    assert str(Bisection(*words)).splitlines() == [
        "goal: norms finite; without any: it is not",
        "float32 is needed in head",
        "--policy 'compute=f16,full=head'",
        "checked: with it it is",
        "6 sets were run, of 30 at most; none of them can be left out",
    ]
    none = str(Bisection("g", "bad", None, None, "bad", True, 2))
    assert "no set is enough: with all scopes in float32 bad" in none
    assert "nothing has to stay float32" in str(Bisection("g", "ok", (), "c=f16", "ok", True, 1))


@pytest.mark.slow
def test_the_error_is_brought_to_the_target(tmp_path, monkeypatch):
    config = parse(flags(tmp_path, policy="compute=bf16"), "test", "")
    policy = jaxamp.get_policy(config.policy)
    case = of_config(config, policy)
    evidence = Evidence(case)
    own = error(*map(jax.tree.leaves, (evidence.gradient.grads, evidence.gradient32.grads)))
    found = bisect(case, evidence, 0.9 * own)
    assert found.minimal and found.patterns and found.tries <= 30

    def error_with(patterns):
        gradient = gradient_fn(case, policy.replace(full=tuple(patterns)))
        grads = gradient(case.state.params, case.batch, case.key()).grads
        return error(*map(jax.tree.leaves, (grads, evidence.gradient32.grads)))

    assert str(policy.replace(full=found.patterns)) == found.policy
    assert error_with(found.patterns) <= 0.9 * own
    for fewer in itertools.combinations(found.patterns, len(found.patterns) - 1):
        assert error_with(fewer) > 0.9 * own
    assert set(all_scopes(case)) >= {"head", "blocks/feed_forward"}
    # Where the scopes that there are do not do, that is said.
    monkeypatch.setattr("train.enquiry.bisect.all_scopes", lambda case: ("head",))
    none = bisect(case, evidence, 1e-9)
    assert none.policy is None and none.patterns is None and none.tries == 2
