// Adam (L2) and AdamW (decoupled), with an optional low-precision copy.
//
//     g = fp32(grad) * factor;  L2: g = g + wd * p
//     m = b1 * m + c1 * g;  v = b2 * v + (c2 * g) * g
//     u = (m / k1) / (sqrt(v / k2) + eps);  decoupled: u = u + wd * p
//     p = p - lr * u
//
// Compiled with P, G and C (dtypes of weights, gradients and copies), HAS_COPY and DECOUPLED. Copies
// of INT16 are remainders of masters, whose upper halves are the weights.
#include "common.h"

#define CHUNK 4096  // elements of a block
#define THREADS 128
#define EACH 4  // elements of a thread by one access

// Advance the step counters, unless skipped, and form the coefficient block.
extern "C" __global__ void __launch_bounds__(THREADS)
    adam_prepare(i64 *const *steps, float *block, const double *lr, const double *beta1,
                 const double *beta2, const double *eps, const double *weight_decay,
                 const float *factor, const float *found_inf, i64 tensors, i64 bias_correction) {
    const i64 tensor = (i64)blockIdx.x * THREADS + threadIdx.x;
    if (tensor == 0)
        store_header(block, *lr, *beta1, *beta2, *eps, *weight_decay, *factor, *found_inf);
    if (tensor >= tensors) return;
    const i64 t = *steps[tensor] + 1;
    float *pair = block + HEADER + 2 * tensor;
    pair[0] = bias_correction ? (float)(1.0 - power(*beta1, t)) : 1.0f;
    pair[1] = bias_correction ? (float)(1.0 - power(*beta2, t)) : 1.0f;
    if (*found_inf == 0.0f) *steps[tensor] = t;
}

__device__ inline void step(float &p, float g, float &m, float &v, const Coefficients &c) {
    g = g * c.factor;
    if (!DECOUPLED) g = g + c.wd * p;
    m = c.b1 * m + c.c1 * g;
    v = c.b2 * v + (c.c2 * g) * g;
    float u = (m / c.first) / (sqrtf(v / c.second) + c.eps);
    if (DECOUPLED) u = u + c.wd * p;
    p = p - c.lr * u;
}

// Take COUNT neighbours from `at` on.
template <int COUNT>
__device__ inline void update(Stored<P>::word *__restrict__ params,
                              const Stored<G>::word *__restrict__ grads,
                              float *__restrict__ exp_avgs, float *__restrict__ exp_avg_sqs,
                              Stored<C>::word *__restrict__ copies, int at,
                              const Coefficients &c) {
    float p[COUNT], g[COUNT], m[COUNT], v[COUNT];
    load<P>(p, params + at);
    load<G>(g, grads + at);
    load<FP32>(m, exp_avgs + at);
    load<FP32>(v, exp_avg_sqs + at);
    float low[COUNT] = {};
    if (C == INT16) load<C>(low, copies + at);
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        if (C == INT16) p[i] = __uint_as_float(__float_as_uint(p[i]) + __float_as_uint(low[i]));
        step(p[i], g[i], m[i], v[i], c);
        low[i] = p[i];
        if (C == INT16) {
            const u32 bits = p[i] == p[i] ? __float_as_uint(p[i]) : 0x7FC00000u;
            p[i] = __uint_as_float((bits + 0x8000u) & 0xFFFF0000u);
            low[i] = __uint_as_float(bits);
        }
    }
    store<FP32>(exp_avgs + at, m);
    store<FP32>(exp_avg_sqs + at, v);
    store<P>(params + at, p);
    if (HAS_COPY) store<C>(copies + at, low);
}

// One block for each chunk of each tensor.
extern "C" __global__ void __launch_bounds__(THREADS)
    adam_update(const i64 *table, const float *block, i64 tensors) {
    if (block[FOUND_INF] != 0.0f) return;
    const Chunk chunk(table, tensors, 4 + HAS_COPY, blockIdx.x, CHUNK);
    const Coefficients c(block, chunk.slot);
    auto params = chunk.row<P>(0);
    auto grads = chunk.row<G>(1);
    auto exp_avgs = chunk.row<FP32>(2), exp_avg_sqs = chunk.row<FP32>(3);
    auto copies = chunk.row<C>(HAS_COPY ? 4 : 0);
    const int whole = chunk.aligned ? chunk.left / EACH * EACH : 0;
    for (int at = EACH * threadIdx.x; at < whole; at += EACH * THREADS)
        update<EACH>(params, grads, exp_avgs, exp_avg_sqs, copies, at, c);
    for (int at = whole + threadIdx.x; at < chunk.left; at += THREADS)
        update<1>(params, grads, exp_avgs, exp_avg_sqs, copies, at, c);
}
