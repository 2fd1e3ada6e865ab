// What stands between the norm of the gradients and the update: `fast.kernels.finalise` and
// `fast.kernels.finalise_unscaled` (`reference.mixed_step`).
#include "coefficients.h"
#include "exact_sum.h"

namespace {

// In the order of `fast.runtime.native.CHOICES`.
enum Rule : int64_t { STATIC, DYNAMIC, WRAPPER, TORCH };

// What ranks have told each other: bit 1 different scales, higher ones refusals; 0 nothing.
inline int64_t told_by_ranks(const int64_t* limbs, bool norm_max) {
  const uint64_t told = limbs[TOLD], scale = limbs[TOLD + 1], digest = limbs[TOLD + 2];
  const uint64_t square = limbs[TOLD + 3];
  const bool differs = norm_max ? digest + square != 0 : scale * square != digest * digest;
  return (int64_t)(told * 4 + (differs ? 2 : 0));
}

}  // namespace

extern "C" {

void finalise_kernel(
    int64_t* limbs, int64_t* steps, float* coefficients, int64_t tensors, const double* lr,
    const double* beta1, const double* beta2, const double* eps, const double* weight_decay,
    const double* max_norm, double* scale, int64_t* cur_iter, int64_t* last_overflow_iter,
    int64_t* cur_hysteresis, int64_t* growth_tracker, int64_t* exhausted,
    const double* scale_factor, const int64_t* scale_window, const double* min_scale,
    const int64_t* delayed_shift, const double* backoff_factor, float* norm, float* found_inf,
    const double* external, const double* max_coeff, const double* min_coeff,
    int64_t bias_correction, int64_t is_table, Rule rule, int64_t consecutive, int64_t raises,
    int64_t grow_on_window, int64_t unscale_with_new, int64_t is_external, int64_t norm_1,
    int64_t norm_max, int64_t norm_given, int64_t norm_scaled, int64_t lamb, int64_t ranks,
    int64_t bounded, int64_t, int64_t) {
  Environment plain;
  float scaled_norm = norm_of(limbs), found = limbs[NONFINITE] != 0 ? 1.0f : 0.0f;
  if (norm_max) {
    scaled_norm = largest_of(limbs);
    found = limbs[LARGEST] >= INFINITY_BITS ? 1.0f : 0.0f;
  } else if (norm_1) {
    scaled_norm = sum_of(limbs);
  } else if (norm_given) {
    scaled_norm = *norm;
  }
  // Squares past fp32 would leave second moments infinite: decisions/0018.
  if (bounded && !(scaled_norm < 0x1p64f)) found = 1.0f;
  const int64_t told = ranks ? told_by_ranks(limbs, norm_max) : 0;
  if (told != 0) {
    found = 1.0f;
    scaled_norm = NAN;
  }
  const Scale old = {*scale, *cur_iter, *last_overflow_iter, *cur_hysteresis, *growth_tracker,
                     *exhausted};
  Scale now = old;
  const bool overflow = found != 0.0f;
  if (rule == DYNAMIC)
    now = dynamic_rule(old, overflow, *scale_factor, *scale_window, *min_scale, *delayed_shift,
                       consecutive, raises, grow_on_window);
  else if (rule == WRAPPER)
    now = wrapper_rule(old, overflow, *scale_factor, *scale_window, *min_scale);
  else if (rule == TORCH)
    now = torch_rule(old, overflow, *scale_factor, *backoff_factor, *scale_window);
  // The gradients carry the scale that they were made with, not the next one.
  const double applied = is_external ? *external : unscale_with_new ? now.scale : old.scale;
  const float factor = unscale_and_clip(scaled_norm, applied, *max_norm);
  if (lamb)
    store_lamb_header(coefficients, *beta1, *beta2, *eps, *weight_decay, *max_coeff, *min_coeff,
                      factor, found);
  else
    store_adam_header(coefficients, *lr, *beta1, *beta2, *eps, *weight_decay, factor, found);
  std::fill(limbs, limbs + PADDED, 0);
  *norm = norm_scaled ? scaled_norm : (float)((double)scaled_norm / applied);
  *found_inf = found;
  if (told != 0) {
    *exhausted = told;
  } else {
    if (rule != STATIC) *scale = now.scale;
    if (rule == DYNAMIC || rule == WRAPPER) {
      *cur_iter = now.cur_iter;
      *last_overflow_iter = now.last;
    }
    if (rule == DYNAMIC) {
      *cur_hysteresis = now.hysteresis;
      *exhausted = now.exhausted;
    }
    if (rule == TORCH) *growth_tracker = now.tracker;
  }
  if (lamb)
    advance_lamb_steps(steps, coefficients, tensors, *lr, *beta1, *beta2, found, bias_correction,
                       is_table);
  else
    advance_adam_steps(steps, coefficients, tensors, *beta1, *beta2, found, bias_correction,
                       is_table);
}

void finalise_unscaled_kernel(int64_t* limbs, int64_t* step, float* coefficients, const double* lr,
                              const double* beta1, const double* beta2, const double* eps,
                              const double* weight_decay, const double* max_norm, float* norm,
                              float* found_inf, float* factor, Kind kind, int64_t bias_correction,
                              int64_t ahead, int64_t last, int64_t, int64_t) {
  Environment plain;
  float value = largest_of(limbs);
  if (kind == SQUARES) value = norm_of(limbs);
  if (kind == MAGNITUDES) value = sum_of(limbs);
  // Squares of finite gradients may be past fp32: that skips the step, too.
  const float skip = value < 0x1p64f ? 0.0f : 1.0f;
  const float clip = clip_only(value, *max_norm);
  store_adam_header(coefficients, *lr, *beta1, *beta2, *eps, *weight_decay, ahead ? 1.0f : clip,
                    skip);
  if (last) std::fill(limbs, limbs + PADDED, 0);
  *norm = value;
  *found_inf = skip;
  *factor = clip;
  advance_adam_steps(step, coefficients, 1, *beta1, *beta2, skip, bias_correction, false);
}
}
