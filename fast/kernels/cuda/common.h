// Element types, pointer tables, and the coefficient block, as `fast.kernels` lays them out.
//
// Every operation is rounded as it is written: the launcher passes --fmad=false, --prec-div=true,
// --prec-sqrt=true and --ftz=false.
#pragma once

typedef long long i64;
typedef unsigned long long u64;
typedef unsigned int u32;
typedef unsigned short u16;

// Numbers of dtypes, as in `library.NUMBERS`.
#define FP32 0
#define FP16 1
#define BF16 2
#define INT16 3  // remainders of masters: an integer's bits, in the place of a float's

template <int TYPE> struct Stored {
    typedef u16 word;
};
template <> struct Stored<FP32> {
    typedef float word;
};

template <int TYPE> __device__ inline float widen(typename Stored<TYPE>::word x);
template <> __device__ inline float widen<FP32>(float x) { return x; }
template <> __device__ inline float widen<BF16>(u16 x) { return __uint_as_float((u32)x << 16); }
template <> __device__ inline float widen<FP16>(u16 x) {
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(x));
    return wide;
}

template <> __device__ inline float widen<INT16>(u16 x) { return __int_as_float((short)x); }

template <int TYPE> __device__ inline typename Stored<TYPE>::word narrow(float x);
template <> __device__ inline float narrow<FP32>(float x) { return x; }
template <> __device__ inline u16 narrow<BF16>(float x) {
    u16 low;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(low) : "f"(x));
    return low;
}
template <> __device__ inline u16 narrow<INT16>(float x) { return (u16)__float_as_uint(x); }
template <> __device__ inline u16 narrow<FP16>(float x) {
    u16 low;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(low) : "f"(x));
    return low;
}

// COUNT neighbours that are read or written by one access, as words of 32 bits.
template <int TYPE, int COUNT> struct alignas(COUNT * sizeof(typename Stored<TYPE>::word)) Pack {
    static const int EACH = TYPE == FP32 ? 1 : 2;  // elements of a word
    u32 at[COUNT / EACH];

    __device__ float operator[](int i) const {
        const u32 word = at[i / EACH];
        if constexpr (TYPE == FP32)
            return __uint_as_float(word);
        else if constexpr (TYPE == BF16)
            return __uint_as_float(i % 2 ? word & 0xFFFF0000u : word << 16);
        else
            return widen<TYPE>((u16)(i % 2 ? word >> 16 : word));
    }

    __device__ void set(int i, float x) {
        const auto low = narrow<TYPE>(x);
        if (TYPE == FP32)
            at[i] = __float_as_uint(low);
        else
            at[i / 2] = i % 2 ? at[i / 2] | (u32)low << 16 : (u32)low;
    }
};

template <int TYPE, int COUNT>
__device__ inline void load(float (&x)[COUNT], const typename Stored<TYPE>::word *from) {
    if constexpr (COUNT == 1) {
        x[0] = widen<TYPE>(*from);
    } else {
        const auto pack = *reinterpret_cast<const Pack<TYPE, COUNT> *>(from);
#pragma unroll
        for (int i = 0; i < COUNT; i++) x[i] = pack[i];
    }
}

template <int TYPE, int COUNT>
__device__ inline void store(typename Stored<TYPE>::word *to, const float (&x)[COUNT]) {
    if constexpr (COUNT == 1) {
        *to = narrow<TYPE>(x[0]);
    } else {
        Pack<TYPE, COUNT> pack;
#pragma unroll
        for (int i = 0; i < COUNT; i++) pack.set(i, x[i]);
        *reinterpret_cast<Pack<TYPE, COUNT> *>(to) = pack;
    }
}

// One chunk of one tensor: what an entry of a pointer table with DEPTH rows of addresses leads to.
struct Chunk {
    const i64 *column;  // of the tensor, in the row of first addresses
    i64 tensors, first, slot;
    int left;  // elements of the chunk
    bool aligned;

    __device__ Chunk(const i64 *table, i64 count, int depth, i64 chunk, int size) : tensors(count) {
        const i64 *pair = table + (depth + 3) * count + 2 * chunk;
        column = table + pair[0];
        first = pair[1] * size;
        const i64 numel = column[depth * count];
        left = (int)(numel - first < size ? numel - first : size);
        aligned = column[(depth + 1) * count] != 0;
        slot = column[(depth + 2) * count];
    }

    template <int TYPE> __device__ typename Stored<TYPE>::word *row(int number) const {
        auto start = reinterpret_cast<typename Stored<TYPE>::word *>(column[number * tensors]);
        // Accesses through generic addresses are slower.
        __builtin_assume(__isGlobal(start));
        return start + first;
    }
};

// The coefficient block: a header, then a pair for each tensor.
#define LR 0
#define WEIGHT_DECAY 1
#define INV_SCALE 2
#define FOUND_INF 3
#define BETA1 4
#define BETA2 5
#define ONE_MINUS_BETA1 6
#define ONE_MINUS_BETA2 7
#define EPS 8
#define MAX_COEFF 11
#define MIN_COEFF 12
#define HEADER 16

struct Coefficients {
    float factor, wd, b1, c1, b2, c2, eps, lr, first, second;

    __device__ Coefficients(const float *block, i64 slot)
        : factor(block[INV_SCALE]), wd(block[WEIGHT_DECAY]), b1(block[BETA1]),
          c1(block[ONE_MINUS_BETA1]), b2(block[BETA2]), c2(block[ONE_MINUS_BETA2]), eps(block[EPS]),
          lr(block[LR]), first(block[HEADER + 2 * slot]), second(block[HEADER + 2 * slot + 1]) {}
};

// Write the header from float64 hyper-parameters, each rounded once.
__device__ inline void store_header(float *block, double lr, double beta1, double beta2, double eps,
                                    double weight_decay, float factor, float found_inf) {
    block[LR] = (float)lr;
    block[WEIGHT_DECAY] = (float)weight_decay;
    block[INV_SCALE] = factor;
    block[FOUND_INF] = found_inf;
    block[BETA1] = (float)beta1;
    block[BETA2] = (float)beta2;
    // In float64: in fp32, 1 - 0.999 is off by 2e-5 of itself.
    block[ONE_MINUS_BETA1] = (float)(1.0 - beta1);
    block[ONE_MINUS_BETA2] = (float)(1.0 - beta2);
    block[EPS] = (float)eps;
}

// base**exponent by squaring, lowest bit first.
__device__ inline double power(double base, i64 exponent) {
    double product = 1.0;
    for (; exponent > 0; exponent >>= 1) {
        if (exponent & 1) product = product * base;
        base = base * base;
    }
    return product;
}
