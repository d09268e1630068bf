"""Hypothesis strategies for policies, patterns and policy maps."""

from __future__ import annotations

from hypothesis import strategies as st

from polyamp._formats import FORMATS
from polyamp._policy import Policy
from polyamp._policy_map import PolicyMap
from polyamp._policy_pattern import OP_FAMILIES

NAMES = st.sampled_from(sorted(FORMATS))
MAYBE = st.none() | NAMES
POLICIES = st.builds(Policy, NAMES, NAMES, NAMES, MAYBE, MAYBE, MAYBE)

ATOM_LIST = [
    *["a", "b", "0", "_", "^", "-", "(", "+", "$", "é", "\n", "*", "?", "[[]", "[a-b-c]"],
    *["[ab]", "[!a]", "[a-c]", "[]a]", "[!]a]", "[-a]", "[a-]", "[^a]", "[a^]", "[!^a]"],
    *["[&&b]", "[||a]", "[~~a]", "[+-0]", "[\\d]"],
]
"""Pieces of one glob segment."""

ATOMS = st.sampled_from(ATOM_LIST)
SEGMENTS = st.just("**") | st.lists(ATOMS, min_size=1, max_size=4).map("".join).filter(
    lambda s: "**" not in s
)
GLOBS = st.lists(SEGMENTS, max_size=5).map(".".join)
FREE = st.text(min_size=1).filter(lambda s: s.strip("*") and not set(s) & set(".[*"))
PATTERNS = (
    GLOBS
    | FREE.filter(lambda s: not s.startswith(("re:", "op:")))
    | FREE.filter(lambda s: not set(s) & set(r"\?+(){}|^$")).map("re:{}".format)
    | st.sampled_from([f"op:{family}" for family in OP_FAMILIES])
)
MAPS = st.builds(
    PolicyMap,
    st.lists(st.tuples(PATTERNS, POLICIES), max_size=6, unique_by=lambda rule: rule[0]),
    POLICIES,
)
