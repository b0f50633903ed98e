"""Sums of products with packed weights, for kernels: a tile's whole loop over inputs.

Weights stand on the left, [BLOCK_N, k] times rows [k, BLOCK_M]: a tensor core takes its left side
from registers, where they have just been unpacked. In bfloat16 on a GPU two are unpacked by three
or four instructions: their bits, moved to where bfloat16 has its exponent's last and its mantissa's
first, are the number times a power of two, however small; one product gives it the scale it has.
Otherwise, and in the interpreter, arithmetic says the same in float32.
"""

import triton
import triton.language as tl

_FP8_TOP = tl.constexpr(120)  # exponents that e4m3 and bfloat16 are apart
_FP4_TOP = tl.constexpr(126)  # e2m1 and bfloat16
_BOTH = tl.constexpr(0x00800080)  # an exponent of 1, in both halves


@triton.jit
def power_of_two(b):
    """e8m0 bytes as float32, bit by bit; byte 0 is the one below float32's normal numbers."""
    bits = b.to(tl.int32) << 23
    bits = tl.where(b == 0, 1 << 22, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def e2m1(code):
    """Four bits as float32."""
    low = (code & 7).to(tl.int32)
    # above the two smallest: exponent and one digit, moved to where float32 has them
    bits = tl.where(low > 1, (low << 22) + (126 << 23), tl.where(low == 1, 126 << 23, 0))
    value = bits.to(tl.float32, bitcast=True)
    return tl.where((code & 8) != 0, -value, value)


@triton.jit
def fp4_numbers(byte, low_scale, high_scale, dtype: tl.constexpr, ASM: tl.constexpr):
    """Lower and upper halves of bytes [N, k], as numbers; scales are bytes [N, 1], up to 128."""
    if ASM:
        a = (low_scale + _FP4_TOP) * _BOTH
        b = (high_scale + _FP4_TOP) * _BOTH
        low, high = tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, t, u, z;
            mov.b32 z, 0x80008000;
            prmt.b32 a, $4, 0, 0x1404;
            prmt.b32 b, $4, 0, 0x3424;
            and.b32 t, a, 0x70007000;
            shr.u32 t, t, 6;
            lop3.b32 t, a, z, t, 0xEA;
            fma.rn.bf16x2 $2, t, $9, z;
            and.b32 t, b, 0x70007000;
            shr.u32 t, t, 6;
            lop3.b32 t, b, z, t, 0xEA;
            fma.rn.bf16x2 $3, t, $11, z;
            and.b32 t, a, 0x07000700;
            shr.u32 t, t, 2;
            shl.b32 u, a, 4;
            lop3.b32 t, u, z, t, 0xEA;
            fma.rn.bf16x2 $0, t, $5, z;
            and.b32 t, b, 0x07000700;
            shr.u32 t, t, 2;
            shl.b32 u, b, 4;
            lop3.b32 t, u, z, t, 0xEA;
            fma.rn.bf16x2 $1, t, $7, z;
            }""",
            "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r",
            [byte, a, b],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    else:
        low = (e2m1(byte & 15) * power_of_two(low_scale)).to(dtype)
        high = (e2m1(byte >> 4) * power_of_two(high_scale)).to(dtype)
    return low, high


@triton.jit
def fp8_numbers(byte, exponent):
    """e4m3 bytes [N, k] times 2^exponent [N, 1] int32, as bfloat16; by a GPU alone."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 a, t, z;
        mov.b32 z, 0x80008000;
        prmt.b32 a, $2, 0, 0x1404;
        and.b32 t, a, 0x7F007F00;
        shr.u32 t, t, 4;
        lop3.b32 t, a, z, t, 0xEA;
        fma.rn.bf16x2 $0, t, $3, z;
        prmt.b32 a, $2, 0, 0x3424;
        and.b32 t, a, 0x7F007F00;
        shr.u32 t, t, 4;
        lop3.b32 t, a, z, t, 0xEA;
        fma.rn.bf16x2 $1, t, $5, z;
        }""",
        "=&r,=&r,r,r,r,r,r",
        [byte, (exponent + (_FP8_TOP + 127)) * _BOTH],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=4,
    )


@triton.jit
def fp4_sum(total, x_at, w_at, scale_at, K: tl.constexpr, ASM: tl.constexpr):
    """Add all products of fp4 weights in pairs of groups (`engine.kernels.packed.PairedFp4`).

    Args:
        total: [BLOCK_N, BLOCK_M] float32.
        x_at: [BLOCK_M] pointers to rows.
        w_at: [BLOCK_N] pointers to bytes.
        scale_at: [BLOCK_N] pointers to words of four scales.
        K: Inputs.
        ASM: Are rows bfloat16, on a GPU?
    """
    dtype: tl.constexpr = x_at.dtype.element_ty
    steps: tl.constexpr = (K + 127) // 128
    at = tl.arange(0, 32)
    scales = tl.load(scale_at)
    for step in tl.range(0, steps):
        four = scales  # the next ones are on their way while these are used
        scales = tl.load(scale_at + tl.minimum(step + 1, steps - 1))
        for pair in tl.static_range(2):
            k = step * 128 + pair * 64 + at
            byte = tl.load(w_at[:, None] + (step * 64 + pair * 32 + at)[None, :])
            if K % 128 == 0:
                first = tl.load(x_at[None, :] + k[:, None])
                second = tl.load(x_at[None, :] + (k + 32)[:, None])
            else:
                keep = (k < K)[:, None]
                first = tl.load(x_at[None, :] + k[:, None], mask=keep, other=0.0)
                keep = (k + 32 < K)[:, None]
                second = tl.load(x_at[None, :] + (k + 32)[:, None], mask=keep, other=0.0)
            low_scale = ((four >> (16 * pair)) & 255)[:, None]
            high_scale = ((four >> (16 * pair + 8)) & 255)[:, None]
            low, high = fp4_numbers(byte, low_scale, high_scale, dtype, ASM)
            total = tl.dot(low, first, total, input_precision="ieee")
            total = tl.dot(high, second, total, input_precision="ieee")
    return total


@triton.jit
def fp8_sum(total, x_at, w_at, scale_at, K: tl.constexpr, BLOCK_K: tl.constexpr, ASM: tl.constexpr):
    """Add all products of fp8 weights whose scales hold for BLOCK_K inputs.

    Args:
        total: [BLOCK_N, BLOCK_M] float32.
        x_at: [BLOCK_M] pointers to rows.
        w_at: [BLOCK_N] pointers to bytes.
        scale_at: [BLOCK_N] pointers to each row's scales: float32, or e8m0 up to 2^7.
        K: Inputs.
        BLOCK_K: Of one scale.
        ASM: Are rows bfloat16, on a GPU?
    """
    steps: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    powers: tl.constexpr = scale_at.dtype.element_ty == tl.uint8
    scales = tl.load(scale_at)
    for step in tl.range(0, steps):
        scale = scales  # the next ones are on their way while these are used
        scales = tl.load(scale_at + tl.minimum(step + 1, steps - 1))
        k = step * BLOCK_K + tl.arange(0, BLOCK_K)
        if K % BLOCK_K == 0:
            byte = tl.load(w_at[:, None] + k[None, :])
            x = tl.load(x_at[None, :] + k[:, None])
        else:
            keep = (k < K)[None, :]
            byte = tl.load(w_at[:, None] + k[None, :], mask=keep, other=0)
            keep = (k < K)[:, None]
            x = tl.load(x_at[None, :] + k[:, None], mask=keep, other=0.0)
        if ASM and powers:
            w = fp8_numbers(byte, scale.to(tl.int32)[:, None] - 127)
            total = tl.dot(w, x, total)
        else:
            if ASM:
                w = fp8_numbers(byte, tl.zeros_like(scale).to(tl.int32)[:, None])
            else:
                w = byte.to(tl.float8e4nv, bitcast=True).to(x.dtype)
            part = tl.dot(w, x, input_precision="ieee")
            if powers:
                scale = power_of_two(scale)
            total += part * scale[:, None]
    return total
