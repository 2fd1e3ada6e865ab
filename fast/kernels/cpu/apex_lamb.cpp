// apex's LAMB (`reference.apex_lamb`) in two sweeps.
#include "lamb_sweeps.h"

namespace {

constexpr int64_t TRIPLE = 3;  // 1 - beta1^t, 1 - beta2^t and the length of the step

template <bool ADAM_W>
struct Corrected {
  float factor, divisor, wd, eps, b1, b2, b3, c2, k1, k2, length;
  Corrected(const float* c, int64_t slot)
      : factor(c[FACTOR]), divisor(c[DIVISOR]), wd(c[WEIGHT_DECAY]), eps(c[EPS]), b1(c[BETA1]),
        b2(c[BETA2]), b3(c[ONE_MINUS_BETA1]), c2(c[ONE_MINUS_BETA2]), k1(c[HEADER + TRIPLE * slot]),
        k2(c[HEADER + TRIPLE * slot + 1]), length(c[HEADER + TRIPLE * slot + 2]) {}

  float moments(float p, float g, float& m, float& v) const {
    float h = (g * factor) / divisor;
    if (!ADAM_W) h = h + wd * p;
    m = b1 * m + b3 * h;
    v = b2 * v + (c2 * h) * h;
    return direction(p, m, v);
  }
  float direction(float p, float m, float v) const {
    const float u = (m / k1) / (std::sqrt(v / k2) + eps);
    return ADAM_W ? u + wd * p : u;
  }
};

}  // namespace

extern "C" {

void apex_lamb_prepare_kernel(int64_t* steps, float* coefficients, const double* lr,
                              const double* beta1, const double* beta2, const double* eps,
                              const double* weight_decay, const double* max_norm,
                              const float* norm, const float* factor, const float* found_inf,
                              int64_t tensors, int64_t bias_correction, int64_t grad_averaging,
                              int64_t is_table, int64_t, int64_t) {
  Environment plain;
  store_adam_header(coefficients, *lr, *beta1, *beta2, *eps, *weight_decay, *factor, *found_inf);
  if (!grad_averaging) coefficients[ONE_MINUS_BETA1] = 1.0f;
  const float largest = (float)*max_norm, stored = *norm * *factor;
  coefficients[DIVISOR] = largest > 0.0f && stored > largest ? stored / largest : 1.0f;
  advance_adam_steps(steps, coefficients, tensors, *beta1, *beta2, *found_inf, bias_correction,
                     is_table, TRIPLE);
}

void apex_lamb_moments_kernel(const int64_t* words, const float* coefficients, int64_t* limbs,
                              int64_t tensors, Type p, Type g, Type, int64_t adam_w, int64_t chunks,
                              int64_t threads) {
  (adam_w ? sweep_moments<Corrected<true>> : sweep_moments<Corrected<false>>)(
      words, coefficients, limbs, tensors, p, g, chunks, threads);
}

void apex_lamb_ratio_kernel(float* coefficients, const int64_t* limbs, int64_t nvlamb,
                            int64_t tensors, int64_t) {
  Environment plain;
  if (coefficients[FOUND_INF] != 0.0f) return;
  const bool adapts = nvlamb || coefficients[WEIGHT_DECAY] != 0.0f;
  for (int64_t t = 0; t < tensors; ++t) {
    const int64_t* sums = limbs + 2 * PADDED * t;
    const float w = norm_of(sums), n = norm_of(sums + PADDED);
    const float rho = adapts && w != 0.0f && n != 0.0f ? w / n : 1.0f;
    coefficients[HEADER + TRIPLE * t + 2] = coefficients[LR] * rho;
  }
}

void apex_lamb_weights_kernel(const int64_t* words, const float* coefficients, int64_t tensors,
                              Type p, Type, Type c, int64_t adam_w, int64_t has_copy,
                              int64_t chunks, int64_t threads) {
  (adam_w ? sweep_weights<Corrected<true>> : sweep_weights<Corrected<false>>)(
      words, coefficients, tensors, p, c, has_copy, chunks, threads);
}
}
