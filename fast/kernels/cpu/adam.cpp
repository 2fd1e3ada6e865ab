// Adam and AdamW (`reference.adam`), in one pass.
#include "coefficients.h"
#include "quotient.h"

namespace {

struct AdamScalars {
  float lr, wd, factor, b1, c1, b2, c2, eps, k1, k2;
};

template <bool DECOUPLED>
void moments(const float* __restrict p, const float* __restrict g_, float* __restrict m_,
             float* __restrict v_, int64_t count, const AdamScalars s, Range& range) {
  Range met;  // of its own: in a register
  for (int64_t i = 0; i < count; ++i) {
    float g = g_[i] * s.factor;
    if (!DECOUPLED) g = g + s.wd * p[i];
    m_[i] = s.b1 * m_[i] + s.c1 * g;
    v_[i] = s.b2 * v_[i] + (s.c2 * g) * g;
    met.meet(m_[i]);
    met.meet(v_[i]);
  }
  range = met;
}

template <bool DECOUPLED, class Quotient>
void weights(float* __restrict p, const float* __restrict m, const float* __restrict v,
             int64_t count, const AdamScalars s) {
  const Quotient over_k1(s.k1), over_k2(s.k2);
  for (int64_t i = 0; i < count; ++i) {
    float u = over_k1(m[i]) / (std::sqrt(over_k2(v[i])) + s.eps);
    if (DECOUPLED) u = u + s.wd * p[i];
    p[i] = p[i] - s.lr * u;
  }
}

template <bool DECOUPLED>
void adam_block(float* p, const float* g, float* m, float* v, int64_t count, const AdamScalars& s) {
  Range range;
  moments<DECOUPLED>(p, g, m, v, count, s, range);
  if (range.suits(s.k1, s.k2))
    weights<DECOUPLED, Multiplied>(p, m, v, count, s);
  else
    weights<DECOUPLED, Divided>(p, m, v, count, s);
}

// Addresses and types of one tensor; copy: nullptr for none, remainders where its type is INT16.
struct AdamTensor {
  void *param, *grad, *exp_avg, *exp_avg_sq, *copy;
  Type param_type, grad_type, moment_type, copy_type;
};

constexpr int64_t FAR = 1 << 22;  // elements, whose 100 MB are more than caches hold

// As sums: gradients are taken for sums that began at 0.0, which are never -0.0. Far: there are more
// elements in all than caches hold.
void adam_part(const AdamTensor& row, int64_t begin, int64_t length, const AdamScalars& scalars,
               bool decoupled, bool as_sums, bool far) {
  float params[BLOCK], grads[BLOCK], means[BLOCK], squares[BLOCK];
  const bool splits = row.copy && row.copy_type == INT16;
  for (int64_t at = begin; at < begin + length; at += BLOCK) {
    const int64_t count = std::min(BLOCK, begin + length - at);
    float* p = params;
    if (splits)
      joined(row.param, row.copy, at, count, p);
    else
      p = const_cast<float*>(widened(row.param, row.param_type, at, count, params));
    const float* g = widened(row.grad, row.grad_type, at, count, grads);
    if (as_sums) {
      for (int64_t i = 0; i < count; ++i) grads[i] = g[i] + 0.0f;
      g = grads;
    }
    float* m = const_cast<float*>(widened(row.exp_avg, row.moment_type, at, count, means));
    float* v = const_cast<float*>(widened(row.exp_avg_sq, row.moment_type, at, count, squares));
    (decoupled ? adam_block<true> : adam_block<false>)(p, g, m, v, count, scalars);
    rounded(m, row.exp_avg, row.moment_type, at, count);
    rounded(v, row.exp_avg_sq, row.moment_type, at, count);
    if (splits) {
      split(p, row.param, row.copy, at, count);
      continue;
    }
    rounded(p, row.param, row.param_type, at, count);
    if (row.copy) (far ? streamed : rounded)(p, row.copy, row.copy_type, at, count);
  }
  if (far) end_streams();
}

AdamScalars adam_scalars(const float* c, int64_t slot) {
  const float* pair = c + HEADER + 2 * slot;
  return {c[LR], c[WEIGHT_DECAY], c[FACTOR], c[BETA1], c[ONE_MINUS_BETA1], c[BETA2],
          c[ONE_MINUS_BETA2], c[EPS], pair[0], pair[1]};
}

}  // namespace

extern "C" {

void adam_prepare_kernel(int64_t* steps, float* coefficients, const double* lr, const double* beta1,
                         const double* beta2, const double* eps, const double* weight_decay,
                         const float* factor, const float* found_inf, int64_t tensors,
                         int64_t bias_correction, int64_t is_table, int64_t, int64_t) {
  Environment plain;
  store_adam_header(coefficients, *lr, *beta1, *beta2, *eps, *weight_decay, *factor, *found_inf);
  advance_adam_steps(steps, coefficients, tensors, *beta1, *beta2, *found_inf, bias_correction,
                     is_table);
}

void adam_flat_kernel(void* param, void* grad, void* exp_avg, void* exp_avg_sq, void* copy,
                      const float* coefficients, int64_t numel, int64_t slot, Type p, Type g, Type m,
                      Type c, int64_t decoupled, int64_t has_copy, int64_t, int64_t threads) {
  if (coefficients[FOUND_INF] != 0.0f) return;
  const AdamTensor row = {param, grad, exp_avg, exp_avg_sq, has_copy ? copy : nullptr, p, g, m, c};
  const AdamScalars scalars = adam_scalars(coefficients, slot);
  for_chunks(numel, threads, [&](int64_t first, int64_t count) {
    adam_part(row, first, count, scalars, decoupled, false, numel >= FAR);
  });
}

void adam_list_kernel(const int64_t* words, const float* coefficients, int64_t tensors, Type p,
                      Type g, Type m, Type c, int64_t decoupled, int64_t has_copy, int64_t chunks,
                      int64_t threads) {
  if (coefficients[FOUND_INF] != 0.0f) return;
  const Table table = {words, tensors, has_copy ? 5 : 4};
  table.for_chunks(chunks, CHUNK, threads, [&](int64_t t, int64_t first, int64_t count, int64_t) {
    const AdamTensor row = {table.address(0, t), table.address(1, t), table.address(2, t),
                            table.address(3, t), has_copy ? table.address(4, t) : nullptr,
                            p, g, m, c};
    adam_part(row, first, count, adam_scalars(coefficients, table.slot(t)), decoupled, false,
              chunks * CHUNK >= FAR);
  });
}
}
