"""Policy maps: patterns against a slow reference, order, checks, files."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import subprocess
import sys
from fnmatch import fnmatchcase

import pytest
from hypothesis import given
from hypothesis import strategies as st
from policy_strategies import ATOM_LIST, GLOBS, MAPS

from polyamp._errors import PolicyError
from polyamp._policy import Policy
from polyamp._policy_map import PolicyMap
from polyamp._policy_pattern import compile_pattern

F32, MIXED, BF16 = map(Policy.parse, ("float32", "16-mixed", "bf16-mixed"))

MODEL = (
    "",
    "encoder",
    "encoder.0",
    "encoder.0.attention",
    "encoder.0.attention.out_proj",
    "encoder.0.norm",
    "encoder.1",
    "encoder.1.attention",
    "encoder.1.norm",
    "head",
)


def reference(pattern: str, path: str) -> bool:
    """The obvious recursive matcher of glob segments."""

    def go(p: tuple[str, ...], s: tuple[str, ...]) -> bool:
        if not p:
            return not s
        if p[0] == "**":
            return any(go(p[1:], s[k:]) for k in range(len(s) + 1))
        return bool(s) and fnmatchcase(s[0], p[0]) and go(p[1:], s[1:])

    def split(text: str) -> tuple[str, ...]:
        return tuple(text.split(".")) if text else ()

    return go(split(pattern), split(path))


def matching(pattern: str, paths: tuple[str, ...] = MODEL) -> list[str]:
    expression = compile_pattern(pattern)
    return [path for path in paths if expression.matches(path)]


PATH_SEGMENTS = st.text("abc01_^-(+$é\n[]\\d&|~", min_size=1, max_size=3)
PATHS = st.lists(PATH_SEGMENTS, max_size=5).map(".".join)

# --- patterns


@given(GLOBS, PATHS)
def test_globs_match_as_the_reference(pattern, path):
    assert compile_pattern(pattern).matches(path) == reference(pattern, path)


def test_each_piece_matches_the_same_single_characters_as_fnmatch():
    wrong = [
        (atom, char)
        for atom in ATOM_LIST
        for char in map(chr, [*range(46), *range(47, 256)])
        if compile_pattern(atom).matches(char) != fnmatchcase(char, atom)
    ]
    assert wrong == []


@pytest.mark.parametrize("pattern", ["a?b", "a*b", "a[!x]b", "a[+-0]b", "?*b", "[!x]*b"])
def test_nothing_within_a_segment_matches_across_a_dot(pattern):
    assert matching(pattern, ("a.b", "a..b", "a.b.b", "aa.bb")) == []
    assert matching(pattern, ("a/b", "a.b")) == ["a/b"]


@given(st.lists(st.sampled_from(["**", "*", "a", "b", "a*"]), max_size=6).map(".".join))
def test_globs_match_the_same_short_paths_as_the_reference(pattern):
    paths = ("", "a", "b", "ab", "a.a", "a.b", "b.a", "a.b.a", "ab.a.b", "a.a.a.a", "b.b.b.b.b")
    assert matching(pattern, paths) == [path for path in paths if reference(pattern, path)]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("", [""]),
        ("*", ["encoder", "head"]),
        ("**", list(MODEL)),
        ("head", ["head"]),
        ("encoder.*", ["encoder.0", "encoder.1"]),
        ("encoder.**", [path for path in MODEL if path.startswith("encoder")]),
        ("encoder.*.**", [path for path in MODEL if path.startswith("encoder.")]),
        ("**.norm", ["encoder.0.norm", "encoder.1.norm"]),
        ("**.head", ["head"]),
        ("encoder.[1-9].*", ["encoder.1.attention", "encoder.1.norm"]),
        ("encoder.?.n*m", ["encoder.0.norm", "encoder.1.norm"]),
        ("**.attention.**", [path for path in MODEL if "attention" in path]),
        ("enc", []),
        ("Head", []),
        ("re:.*norm", ["encoder.0.norm", "encoder.1.norm"]),
        ("re:head|encoder", ["encoder", "head"]),
        ("re:", [""]),
    ],
)
def test_what_a_pattern_matches(pattern, expected):
    assert matching(pattern) == expected


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("encoder..norm", "empty segment"),
        (".encoder", "empty segment"),
        ("encoder.", "empty segment"),
        ("enc**", r"'\*\*' must be a whole segment"),
        ("encoder.[01", r"'\[' without '\]'"),
        ("encoder.[0.1]", r"'\[' without '\]'"),
        ("encoder.[!]", r"'\[' without '\]'"),
        ("encoder.[9-0]", "range 9-0 is reversed; write 0-9"),
        ("re:(", "not a valid regular expression: missing"),
        ("re:a{1,99999999999}", "not a valid regular expression"),
        ("re:(?L)a", "not a valid regular expression"),
        ("re:" + "(" * 5000, "not a valid regular expression"),
        ("op:sofmax", r"unknown operation family 'op:sofmax'; did you mean 'softmax'\?"),
        ("op:", "Allowed: op:softmax, op:norm, op:loss"),
    ],
)
def test_a_pattern_that_cannot_be_read_is_refused(pattern, message):
    with pytest.raises(PolicyError, match=message):
        PolicyMap({pattern: "fp16"})


@given(st.text() | st.text().map("re:{}".format) | st.text(".*?[]!-ab:(").map(str))
def test_any_string_is_a_pattern_or_a_policy_error(pattern):
    rules, message = None, ""
    try:
        rules = PolicyMap({pattern: "fp16"})
    except PolicyError as error:
        message = str(error)
    if rules is None:
        assert repr(pattern)[:20] in message
    else:
        assert rules.rules == ((pattern, MIXED),)


# --- rules


def test_first_match_wins_and_the_default_is_last():
    rules = PolicyMap({"encoder.0.**": "fp16", "encoder.**": "bf16"}, default="float32")
    assert rules.match("encoder.0.norm") == ("encoder.0.**", MIXED)
    assert rules.match("encoder.1.norm") == ("encoder.**", BF16)
    assert rules.match("encoder") == ("encoder.**", BF16)
    assert rules.match("head") == (None, F32)
    assert rules.policy_for("encoder.0") == MIXED
    turned = PolicyMap(tuple(reversed(rules.rules)))
    assert turned.policy_for("encoder.0.norm") == BF16
    assert turned != rules


def test_resolve_gives_every_path_its_policy_in_order():
    rules = PolicyMap({"**.norm": F32, "encoder.**": "16-mixed"}, "bf16-mixed")
    found = rules.resolve(MODEL)
    assert list(found) == list(MODEL)
    assert found["encoder.0.norm"] == F32
    assert found["encoder.0.attention"] == MIXED
    assert found[""] == found["head"] == BF16


@given(MAPS, PATHS)
def test_match_agrees_with_the_rules_in_order(rules, path):
    pattern, policy = rules.match(path)
    for candidate, wanted in rules.rules:
        if candidate.startswith("op:"):
            continue
        if compile_pattern(candidate).matches(path):
            assert (pattern, policy) == (candidate, wanted)
            return
    assert (pattern, policy) == (None, rules.default)


@given(MAPS)
def test_equal_means_equal_hash(rules):
    twin = PolicyMap(list(rules.rules), rules.default)
    assert twin == rules
    assert hash(twin) == hash(rules)
    assert copy.deepcopy(rules) == pickle.loads(pickle.dumps(rules)) == rules


def test_maps_are_frozen_and_replaceable():
    rules = PolicyMap({"head": "float32"}, "fp16")
    with pytest.raises(dataclasses.FrozenInstanceError):
        rules.default = F32
    changed = dataclasses.replace(rules, default="bf16")
    assert (changed.rules, changed.default) == (rules.rules, BF16)
    assert rules.default == MIXED


def test_the_default_of_a_map_is_float32():
    assert PolicyMap().policy_for("anything") == F32


def test_policies_lists_each_once():
    rules = PolicyMap({"a": "fp16", "b": "bf16", "c": "fp16"}, "bf16")
    assert rules.policies == (MIXED, BF16)


def test_a_map_needs_scaling_if_one_of_its_policies_does():
    assert PolicyMap({"head": "fp16"}, "bf16").needs_scaling is True
    assert PolicyMap({"head": "no"}, "16-mixed").needs_scaling is True
    assert PolicyMap({"head": "no"}, "bf16").needs_scaling is False


def test_op_rules_are_kept_apart():
    rules = PolicyMap({"op:softmax": "float32", "**": "fp16", "op:loss": "bf16"})
    assert rules.op_rules == (("softmax", F32), ("loss", BF16))
    assert rules.policy_for("op:softmax") == MIXED
    assert rules.resolve(["head"]) == {"head": MIXED}


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ("head", "rules must be a mapping or"),
        (3, "rules must be a mapping or"),
        (["head"], "got 'head' among them"),
        ([("a", "fp16", 1)], "among them"),
        ([(1, "fp16")], "a pattern is a string, got 1"),
        ([("a", "fp16"), ("a", "bf16")], "pattern 'a' has two rules"),
        ({"head": "mixd_float16"}, r"rule 'head': unknown policy .* did you mean 'mixed_float16'"),
        ({"head": None}, "rule 'head': a policy is a string"),
        ({"head": "16-mixed@2x"}, "rule 'head': .*behind '@' stands a power of two"),
    ],
)
def test_wrong_rules_are_refused(rules, message):
    with pytest.raises(PolicyError, match=message):
        PolicyMap(rules)


def test_a_wrong_default_is_refused():
    with pytest.raises(PolicyError, match="default: unknown policy 'fp61'; did you mean 'fp16'"):
        PolicyMap({}, "fp61")


# --- rules that match nothing


@pytest.mark.parametrize(
    ("pattern", "near"),
    [
        ("encodr.**", "'encoder'"),
        ("**.atention", "'encoder.0.attention'"),
        ("encoder.*.attention.outproj", "'encoder.0.attention.out_proj'"),
        ("heads", "'head'"),
        ("Head", "'head'"),
        ("re:encoder\\.\\d\\.nrom", "'encoder.1.norm', 'encoder.0.norm'"),
    ],
)
def test_a_pattern_that_matches_nothing_is_an_error_with_near_misses(pattern, near):
    rules = PolicyMap({"head": "float32", pattern: "fp16"})
    with pytest.raises(PolicyError) as caught:
        rules.check(MODEL)
    assert repr(pattern) in str(caught.value)
    assert f"nearest: {near}" in str(caught.value)
    assert "'head' (" not in str(caught.value)
    with pytest.raises(PolicyError, match="no module matches"):
        rules.resolve(MODEL)


def test_all_patterns_that_match_nothing_are_named_at_once():
    rules = PolicyMap({"headd": "fp16", "encoder": "fp16", "zzz": "fp16"})
    with pytest.raises(PolicyError) as caught:
        rules.check(iter(MODEL))
    text = str(caught.value)
    assert "'headd' (nearest: 'head'" in text
    assert "'zzz' (paths are: '', 'encoder', 'encoder.0'" in text
    assert "'encoder' (" not in text
    assert "10 module paths" in text


@given(MAPS, st.lists(PATHS, max_size=8))
def test_check_passes_exactly_if_every_module_pattern_matches_a_path(rules, paths):
    patterns = [p for p, _ in rules.rules if not p.startswith("op:")]
    idle = [p for p in patterns if not any(map(compile_pattern(p).matches, paths))]
    if not idle:
        assert rules.resolve(paths) == {path: rules.policy_for(path) for path in paths}
        return
    with pytest.raises(PolicyError) as caught:
        rules.check(paths)
    assert all(repr(p) in str(caught.value) for p in idle)


def test_a_rule_that_an_earlier_one_covers_passes():
    rules = PolicyMap({"**": "fp16", "head": "bf16"})
    assert set(rules.resolve(MODEL).values()) == {MIXED}


@pytest.mark.parametrize("paths", ["encoder", None, 3, [1]])
def test_what_are_no_paths_is_refused(paths):
    with pytest.raises(PolicyError, match="module path"):
        PolicyMap({"head": "fp16"}).check(paths)


# --- what a backend can apply


def test_a_backend_refuses_a_map_by_its_policies_and_op_rules():
    rules = PolicyMap({"head": "c=f16,store=f16"}, "bf16")
    with pytest.raises(PolicyError, match="'toy' cannot apply store_dtype='float16'"):
        rules.require_supported("toy")
    assert rules.require_supported("toy", store=("float16",)) is None
    ops = PolicyMap({"op:norm": "float32"})
    with pytest.raises(PolicyError, match="'toy' cannot apply the rule 'op:norm' yet"):
        ops.require_supported("toy", ops=("loss",))
    assert ops.require_supported("toy", ops=("norm",)) is None


def test_importing_policies_loads_no_heavy_module():
    code = (
        "import sys, polyamp._policy_map\n"
        "print(sorted({'numpy', 'ml_dtypes', 'tomllib', 'torch', 'jax'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_module_without_a_rule_has_the_policy_of_what_encloses_it():
    rules = PolicyMap({"tower": "float32", "**.attn": "fp16", "tower.2": "bf16"}, default="O3")
    assert rules.policy_for("tower.0.mlp.fc") == Policy.parse("float32")
    assert rules.policy_for("tower.0.attn.q") == Policy.parse("fp16")
    assert rules.policy_for("tower.2.mlp") == Policy.parse("bf16")
    assert rules.policy_for("towers.0") == Policy.parse("O3")
    assert rules.explain("tower.0.attn.q") == ("**.attn", "tower.0.attn", Policy.parse("fp16"))
    assert rules.explain("head") == (None, "", Policy.parse("O3"))


@given(MAPS, PATHS)
def test_an_own_rule_always_beats_an_enclosing_one(rules, path):
    pattern, policy = rules.match(path)
    if pattern is not None:
        assert rules.explain(path) == (pattern, path, policy)
    elif path:
        assert rules.policy_for(path) == rules.policy_for(path.rpartition(".")[0])
