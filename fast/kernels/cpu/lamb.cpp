// LAMB (`reference.lamb`) in two sweeps.
#include "lamb_sweeps.h"

namespace {

template <bool EPS_INSIDE>
struct Bounded {
  float factor, wd, eps, b1, b2, c1, c2, length;
  Bounded(const float* c, int64_t slot)
      : factor(c[FACTOR]), wd(c[WEIGHT_DECAY]), eps(c[EPS]), b1(c[BETA1]), b2(c[BETA2]),
        c1(c[ONE_MINUS_BETA1]), c2(c[ONE_MINUS_BETA2]), length(c[HEADER + 2 * slot + 1]) {}

  float moments(float p, float g, float& m, float& v) const {
    const float h = g * factor;
    m = b1 * m + c1 * h;
    v = b2 * v + (c2 * h) * h;
    return direction(p, m, v);
  }
  float direction(float p, float m, float v) const {
    const float d = EPS_INSIDE ? std::sqrt(v + eps) : std::sqrt(v) + eps;
    return m / d + wd * p;
  }
};

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
  (eps_inside ? sweep_moments<Bounded<true>> : sweep_moments<Bounded<false>>)(
      words, coefficients, limbs, tensors, p, g, chunks, threads);
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
  (eps_inside ? sweep_weights<Bounded<true>> : sweep_weights<Bounded<false>>)(
      words, coefficients, tensors, p, c, has_copy, chunks, threads);
}
}
