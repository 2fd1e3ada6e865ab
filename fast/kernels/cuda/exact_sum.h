// Exact sums of squares as integers: the limbs of `fast.kernels._limbs`.
//
// Most elements take a short way without float64, branch or barrier: scaled by a power of two an
// element is an integer, and its square is added to a 64-bit sum. A warp has a window of exponents
// whose upper end is 2**top:
//
//     16 bits: x * 2**(26 - top) is an integer below 2**26. 19 exponents for bf16, 16 for fp16.
//     fp32:    x * 2**(22 - top) = h + l * 2**-23, both below 2**22; three sums, of h * h, h * l
//              and l * l. 22 exponents.
//
// What is outside is added to the limbs one by one; a warp that meets larger numbers, or nothing
// but smaller ones, takes another window.
#pragma once
#include "common.h"

#define LIMBS 24
#define ORIGIN 11  // the limb that weighs 1
#define NONFINITE 24
#define PADDED 32
#define DIGIT 0xFFFFFFFFll
#define ALL 0xFFFFFFFFu
#define MAGIC 8388608.0f          // 2**23
#define SIGNED_MAGIC 12582912.0f  // 1.5 * 2**23, whose bits are 0x4B400000

// Limbs of a block, in shared memory.
struct Limbs {
    i64 at[LIMBS];
    int infinite, nan;

    __device__ void clear() {
        for (int i = threadIdx.x; i < LIMBS; i += blockDim.x) at[i] = 0;
        if (threadIdx.x == 0) infinite = nan = 0;
        __syncthreads();
    }

    // Add value * 2**exponent.
    __device__ void add(i64 value, int exponent) {
        const int bit = exponent + 32 * ORIGIN, limb = bit >> 5, by = bit & 31;
        const i64 low = (value & DIGIT) << by, high = (value >> 32) << by;
        u64 *to = reinterpret_cast<u64 *>(at) + limb;
        atomicAdd(to, (u64)(low & DIGIT));
        atomicAdd(to + 1, (u64)((i64)((u64)low >> 32) + (high & DIGIT)));
        atomicAdd(to + 2, (u64)(high >> 32));
    }

    // Add the sum of a warp's values.
    __device__ void add_warp(i64 value, int exponent) {
#pragma unroll 1
        for (int part = 0; part < 64; part += 16) {
            const int cut = (int)(value >> part);
            const int sum = __reduce_add_sync(ALL, part < 48 ? cut & 0xFFFF : cut);
            if (threadIdx.x % 32 == 0 && sum != 0) add(sum, exponent + part);
        }
    }

    // Add what the block has found to limbs in global memory.
    __device__ void finish(i64 *to) {
        __syncthreads();
        u64 *words = reinterpret_cast<u64 *>(to);
        for (int i = threadIdx.x; i < LIMBS; i += blockDim.x)
            if (at[i] != 0) atomicAdd(words + i, (u64)at[i]);
        if (threadIdx.x == 0 && (infinite | nan) != 0)
            atomicAdd(words + NONFINITE, (u64)infinite + ((u64)nan << 32));
    }
};

__device__ inline float two_to(int exponent) { return __uint_as_float((u32)(exponent + 127) << 23); }

// Running sum of one warp; every lane of it makes every call.
template <int TYPE> struct Sum {
    static const int BITS = TYPE == FP32 ? 22 : 26;  // of an integer
    static const int WINDOW = TYPE == FP32 ? 22 : TYPE == FP16 ? 16 : 19;
    static const int LOWEST = BITS - 126;           // `top` whose scale is still an fp32 number
    static const int CHAINS = TYPE == FP32 ? 1 : 4;  // of sums that do not wait for one another
    static const int ROOM = 1 << (62 - 2 * BITS);  // squares for which there is room

    Limbs &limbs;
    int top, room;
    float scale, limit, least;
    i64 a[CHAINS], b[CHAINS], c[CHAINS];

    __device__ Sum(Limbs &shared) : limbs(shared) {
        empty();
        begin(1.0f);
    }

    __device__ void empty() {
        for (int i = 0; i < CHAINS; i++) a[i] = b[i] = c[i] = 0;
        room = ROOM;
    }

    __device__ void begin(float largest) {
        top = (int)(__float_as_uint(largest) >> 23) - 127 + 2;
        if (top < LOWEST) top = LOWEST;
        if (top > 128) top = 128;
        scale = two_to(BITS - top);
        limit = two_to(top);  // 2**128 is infinity
        least = two_to(top - WINDOW);
    }

    __device__ void flush() {
        for (int i = 1; i < CHAINS; i++) {
            a[0] += a[i];
            b[0] += b[i];
            c[0] += c[i];
        }
        const int unit = 2 * (top - BITS);
        limbs.add_warp(a[0], unit);
        if (TYPE == FP32) {
            limbs.add_warp(b[0], unit - 23 + 1);
            limbs.add_warp(c[0], unit - 46);
        }
        empty();
    }

    // Add the squares of COUNT numbers of each lane.
    template <int COUNT> __device__ void add(float (&x)[COUNT]) {
        room -= COUNT;
        bool outside = room < 0;
#pragma unroll
        for (int i = 0; i < COUNT; i++) outside |= !(fabsf(x[i]) < limit) | (fabsf(x[i]) < least);
        if (__any_sync(ALL, outside)) apart(x);
#pragma unroll
        for (int i = 0; i < COUNT; i++) inside(x[i], i % CHAINS);
    }

    __device__ void inside(float x, int chain) {
        if (TYPE == FP32) {
            const float high = __fmaf_rn(x, scale, SIGNED_MAGIC);
            const float rest = __fmaf_rn(x, scale, -(high - SIGNED_MAGIC));
            const float low = __fmaf_rn(rest, MAGIC, SIGNED_MAGIC);
            const int h = (int)(__float_as_uint(high) - 0x4B400000u);
            const int l = (int)(__float_as_uint(low) - 0x4B400000u);
            a[chain] += (i64)h * h;
            b[chain] += (i64)h * l;
            c[chain] += (i64)l * l;
        } else {
            const u32 n = __float2uint_rz(fabsf(x * scale));
            a[chain] += (u64)n * n;
        }
    }

    // Take what is outside of the window out of `x`, or move the window; make room.
    template <int COUNT> __device__ void apart(float (&x)[COUNT]) {
        float largest = 0.0f;
        bool infinite = false, nan = false;
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            infinite |= fabsf(x[i]) == two_to(128);
            nan |= x[i] != x[i];
            if (!(fabsf(x[i]) < two_to(128))) x[i] = 0.0f;
            largest = fmaxf(largest, fabsf(x[i]));
        }
        if (infinite) atomicOr(&limbs.infinite, 1);
        if (nan) atomicOr(&limbs.nan, 1);
        largest = __uint_as_float(__reduce_max_sync(ALL, __float_as_uint(largest)));
        const bool move = largest >= limit || (largest < least && largest != 0.0f);
        if (move || room < 0) {
            flush();
            room -= COUNT;
            if (move) begin(largest);
        }
        float small;
        do {
            small = 0.0f;
#pragma unroll
            for (int i = 0; i < COUNT; i++) {
                if (small == 0.0f && fabsf(x[i]) < least) {
                    small = fabsf(x[i]);
                    x[i] = 0.0f;
                }
            }
            if (small != 0.0f) {
                const u32 bits = __float_as_uint(small), exponent = bits >> 23;
                const i64 digits = (bits & 0x7FFFFFu) | (exponent ? 0x800000u : 0);
                limbs.add(digits * digits, 2 * ((int)(exponent ? exponent : 1) - 150));
            }
        } while (small != 0.0f);
    }
};

// The sum of what is finite, rounded once to the nearest even float64.
__device__ inline double rounded(const i64 *limbs) {
    i64 carry = 0;
    u32 d0 = 0, d1 = 0, d2 = 0, previous = 0, second = 0, below = 0, rest = 0;
    int top = 0;
#pragma unroll
    for (int limb = 0; limb < LIMBS; limb++) {
        const i64 value = limbs[limb] + carry;
        const u32 digit = (u32)value;
        carry = value >> 32;
        if (digit != 0) {
            d0 = digit;
            d1 = previous;
            d2 = second;
            below = rest;
            top = limb;
        }
        rest |= second;
        second = previous;
        previous = digit;
    }
    if (d0 == 0) return 0.0;
    // Shifted so that the leading 1 is bit 63: the conversion drops 11 bits, and the lowest of them
    // is set where anything lies further down.
    const int shift = __clz(d0);
    const u64 lower = (u64)d2 << shift;
    u64 high = ((((u64)d0 << 32) | d1) << shift) | (lower >> 32);
    high |= ((u32)lower | below) != 0;
    const i64 exponent = 32 * (top - 1 - ORIGIN) - shift;
    return __ull2double_rn(high) * __longlong_as_double((exponent + 1023) << 52);
}

// The norm; any NaN gives NaN, otherwise any infinity gives inf.
__device__ inline float norm_of(const i64 *limbs) {
    const i64 nonfinite = limbs[NONFINITE];
    if (nonfinite >> 32) return __uint_as_float(0x7FC00000u);
    if (nonfinite) return __uint_as_float(0x7F800000u);
    return (float)sqrt(rounded(limbs));
}
