// SGD with momentum, dampening and Nesterov's look-ahead (`reference.sgd`), in one pass.
#include "coefficients.h"

namespace {

struct SgdScalars {
  float lr, wd, factor, momentum, rest;
  bool first;
};

SgdScalars sgd_scalars(const float* c, int64_t slot) {
  const bool first = c[HEADER + 2 * slot] != 0.0f;
  return {c[LR], c[WEIGHT_DECAY], c[FACTOR], c[MOMENTUM], c[REST], first};
}

// What the weights move along replaces the gradients.
void sgd_block(float* __restrict p, float* __restrict d, float* __restrict b, int64_t count,
               const SgdScalars s, bool nesterov) {
  for (int64_t i = 0; i < count; ++i) d[i] = d[i] * s.factor + s.wd * p[i];
  if (b && s.first)  // the buffer may hold anything
    for (int64_t i = 0; i < count; ++i) b[i] = d[i];
  else if (b)
    for (int64_t i = 0; i < count; ++i) b[i] = s.momentum * b[i] + s.rest * d[i];
  if (b && nesterov)
    for (int64_t i = 0; i < count; ++i) d[i] = d[i] + s.momentum * b[i];
  else if (b)
    for (int64_t i = 0; i < count; ++i) d[i] = b[i];
  for (int64_t i = 0; i < count; ++i) p[i] = p[i] - s.lr * d[i];
}

// buffer, copy: nullptr for none.
struct SgdTensor {
  void *param, *grad;
  float* buffer;
  void* copy;
  Type param_type, grad_type, copy_type;
};

void sgd_part(const SgdTensor& row, int64_t begin, int64_t length, const SgdScalars& scalars,
              bool nesterov) {
  float params[BLOCK], grads[BLOCK];
  for (int64_t at = begin; at < begin + length; at += BLOCK) {
    const int64_t count = std::min(BLOCK, begin + length - at);
    float* p = const_cast<float*>(widened(row.param, row.param_type, at, count, params));
    const float* g = widened(row.grad, row.grad_type, at, count, grads);
    if (g != grads) std::copy(g, g + count, grads);
    sgd_block(p, grads, row.buffer ? row.buffer + at : nullptr, count, scalars, nesterov);
    rounded(p, row.param, row.param_type, at, count);
    if (row.copy) rounded(p, row.copy, row.copy_type, at, count);
  }
}

}  // namespace

extern "C" {

void sgd_prepare_kernel(int64_t* steps, float* coefficients, const double* lr,
                        const double* momentum, const double* dampening, const double* weight_decay,
                        const float* factor, const float* found_inf, int64_t tensors,
                        int64_t is_table, int64_t, int64_t) {
  Environment plain;
  coefficients[LR] = (float)*lr;
  coefficients[WEIGHT_DECAY] = (float)*weight_decay;
  coefficients[FACTOR] = *factor;
  coefficients[FOUND_INF] = *found_inf;
  coefficients[MOMENTUM] = (float)*momentum;
  coefficients[REST] = (float)(1.0 - *dampening);
  for (int64_t t = 0; t < tensors; ++t) {
    int64_t* counter = counter_of(steps, t, is_table);
    coefficients[HEADER + 2 * t] = *counter + 1 == 1 ? 1.0f : 0.0f;
    if (*found_inf == 0.0f) ++*counter;
  }
}

void sgd_flat_kernel(void* param, void* grad, float* momentums, void* copy,
                     const float* coefficients, int64_t numel, int64_t slot, Type p, Type g, Type c,
                     int64_t has_momentum, int64_t nesterov, int64_t has_copy, int64_t,
                     int64_t threads) {
  if (coefficients[FOUND_INF] != 0.0f) return;
  float* buffer = has_momentum ? momentums : nullptr;
  const SgdTensor row = {param, grad, buffer, has_copy ? copy : nullptr, p, g, c};
  const SgdScalars scalars = sgd_scalars(coefficients, slot);
  for_chunks(numel, threads, [&](int64_t first, int64_t count) {
    sgd_part(row, first, count, scalars, nesterov);
  });
}

void sgd_list_kernel(const int64_t* words, const float* coefficients, int64_t tensors, Type p,
                     Type g, Type c, int64_t has_momentum, int64_t nesterov, int64_t has_copy,
                     int64_t chunks, int64_t threads) {
  if (coefficients[FOUND_INF] != 0.0f) return;
  const Table table = {words, tensors, 2 + has_momentum + has_copy};
  table.for_chunks(chunks, CHUNK, threads, [&](int64_t t, int64_t first, int64_t count, int64_t) {
    const SgdTensor row = {table.address(0, t), table.address(1, t),
                           has_momentum ? (float*)table.address(2, t) : nullptr,
                           has_copy ? table.address(2 + has_momentum, t) : nullptr, p, g, c};
    sgd_part(row, first, count, sgd_scalars(coefficients, table.slot(t)), nesterov);
  });
}
}
