// The two sweeps of a LAMB: moments with both sums of squares, then weights.
//
// Form is what a step's directions are made of: `moments(p, g, m, v)` updates both moments and
// returns the direction of one element, `direction(p, m, v)` forms it again from what was left.
#pragma once

#include "coefficients.h"
#include "exact_sum.h"

namespace {

constexpr int64_t SPAN = 16384;  // elements of an entry of the pointer table

template <class Form>
void moments_block(const float* __restrict p, const float* __restrict g, float* __restrict m,
                   float* __restrict v, float* __restrict u, int64_t count, Form form) {
  for (int64_t i = 0; i < count; ++i) u[i] = form.moments(p[i], g[i], m[i], v[i]);
}

template <class Form>
void weights_block(float* __restrict p, const float* __restrict m, const float* __restrict v,
                   int64_t count, float length, Form form) {
  for (int64_t i = 0; i < count; ++i) p[i] = p[i] - length * form.direction(p[i], m[i], v[i]);
}

template <class Form>
void sweep_moments(const int64_t* words, const float* coefficients, int64_t* limbs, int64_t tensors,
                   Type p, Type g, int64_t chunks, int64_t threads) {
  if (coefficients[FOUND_INF] != 0.0f) return;
  const Table table = {words, tensors, 4};
  table.for_chunks(chunks, SPAN, threads, [&](int64_t t, int64_t first, int64_t length, int64_t) {
    const Form form(coefficients, table.slot(t));
    float params[BLOCK], grads[BLOCK], directions[BLOCK];
    int64_t of_weights[PADDED] = {}, of_directions[PADDED] = {};
    for (int64_t at = first; at < first + length; at += BLOCK) {
      const int64_t count = std::min(BLOCK, first + length - at);
      const float* w = widened(table.address(0, t), p, at, count, params);
      const float* x = widened(table.address(1, t), g, at, count, grads);
      float *m = (float*)table.address(2, t) + at, *v = (float*)table.address(3, t) + at;
      moments_block(w, x, m, v, directions, count, form);
      add_squares(of_weights, table.address(0, t), p, at, count);
      add_squares(of_directions, directions, FP32, 0, count);
    }
    int64_t* sums = limbs + 2 * PADDED * table.slot(t);
    add_limbs(sums, of_weights);
    add_limbs(sums + PADDED, of_directions);
  });
}

template <class Form>
void sweep_weights(const int64_t* words, const float* coefficients, int64_t tensors, Type p, Type c,
                   int64_t has_copy, int64_t chunks, int64_t threads) {
  if (coefficients[FOUND_INF] != 0.0f) return;
  const Table table = {words, tensors, has_copy ? 4 : 3};
  table.for_chunks(chunks, SPAN, threads, [&](int64_t t, int64_t first, int64_t size, int64_t) {
    const Form form(coefficients, table.slot(t));
    float params[BLOCK];
    for (int64_t at = first; at < first + size; at += BLOCK) {
      const int64_t count = std::min(BLOCK, first + size - at);
      float* w = const_cast<float*>(widened(table.address(0, t), p, at, count, params));
      const float *m = (float*)table.address(1, t) + at, *v = (float*)table.address(2, t) + at;
      weights_block(w, m, v, count, form.length, form);
      rounded(w, table.address(0, t), p, at, count);
      if (has_copy) rounded(w, table.address(3, t), c, at, count);
    }
  });
}

}  // namespace
