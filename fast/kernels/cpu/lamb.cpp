// LAMB (`reference.lamb`) in two sweeps: moments with both sums of squares, then weights.
#include "coefficients.h"
#include "exact_sum.h"

namespace {

constexpr int64_t SPAN = 16384;  // elements of an entry of the pointer table

// The direction, from the weights before the step and the moments after it.
inline float direction(float p, float m, float v, float wd, float eps, bool eps_inside) {
  const float d = eps_inside ? std::sqrt(v + eps) : std::sqrt(v) + eps;
  return m / d + wd * p;
}

template <bool EPS_INSIDE>
void moments_block(const float* __restrict p, const float* __restrict g, float* __restrict m,
                   float* __restrict v, float* __restrict u, int64_t count, const float* c) {
  const float factor = c[FACTOR], wd = c[WEIGHT_DECAY], eps = c[EPS], b1 = c[BETA1], b2 = c[BETA2];
  const float c1 = c[ONE_MINUS_BETA1], c2 = c[ONE_MINUS_BETA2];
  for (int64_t i = 0; i < count; ++i) {
    const float h = g[i] * factor;
    m[i] = b1 * m[i] + c1 * h;
    v[i] = b2 * v[i] + (c2 * h) * h;
    u[i] = direction(p[i], m[i], v[i], wd, eps, EPS_INSIDE);
  }
}

template <bool EPS_INSIDE>
void weights_block(float* __restrict p, const float* __restrict m, const float* __restrict v,
                   int64_t count, float length, float wd, float eps) {
  for (int64_t i = 0; i < count; ++i)
    p[i] = p[i] - length * direction(p[i], m[i], v[i], wd, eps, EPS_INSIDE);
}

// NaN comes through.
inline float minimum(float a, float b) { return a != a || a < b ? a : b; }
inline float maximum(float a, float b) { return a != a || a > b ? a : b; }

}  // namespace

extern "C" {

void lamb_prepare_kernel(int64_t* steps, float* coefficients, const double* lr, const double* beta1,
                         const double* beta2, const double* eps, const double* weight_decay,
                         const double* max_coeff, const double* min_coeff, const float* factor,
                         const float* found_inf, int64_t tensors, int64_t bias_correction,
                         int64_t is_table, int64_t, int64_t) {
  Environment plain;
  store_lamb_header(coefficients, *beta1, *beta2, *eps, *weight_decay, *max_coeff, *min_coeff,
                    *factor, *found_inf);
  advance_lamb_steps(steps, coefficients, tensors, *lr, *beta1, *beta2, *found_inf, bias_correction,
                     is_table);
}

void lamb_moments_kernel(const int64_t* words, const float* coefficients, int64_t* limbs,
                         int64_t tensors, Type p, Type g, Type, int64_t eps_inside, int64_t chunks,
                         int64_t threads) {
  if (coefficients[FOUND_INF] != 0.0f) return;
  const Table table = {words, tensors, 4};
  table.for_chunks(chunks, SPAN, threads, [&](int64_t t, int64_t first, int64_t length, int64_t) {
    float params[BLOCK], grads[BLOCK], directions[BLOCK];
    int64_t of_weights[PADDED] = {}, of_directions[PADDED] = {};
    for (int64_t at = first; at < first + length; at += BLOCK) {
      const int64_t count = std::min(BLOCK, first + length - at);
      const float* w = widened(table.address(0, t), p, at, count, params);
      const float* x = widened(table.address(1, t), g, at, count, grads);
      float *m = (float*)table.address(2, t) + at, *v = (float*)table.address(3, t) + at;
      (eps_inside ? moments_block<true> : moments_block<false>)(w, x, m, v, directions, count,
                                                                coefficients);
      add_squares(of_weights, table.address(0, t), p, at, count);
      add_squares(of_directions, directions, FP32, 0, count);
    }
    int64_t* sums = limbs + 2 * PADDED * table.slot(t);
    add_limbs(sums, of_weights);
    add_limbs(sums + PADDED, of_directions);
  });
}

void lamb_ratio_kernel(float* coefficients, const int64_t* limbs, float* ratios, int64_t keeps,
                       int64_t tensors, int64_t) {
  Environment plain;
  if (coefficients[FOUND_INF] != 0.0f) return;
  for (int64_t t = 0; t < tensors; ++t) {
    const int64_t* sums = limbs + 2 * PADDED * t;
    const float w = norm_of(sums), n = norm_of(sums + PADDED);
    const float bounded = minimum(w / n, coefficients[MAX_COEFF]);
    const float rho = w != 0.0f && n != 0.0f ? maximum(bounded, coefficients[MIN_COEFF]) : 1.0f;
    float* pair = coefficients + HEADER + 2 * t;
    pair[1] = pair[0] * rho;
    if (keeps) ratios[t] = rho;
  }
}

void lamb_weights_kernel(const int64_t* words, const float* coefficients, int64_t tensors, Type p,
                         Type, Type c, int64_t eps_inside, int64_t has_copy, int64_t chunks,
                         int64_t threads) {
  if (coefficients[FOUND_INF] != 0.0f) return;
  const Table table = {words, tensors, has_copy ? 4 : 3};
  table.for_chunks(chunks, SPAN, threads, [&](int64_t t, int64_t first, int64_t size, int64_t) {
    const float length = coefficients[HEADER + 2 * table.slot(t) + 1];
    float params[BLOCK];
    for (int64_t at = first; at < first + size; at += BLOCK) {
      const int64_t count = std::min(BLOCK, first + size - at);
      float* w = const_cast<float*>(widened(table.address(0, t), p, at, count, params));
      const float *m = (float*)table.address(1, t) + at, *v = (float*)table.address(2, t) + at;
      (eps_inside ? weights_block<true> : weights_block<false>)(
          w, m, v, count, length, coefficients[WEIGHT_DECAY], coefficients[EPS]);
      rounded(w, table.address(0, t), p, at, count);
      if (has_copy) rounded(w, table.address(3, t), c, at, count);
    }
  });
}
}
