// The coefficient block of a step, as `fast.kernels._arith` and `fast.kernels._lamb` lay it out.
#pragma once

#include "common.h"

namespace {

enum Slot {
  LR, WEIGHT_DECAY, FACTOR, FOUND_INF, BETA1, BETA2, ONE_MINUS_BETA1, ONE_MINUS_BETA2, EPS,
  MOMENTUM, REST, MAX_COEFF, MIN_COEFF, DIVISOR = MAX_COEFF,
  HEADER = 16  // a pair for each tensor follows, in apex's LAMB a triple
};

inline void store_adam_header(float* to, double lr, double beta1, double beta2, double eps,
                              double weight_decay, float factor, float found_inf) {
  to[LR] = (float)lr;
  to[WEIGHT_DECAY] = (float)weight_decay;
  to[FACTOR] = factor;
  to[FOUND_INF] = found_inf;
  to[BETA1] = (float)beta1;
  to[BETA2] = (float)beta2;
  to[ONE_MINUS_BETA1] = (float)(1.0 - beta1);
  to[ONE_MINUS_BETA2] = (float)(1.0 - beta2);
  to[EPS] = (float)eps;
}

// Advances the counters, unless skipped, and forms 1 - beta^t.
inline void advance_adam_steps(int64_t* steps, float* to, int64_t tensors, double beta1,
                               double beta2, float found_inf, int64_t bias_correction,
                               int64_t is_table, int64_t width = 2) {
  for (int64_t t = 0; t < tensors; ++t) {
    int64_t* counter = counter_of(steps, t, is_table);
    const int64_t step = *counter + 1;
    to[HEADER + width * t] = bias_correction ? (float)(1.0 - power(beta1, step)) : 1.0f;
    to[HEADER + width * t + 1] = bias_correction ? (float)(1.0 - power(beta2, step)) : 1.0f;
    if (found_inf == 0.0f) *counter = step;
  }
}

inline void store_lamb_header(float* to, double beta1, double beta2, double eps,
                              double weight_decay, double max_coeff, double min_coeff, float factor,
                              float found_inf) {
  store_adam_header(to, beta1, beta1, beta2, eps, weight_decay, factor, found_inf);
  to[MAX_COEFF] = (float)max_coeff;
  to[MIN_COEFF] = (float)min_coeff;
}

// Advances the counters, unless skipped, and forms step sizes with both bias corrections in them.
inline void advance_lamb_steps(int64_t* steps, float* to, int64_t tensors, double lr, double beta1,
                               double beta2, float found_inf, int64_t bias_correction,
                               int64_t is_table) {
  for (int64_t t = 0; t < tensors; ++t) {
    int64_t* counter = counter_of(steps, t, is_table);
    const int64_t step = *counter + 1;
    double size = lr;
    if (bias_correction)
      size = (size * std::sqrt(1.0 - power(beta2, step))) / (1.0 - power(beta1, step));
    to[HEADER + 2 * t] = (float)size;
    if (found_inf == 0.0f) *counter = step;
  }
}

}  // namespace
