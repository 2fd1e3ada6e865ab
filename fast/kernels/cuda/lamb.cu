// LAMB: Adam's moments, and a step as long as each tensor's norms allow.
//
//     h = fp32(grad) * factor
//     m = b1 * m + c1 * h;  v = b2 * v + (c2 * h) * h
//     u = m / (sqrt(v) + eps), or m / sqrt(v + eps);  u = u + wd * p
//     rho = max(min(|p| / |u|, max_coeff), min_coeff);  1 where either norm is 0
//     p = p - (a * rho) * u, a the step size with both bias corrections in it
//
// Compiled with P, G and C (dtypes of weights, gradients and copies), HAS_COPY and EPS_INSIDE.
#include "exact_sum.h"

#define SPAN 16384  // elements of a block
#define THREADS 256
#define EACH 4  // elements of a thread by one access

// Advance the step counters, unless skipped, and form the coefficient block.
extern "C" __global__ void __launch_bounds__(THREADS)
    lamb_prepare(i64 *const *steps, float *block, const double *lr, const double *beta1,
                 const double *beta2, const double *eps, const double *weight_decay,
                 const double *max_coeff, const double *min_coeff, const float *factor,
                 const float *found_inf, i64 tensors, i64 bias_correction) {
    const i64 tensor = (i64)blockIdx.x * THREADS + threadIdx.x;
    if (tensor == 0) {
        store_header(block, *lr, *beta1, *beta2, *eps, *weight_decay, *factor, *found_inf);
        block[MAX_COEFF] = (float)*max_coeff;
        block[MIN_COEFF] = (float)*min_coeff;
    }
    if (tensor >= tensors) return;
    const i64 t = *steps[tensor] + 1;
    double size = *lr;
    if (bias_correction) {
        const double root = sqrt(1.0 - power(*beta2, t));
        size = (size * root) / (1.0 - power(*beta1, t));
    }
    block[HEADER + 2 * tensor] = (float)size;
    if (*found_inf == 0.0f) *steps[tensor] = t;
}

__device__ inline float direction(float p, float m, float v, const Coefficients &c) {
    const float d = EPS_INSIDE ? sqrtf(v + c.eps) : sqrtf(v) + c.eps;
    return m / d + c.wd * p;
}

// Write the moments of COUNT neighbours from `at` on; give weights and direction.
template <int COUNT>
__device__ inline void moments(float (&p)[COUNT], float (&u)[COUNT],
                               const Stored<P>::word *__restrict__ params,
                               const Stored<G>::word *__restrict__ grads,
                               float *__restrict__ exp_avgs, float *__restrict__ exp_avg_sqs,
                               int at, const Coefficients &c) {
    float g[COUNT], m[COUNT], v[COUNT];
    load<P>(p, params + at);
    load<G>(g, grads + at);
    load<FP32>(m, exp_avgs + at);
    load<FP32>(v, exp_avg_sqs + at);
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        const float h = g[i] * c.factor;
        m[i] = c.b1 * m[i] + c.c1 * h;
        v[i] = c.b2 * v[i] + (c.c2 * h) * h;
        u[i] = direction(p[i], m[i], v[i], c);
    }
    store<FP32>(exp_avgs + at, m);
    store<FP32>(exp_avg_sqs + at, v);
}

// One block for each span: moments, and squares of weights and direction for the tensor's two sums.
extern "C" __global__ void __launch_bounds__(THREADS)
    lamb_moments(const i64 *table, const float *block, i64 *limbs, i64 tensors) {
    if (block[FOUND_INF] != 0.0f) return;
    __shared__ Limbs weights, directions;
    weights.clear();
    directions.clear();
    const Chunk chunk(table, tensors, 4, blockIdx.x, SPAN);
    const Coefficients c(block, chunk.slot);
    const auto params = chunk.row<P>(0);
    const auto grads = chunk.row<G>(1);
    auto exp_avgs = chunk.row<FP32>(2), exp_avg_sqs = chunk.row<FP32>(3);
    Sum<FP32> of_weights(weights), of_directions(directions);
    // Bounds are the block's: every lane of a warp makes every call of the sums.
    const int whole = chunk.aligned ? chunk.left / EACH * EACH : 0;
    for (int start = 0; start < whole; start += EACH * THREADS) {
        const int at = start + EACH * (int)threadIdx.x;
        float p[EACH] = {}, u[EACH] = {};
        if (at < whole) moments(p, u, params, grads, exp_avgs, exp_avg_sqs, at, c);
        of_weights.add(p);
        of_directions.add(u);
    }
    for (int start = whole; start < chunk.left; start += THREADS) {
        const int at = start + (int)threadIdx.x;
        float p[1] = {}, u[1] = {};
        if (at < chunk.left) moments(p, u, params, grads, exp_avgs, exp_avg_sqs, at, c);
        of_weights.add(p);
        of_directions.add(u);
    }
    of_weights.flush();
    of_directions.flush();
    i64 *sums = limbs + 2 * PADDED * chunk.slot;
    weights.finish(sums);
    directions.finish(sums + PADDED);
}

// The length of each tensor's step: its step size times its trust ratio.
extern "C" __global__ void lamb_ratio(float *block, const i64 *limbs, i64 tensors) {
    const i64 tensor = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (block[FOUND_INF] != 0.0f || tensor >= tensors) return;
    const i64 *sums = limbs + 2 * PADDED * tensor;
    const float w = norm_of(sums), u = norm_of(sums + PADDED);
    // NaN has to come through both: a minimum that drops it would hide a broken direction.
    float rho = w / u;
    asm("min.NaN.f32 %0, %0, %1;" : "+f"(rho) : "f"(block[MAX_COEFF]));
    asm("max.NaN.f32 %0, %0, %1;" : "+f"(rho) : "f"(block[MIN_COEFF]));
    if (w == 0.0f || u == 0.0f) rho = 1.0f;
    float *pair = block + HEADER + 2 * tensor;
    pair[1] = pair[0] * rho;
}

template <int COUNT>
__device__ inline void move(Stored<P>::word *__restrict__ params,
                            const float *__restrict__ exp_avgs,
                            const float *__restrict__ exp_avg_sqs,
                            Stored<C>::word *__restrict__ copies, int at, const Coefficients &c) {
    float p[COUNT], m[COUNT], v[COUNT];
    load<P>(p, params + at);
    load<FP32>(m, exp_avgs + at);
    load<FP32>(v, exp_avg_sqs + at);
#pragma unroll
    for (int i = 0; i < COUNT; i++) p[i] = p[i] - c.second * direction(p[i], m[i], v[i], c);
    store<P>(params + at, p);
    if (HAS_COPY) store<C>(copies + at, p);
}

// One block for each span: the weights, from the moments that `lamb_moments` left.
extern "C" __global__ void __launch_bounds__(THREADS)
    lamb_weights(const i64 *table, const float *block, i64 tensors) {
    if (block[FOUND_INF] != 0.0f) return;
    const Chunk chunk(table, tensors, 3 + HAS_COPY, blockIdx.x, SPAN);
    const Coefficients c(block, chunk.slot);
    auto params = chunk.row<P>(0);
    const auto exp_avgs = chunk.row<FP32>(1), exp_avg_sqs = chunk.row<FP32>(2);
    auto copies = chunk.row<C>(HAS_COPY ? 3 : 0);
    const int whole = chunk.aligned ? chunk.left / EACH * EACH : 0;
    for (int at = EACH * threadIdx.x; at < whole; at += EACH * THREADS)
        move<EACH>(params, exp_avgs, exp_avg_sqs, copies, at, c);
    for (int at = whole + threadIdx.x; at < chunk.left; at += THREADS)
        move<1>(params, exp_avgs, exp_avg_sqs, copies, at, c);
}
