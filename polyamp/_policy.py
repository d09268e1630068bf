"""Policy: which number format is used where in one model or module."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from polyamp._errors import PolicyError, StateError
from polyamp._formats import FORMATS, format_of, shown
from polyamp._policy_parse import DIALECTS, KEYS, parse_fields, parse_shift

OPTIONAL = ("master_dtype", "store_dtype", "accumulate_dtype")
"""Fields of `Policy` that may be None."""
DTYPES = ("param_dtype", "compute_dtype", "output_dtype", *OPTIONAL)
"""Fields of `Policy` that are dtypes, in their order."""
LARGEST_SHIFT = 126
"""Of `Policy.shift`, either way."""


@dataclass(frozen=True, slots=True)
class Policy:
    """Which format parameters, computation, outputs and memory use. Frozen and hashable.

    Every dtype may be given as anything `polyamp._formats.format_of` reads and is kept as its
    canonical name.

    Attributes:
        param_dtype: parameters as the module holds them.
        compute_dtype: inputs and parameters are cast to it for the forward and backward pass.
        output_dtype: what the module returns.
        master_dtype: a second copy of the parameters that the optimizer updates (apex O2); None:
            the optimizer updates the parameters themselves.
        store_dtype: activations kept for the backward pass; None: as computed.
        accumulate_dtype: gradients summed over micro-batches; None: the parameters' dtype.
        shift: bits, -126 to 126; gradients inside the module are 2**shift times as large as
            outside, beside the loss scale, and those of its parameters are divided by it again.

    Raises:
        PolicyError: an unknown dtype, a shift out of range; names the field.
    """

    param_dtype: str
    compute_dtype: str
    output_dtype: str
    master_dtype: str | None = None
    store_dtype: str | None = None
    accumulate_dtype: str | None = None
    shift: int = 0

    def __post_init__(self) -> None:
        for name in DTYPES:
            value = getattr(self, name)
            if value is None and name in OPTIONAL:
                continue
            try:
                object.__setattr__(self, name, format_of(value).name)
            except PolicyError as error:
                raise PolicyError(f"{name}: {error}") from None
        if type(self.shift) is not int or abs(self.shift) > LARGEST_SHIFT:
            raise PolicyError(
                f"shift must be a whole number from -{LARGEST_SHIFT} to {LARGEST_SHIFT}, got"
                f" {shown(self.shift)}"
            )

    @classmethod
    def parse(cls, text: str | int | Policy) -> Policy:
        """The policy that `text` means, in any dialect of docs/policy.md.

        Args:
            text: a string, one of Lightning's integers 16, 32, 64, or a `Policy` (returned as is).

        Raises:
            PolicyError: lists what is allowed and the closest match.
        """
        if isinstance(text, Policy):
            return text
        if type(text) is int and text in (16, 32, 64):
            text = str(text)
        if not isinstance(text, str):
            hint = (
                "For rules by module path write PolicyMap({...})"
                if isinstance(text, Mapping)
                else "For a dtype object write Policy(param, compute, output)"
            )
            raise PolicyError(
                f"a policy is a string, a Policy, or 16, 32 or 64; got {shown(text)} of type"
                f" {type(text).__name__}. {hint}"
            )
        name, at, own = text.partition("@")
        if not at:
            return cls(*parse_fields(text))
        shift = parse_shift(own, text)
        try:
            return cls(*parse_fields(name), shift=shift)
        except PolicyError as error:
            raise PolicyError(f"policy {shown(text)}: {error}") from None

    @property
    def needs_scaling(self) -> bool:
        """Whether gradients pass through a format with a narrower range than float32's.

        True for float16 and the float8 formats as parameter, compute, output or accumulation
        dtype: small gradients become 0 there unless the loss is scaled.
        """
        dtypes = (self.param_dtype, self.compute_dtype, self.output_dtype, self.accumulate_dtype)
        wide = FORMATS["float32"].exponent_bits
        return any(d is not None and FORMATS[d].exponent_bits < wide for d in dtypes)

    def __str__(self) -> str:
        values = (getattr(self, name) for name in DTYPES)
        pairs = (f"{key}={v}" for key, v in zip(KEYS, values, strict=True) if v is not None)
        return ",".join(pairs) + (f"@2^{self.shift}" if self.shift else "")

    def to_dict(self) -> dict[str, Any]:
        """The policy as a JSON-ready dict: `polyamp` (version), `kind`, all six dtypes, and `shift`
        where it is not 0."""
        from polyamp._interchange import VERSION

        values = {name: getattr(self, name) for name in DTYPES}
        own = {"shift": self.shift} if self.shift else {}
        return {"polyamp": VERSION, "kind": "policy", **values, **own}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Policy:
        """The policy that `to_dict` wrote.

        Raises:
            StateError: unknown version or kind, a missing or unknown key, a value that is no
                string (or None, where the field allows it), an unknown dtype; names the key.
        """
        from polyamp._interchange import check_header, check_keys

        values = check_header(data, "policy")
        shift = values.pop("shift", 0)
        check_keys(values, list(DTYPES), "policy")
        for key, value in values.items():
            if not isinstance(value, str) and not (value is None and key in OPTIONAL):
                allowed = "the name of a dtype" + (" or null" if key in OPTIONAL else "")
                raise StateError(f"policy: {key} must be {allowed}, got {shown(value)}")
        try:
            return cls(**values, shift=shift)
        except PolicyError as error:
            raise StateError(f"policy: {error}") from error


PRESETS: Mapping[str, Policy] = MappingProxyType(
    {name: Policy(*values) for names in DIALECTS.values() for name, values in names.items()}
)
"""Policies by the names that Keras, Lightning, Accelerate and apex give them. Read-only."""


def parse_policy(text: str | int | Policy) -> Policy:
    """`Policy.parse`: the policy that a string in any dialect of docs/policy.md means.

    Raises:
        PolicyError: lists what is allowed and the closest match.
    """
    return Policy.parse(text)


def require_supported(
    policy: Policy,
    backend: str,
    *,
    param: Collection[str] | None = None,
    compute: Collection[str] | None = None,
    output: Collection[str] | None = None,
    master: Collection[str] = (),
    store: Collection[str] = (),
    accumulate: Collection[str] = (),
    shift: bool = False,
) -> None:
    """Refuse a policy that a backend cannot apply; the one place where this is decided.

    Args:
        policy: what the user asked for.
        backend: the name that the message gives, for example `"torch"`.
        param, compute, output: canonical dtype names the backend can apply; None: not checked.
        master, store, accumulate: the same for the optional fields; empty: the field must be None.
        shift: whether it can give a module a power of two of its own.

    Raises:
        PolicyError: names each field that cannot be applied, the backend, and what is allowed.
    """
    limits = (param, compute, output, master, store, accumulate)
    wrong = [
        f"{name}={value!r} ({_allowed(name, limit)})"
        for name, limit in zip(DTYPES, limits, strict=True)
        if limit is not None and (value := getattr(policy, name)) is not None
        if value not in limit
    ]
    if policy.shift and not shift:
        wrong.append(f"@2^{policy.shift} (allowed: leave it out)")
    if wrong:
        raise PolicyError(
            f"backend {backend!r} cannot apply {'; '.join(wrong)} of policy {str(policy)!r}"
        )


def _allowed(field: str, limit: Collection[str]) -> str:
    names = ", ".join(limit)
    if field in OPTIONAL:
        return f"allowed: leave it out{f', or {names}' if names else '; not supported yet'}"
    return f"allowed: {names or 'none'}"
