// Loss-scale rules (`reference.loss_scale`) and factors that unscale and clip (`reference.clip`).
#include "common.h"

namespace {

// a mod b with the sign of a; 0 where the hardware would stop the process.
inline int64_t remainder_of(int64_t a, int64_t b) { return b == 0 || b == -1 ? 0 : a % b; }

inline bool grows_now(int64_t cur_iter, int64_t last, int64_t window, bool grow_on_window) {
  const int64_t clean = cur_iter - last - 1;
  if (grow_on_window) return remainder_of(clean + 1, window) == 0;
  return clean > 0 && remainder_of(clean, window) == 0;
}

inline double shrunk(double scale, double factor, double floor) {
  const double lower = scale / factor;
  return floor > lower ? floor : lower;
}

struct Scale {
  double scale;
  int64_t cur_iter, last, hysteresis, tracker, exhausted;
};

inline Scale dynamic_rule(const Scale old, bool overflow, double factor, int64_t window,
                          double floor, int64_t shift, bool consecutive, bool raises,
                          bool grow_on_window) {
  Scale now = old;
  const bool spent = shift == 1 || old.hysteresis == 1;
  const bool grows = !overflow && grows_now(old.cur_iter, old.last, window, grow_on_window);
  if (overflow && spent) now.scale = shrunk(old.scale, factor, floor);
  if (grows) now.scale = old.scale * factor;
  if (overflow && !spent) now.hysteresis = old.hysteresis - 1;
  if (consecutive ? !overflow : grows) now.hysteresis = shift;
  if (overflow) now.last = old.cur_iter;
  now.cur_iter = old.cur_iter + 1;
  if (raises && overflow && spent && old.scale == floor) {
    // Stuck at the floor: the caller is to raise, and nothing moves until he does.
    const int64_t hysteresis = now.hysteresis;
    now = old;
    now.hysteresis = hysteresis;
    now.exhausted = 1;
  }
  return now;
}

inline Scale wrapper_rule(const Scale old, bool overflow, double factor, int64_t window,
                          double floor) {
  Scale now = old;
  if (overflow) now.scale = shrunk(old.scale, factor, floor);
  if (!overflow && grows_now(old.cur_iter, old.last, window, false)) now.scale = old.scale * factor;
  if (overflow) now.last = old.cur_iter;
  now.cur_iter = old.cur_iter + 1;
  return now;
}

// A changed scale is rounded to fp32.
inline Scale torch_rule(const Scale old, bool overflow, double growth, double backoff,
                        int64_t interval) {
  Scale now = old;
  const int64_t clean = old.tracker + 1;
  const bool due = !overflow && clean == interval;
  const float grown = (float)(old.scale * growth);
  if (overflow) now.scale = (float)(old.scale * backoff);
  // An infinite scale would never come back: growth stops where fp32 ends.
  if (due && std::fabs(grown) < INFINITY) now.scale = grown;
  now.tracker = overflow || due ? 0 : clean;
  return now;
}

// The factor for gradients that carry a scale.
inline float unscale_and_clip(float norm, double scale, double max_norm) {
  const double c = ((double)norm / scale + 1e-6) / max_norm;
  const double combined = max_norm > 0.0 && c > 1.0 ? scale * c : scale;
  return (float)(1.0 / combined);
}

// The factor for those that carry none.
inline float clip_only(float norm, double max_norm) {
  const double k = max_norm / ((double)norm + 1e-6);
  return (float)(max_norm > 0.0 && k < 1.0 ? k : 1.0);
}

}  // namespace

extern "C" {

void dynamic_kernel(double* scale, int64_t* cur_iter, int64_t* last, int64_t* hysteresis,
                    int64_t* exhausted, const float* found_inf, const double* factor,
                    const int64_t* window, const double* floor, const int64_t* shift,
                    int64_t consecutive, int64_t raises, int64_t, int64_t) {
  Environment plain;
  const Scale old = {*scale, *cur_iter, *last, *hysteresis, 0, *exhausted};
  const Scale now = dynamic_rule(old, *found_inf != 0.0f, *factor, *window, *floor, *shift,
                                 consecutive, raises, false);
  *scale = now.scale;
  *cur_iter = now.cur_iter;
  *last = now.last;
  *hysteresis = now.hysteresis;
  *exhausted = now.exhausted;
}

void wrapper_kernel(double* scale, int64_t* cur_iter, int64_t* last, const float* found_inf,
                    const double* factor, const int64_t* window, const double* floor, int64_t,
                    int64_t) {
  Environment plain;
  const Scale old = {*scale, *cur_iter, *last, 0, 0, 0};
  const Scale now = wrapper_rule(old, *found_inf != 0.0f, *factor, *window, *floor);
  *scale = now.scale;
  *cur_iter = now.cur_iter;
  *last = now.last;
}

void torch_kernel(double* scale, int64_t* tracker, const float* found_inf, const double* growth,
                  const double* backoff, const int64_t* interval, int64_t, int64_t) {
  Environment plain;
  const Scale old = {*scale, 0, 0, 0, *tracker, 0};
  const Scale now = torch_rule(old, *found_inf != 0.0f, *growth, *backoff, *interval);
  *scale = now.scale;
  *tracker = now.tracker;
}

void clip_factor_kernel(const float* norm, const double* scale, const double* max_norm,
                        float* factor, int64_t, int64_t) {
  Environment plain;
  *factor = unscale_and_clip(*norm, *scale, *max_norm);
}

void clip_coefficient_kernel(const float* norm, const double* max_norm, float* factor, int64_t,
                             int64_t) {
  Environment plain;
  *factor = clip_only(*norm, *max_norm);
}
}
