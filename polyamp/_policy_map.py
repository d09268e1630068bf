"""PolicyMap: ordered rules that give every module of a model its policy.

    for path in the module's path, its parent's, ... up to the model's:
        for pattern, policy in rules:      # in the order given
            if pattern matches the path: the module has this policy
    else: the module has the default

so a rule for `encoder` covers all that is inside, but for what has a rule of its own.

A path is a module's name as the framework spells it, segments separated by `.` (`encoder.0.norm`);
the model itself is the empty path. A pattern is one of

    glob              segments separated by "."; within one segment "*" any characters, "?" one,
                      "[abc]", "[a-z]", "[!abc]" one of (or not of) a set; a whole segment "**"
                      stands for zero or more segments, so "encoder.**" covers `encoder` too
    re:EXPRESSION     a Python regular expression that must match the whole path
    op:FAMILY         softmax, norm or loss: an operation family, not a module

Case matters. Source of the segment rules: Python's `fnmatch`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from polyamp._errors import PolicyError, StateError
from polyamp._formats import shown
from polyamp._policy import Policy, require_supported
from polyamp._policy_pattern import Pattern, compile_pattern, nearest, op_family

_FLOAT32 = Policy("float32", "float32", "float32")


@dataclass(frozen=True, slots=True)
class PolicyMap:
    """Ordered rules from module paths to policies. Frozen and hashable; order counts.

    Attributes:
        rules: (pattern, policy) pairs, the first match wins. The constructor also takes a mapping,
            and any string `Policy.parse` reads for a policy.
        default: the policy of every module that neither has a rule nor lies in one that has.

    Raises:
        PolicyError: a pattern that cannot be read or is given twice, or a policy that is none.
    """

    rules: tuple[tuple[str, Policy], ...] = ()
    default: Policy = _FLOAT32
    _compiled: tuple[tuple[Pattern, Policy], ...] = field(init=False, repr=False, compare=False)

    def __init__(
        self,
        rules: Mapping[str, Policy | str] | Iterable[tuple[str, Policy | str]] = (),
        default: Policy | str = _FLOAT32,
    ) -> None:
        pairs = tuple((p, _policy(v, f"rule {p!r}")) for p, v in _pairs(rules))
        _refuse_duplicates([pattern for pattern, _ in pairs])
        compiled = tuple((compile_pattern(p), v) for p, v in pairs if op_family(p) is None)
        object.__setattr__(self, "rules", pairs)
        object.__setattr__(self, "default", _policy(default, "default"))
        object.__setattr__(self, "_compiled", compiled)

    @property
    def op_rules(self) -> tuple[tuple[str, Policy], ...]:
        """(family, policy) of each `op:` rule. Module paths never match one; a backend applies them
        or refuses them (`require_supported`)."""
        pairs = ((op_family(pattern), policy) for pattern, policy in self.rules)
        return tuple((family, policy) for family, policy in pairs if family is not None)

    @property
    def policies(self) -> tuple[Policy, ...]:
        """Every policy the map can give, each once: the rules' in order, then the default."""
        return tuple(dict.fromkeys((*(policy for _, policy in self.rules), self.default)))

    @property
    def needs_scaling(self) -> bool:
        """Whether any of `policies` needs a loss scale."""
        return any(policy.needs_scaling for policy in self.policies)

    def match(self, path: str) -> tuple[str | None, Policy]:
        """The first pattern that matches `path` itself (None if none does) and its policy."""
        for pattern, policy in self._compiled:
            if pattern.matches(path):
                return pattern.text, policy
        return None, self.default

    def explain(self, path: str) -> tuple[str | None, str, Policy]:
        """Why the module at `path` has its policy.

        Returns:
            The deciding pattern (None: the default), the path it matched (`path` or that of the
            nearest enclosing module with a rule), and the policy.
        """
        owner = path
        while True:
            pattern, policy = self.match(owner)
            if pattern is not None or not owner:
                return pattern, owner, policy
            owner = owner.rpartition(".")[0]

    def policy_for(self, path: str) -> Policy:
        """The policy of the module at `path`: its own rule's, or an enclosing module's."""
        return self.explain(path)[2]

    def check(self, paths: Iterable[str]) -> None:
        """Refuse rules that match none of a model's module paths (`op:` rules aside).

        A rule whose every match is taken by an earlier rule passes.

        Raises:
            PolicyError: names every such pattern and the paths most like it.
        """
        known = _paths(paths)
        idle = [p.text for p, _ in self._compiled if not any(map(p.matches, known))]
        if idle:
            details = "; ".join(f"{text!r} ({nearest(text, known)})" for text in idle)
            raise PolicyError(
                f"no module matches {details}. The model has {len(known)} module paths; correct"
                " the pattern or remove the rule"
            )

    def resolve(self, paths: Iterable[str]) -> dict[str, Policy]:
        """The policy of every path, in the order given, once `check` has passed.

        Raises:
            PolicyError: as `check`.
        """
        known = _paths(paths)
        self.check(known)
        return {path: self.policy_for(path) for path in known}

    def require_supported(
        self,
        backend: str,
        *,
        ops: Collection[str] = (),
        shift: bool = False,
        **allowed: Collection[str],
    ) -> None:
        """Refuse the map if a backend cannot apply one of its policies or `op:` rules.

        Args:
            backend: the name that the message gives.
            ops: operation families the backend can apply.
            shift: whether it can give a module a power of two of its own.
            allowed: as the keywords of `polyamp._policy.require_supported`.

        Raises:
            PolicyError: names the field or family, the backend, and what is allowed.
        """
        for family, _ in self.op_rules:
            if family not in ops:
                raise PolicyError(
                    f"backend {backend!r} cannot apply the rule 'op:{family}' yet; allowed:"
                    f" {', '.join(f'op:{name}' for name in ops) or 'no op: rules'}. Remove the rule"
                )
        for policy in self.policies:
            require_supported(policy, backend, shift=shift, **allowed)

    def to_dict(self) -> dict[str, Any]:
        """The map as a JSON-ready dict: `polyamp` (version), `kind`, `default`, `rules` in order.

        Each rule is a dict of `pattern` and `policy`; policies are canonical strings.
        """
        from polyamp._interchange import VERSION

        rules = [{"pattern": pattern, "policy": str(policy)} for pattern, policy in self.rules]
        header = {"polyamp": VERSION, "kind": "policy_map"}
        return {**header, "default": str(self.default), "rules": rules}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PolicyMap:
        """The map that `to_dict` wrote; policies in any dialect, `rules` also as one mapping.

        Raises:
            StateError: unknown version or kind, a missing or unknown key, a value of the wrong
                type, a pattern or policy that cannot be read; names it.
        """
        from polyamp._interchange import check_header, check_keys

        values = check_header(data, "policy_map")
        check_keys(values, ["default", "rules"], "policy_map")
        rules, default = _saved_rules(values["rules"]), _string(values["default"], "default")
        try:
            return cls(rules, default)
        except PolicyError as error:
            raise StateError(f"policy_map: {error}") from error

    def to_json(self) -> str:
        """The map as JSON text (`to_dict`)."""
        import json

        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_json(cls, text: str) -> PolicyMap:
        """The map in a JSON text.

        Raises:
            StateError: not JSON, a key given twice, or as `from_dict`.
        """
        import json

        try:
            data = json.loads(_string(text, "a JSON text"), object_pairs_hook=_without_duplicates)
        except StateError:
            raise
        except (ValueError, RecursionError) as error:
            raise StateError(f"policy_map: not JSON: {error}") from error
        return cls.from_dict(data)

    def to_toml(self) -> str:
        """The map as TOML text (`to_dict`), one `[[rules]]` table a rule."""
        lines = [
            f"{key} = {_toml(value)}" for key, value in self.to_dict().items() if key != "rules"
        ]
        for pattern, policy in self.rules:
            lines += [
                "",
                "[[rules]]",
                f"pattern = {_toml(pattern)}",
                f"policy = {_toml(str(policy))}",
            ]
        return "\n".join(lines if self.rules else [*lines, "rules = []"]) + "\n"

    @classmethod
    def from_toml(cls, text: str) -> PolicyMap:
        """The map in a TOML text.

        Raises:
            StateError: not TOML, or as `from_dict`.
        """
        import tomllib

        source = _string(text, "a TOML text")
        try:
            data = tomllib.loads(source)
        except (ValueError, RecursionError) as error:
            raise StateError(f"policy_map: not TOML: {error}") from error
        return cls.from_dict(data)


def _pairs(rules: object) -> list[tuple[str, Any]]:
    items: Any = rules.items() if isinstance(rules, Mapping) else rules
    wrong = "rules must be a mapping or (pattern, policy) pairs"
    if isinstance(items, str) or not isinstance(items, Iterable):
        raise PolicyError(f"{wrong}, got {shown(rules)}")
    pairs: list[tuple[str, Any]] = []
    for item in items:
        if not isinstance(item, (tuple, list)) or len(item) != 2:
            raise PolicyError(f"{wrong}, got {shown(item)} among them")
        pattern, policy = item
        if not isinstance(pattern, str):
            raise PolicyError(f"a pattern is a string, got {shown(pattern)}")
        pairs.append((pattern, policy))
    return pairs


def _policy(value: Any, where: str) -> Policy:
    try:
        return Policy.parse(value)
    except PolicyError as error:
        raise PolicyError(f"{where}: {error}") from None


def _refuse_duplicates(patterns: list[str]) -> None:
    seen: set[str] = set()
    for pattern in patterns:
        if pattern in seen:
            raise PolicyError(
                f"pattern {shown(pattern)} has two rules; the second would never apply, remove one"
            )
        seen.add(pattern)


def _paths(paths: Iterable[str]) -> tuple[str, ...]:
    if isinstance(paths, str) or not isinstance(paths, Iterable):
        raise PolicyError(f"expected the module paths of a model, got {shown(paths)}")
    known = tuple(paths)
    for path in known:
        if not isinstance(path, str):
            raise PolicyError(f"a module path is a string, got {shown(path)}")
    return known


def _saved_rules(rules: Any) -> list[tuple[str, str]]:
    from polyamp._interchange import check_keys

    if isinstance(rules, Mapping):
        return [(_string(p, "a pattern"), _string(v, f"rule {p!r}")) for p, v in rules.items()]
    if not isinstance(rules, (list, tuple)):
        raise StateError(f"policy_map: rules must be a list or a mapping, got {shown(rules)}")
    pairs = []
    for i, rule in enumerate(rules):
        where = f"policy_map: rules[{i}]"
        if not isinstance(rule, Mapping):
            raise StateError(f"{where} must have a pattern and a policy, got {shown(rule)}")
        check_keys(rule, ["pattern", "policy"], where)
        pattern = _string(rule["pattern"], f"pattern of rules[{i}]")
        pairs.append((pattern, _string(rule["policy"], f"policy of rules[{i}]")))
    return pairs


def _string(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise StateError(f"policy_map: {what} must be a string, got {shown(value)}")
    return value


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise StateError(f"policy_map: the key {shown(twice)} is given twice; keep one")
    return data


def _toml(value: str | int) -> str:
    """A TOML integer, or a basic string with quotes, backslashes and controls escaped."""
    if isinstance(value, int):
        return str(value)
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    controls = {code: f"\\u{code:04x}" for code in (*range(0x20), 0x7F)}
    return f'"{escaped.translate(controls)}"'
