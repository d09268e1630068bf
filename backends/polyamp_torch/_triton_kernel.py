"""The Triton kernel of `_triton`; imported only where Triton is there."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def pass_over(
    addresses,
    sizes,
    owners,
    starts,
    out,
    inverse,
    dtype: tl.constexpr,
    block: tl.constexpr,
    aligned: tl.constexpr,
    multiply: tl.constexpr,
):
    """One block of one of many tensors.

    Args:
        addresses, sizes: i64, of each tensor: where it is, numbers in it.
        owners, starts: i32 and i64, of each block: whose it is, its first number.
        out: i32, two: the largest magnitude's bits; above 0 where something is not finite.
        inverse: f32, one: what to multiply by, in place, if `multiply`.
        aligned: whether all addresses are multiples of 16.
    """
    number = tl.program_id(0)
    owner = tl.load(owners + number)
    data = tl.load(addresses + owner).to(tl.pointer_type(dtype))
    if aligned:
        data = tl.multiple_of(data, 16)
    start = tl.multiple_of(tl.load(starts + number), block)
    at = start + tl.arange(0, block)
    size = tl.load(sizes + owner)
    if start + block <= size:  # without a mask several numbers are read at once
        look(tl.load(data + at), data + at, None, out, inverse, dtype, multiply)
    else:
        inside = at < size
        read = tl.load(data + at, mask=inside, other=0.0)
        look(read, data + at, inside, out, inverse, dtype, multiply)


@triton.jit
def look(read, data, inside, out, inverse, dtype: tl.constexpr, multiply: tl.constexpr):
    """What was read: its largest, what is not finite, and its product back to `data`."""
    value = read.to(tl.float32)
    bits = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    bad = bits >= 0x7F800000
    # As integers NaN is above infinity and that above all others; a float maximum drops NaN.
    tl.atomic_max(out, tl.max(bits, axis=0))
    if multiply:
        product = (value * tl.load(inverse)).to(dtype)
        tl.store(data, product, mask=inside)
        after = product.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF
        bad = bad | (after >= 0x7F800000)
    tl.atomic_max(out + 1, tl.sum(bad.to(tl.int32), axis=0))
