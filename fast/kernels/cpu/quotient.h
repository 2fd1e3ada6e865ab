// Many numbers divided by one, rounded as a division rounds, by what takes less time than one.
#pragma once

#include "common.h"

namespace {

// Whether magnitudes are from 2^-100 to 2^100: below, rests of quotients are cut off; above, the
// quotients overflow. A zero is outside: its sign would be lost.
struct Range {
  static constexpr uint32_t LOWEST = 0x0D800000, HIGHEST = 0x71800000;
  uint32_t farthest = 0;

  void meet(float x) {
    farthest = std::max(farthest, (bits_of<uint32_t>(x) & 0x7FFFFFFF) - LOWEST);
  }
  // Divisors: 1 - beta^t.
  bool suits(float k1, float k2) const {
    return farthest <= HIGHEST - LOWEST && std::min(k1, k2) >= 0x1p-24f && std::max(k1, k2) <= 1.0f;
  }
};

struct Divided {
  float k;
  explicit Divided(float divisor) : k(divisor) {}
  float operator()(float x) const { return x / k; }
};

#if defined(__FMA__) || defined(__AVX512F__)
// upper + lower is 1 / k to 2^-48 of it, and `near` less than an ulp from x / k; what is left of x is
// exact, and adding its quotient rounds to nearest, because upper is 1 / k to nearest (Markstein, IBM
// Journal of Research and Development 34, 1990).
struct Multiplied {
  float k, upper, lower;
  explicit Multiplied(float divisor)
      : k(divisor), upper(1.0f / k), lower(__builtin_fmaf(-upper, k, 1.0f) / k) {}
  float operator()(float x) const {
    const float near = __builtin_fmaf(x, upper, x * lower);
    return __builtin_fmaf(__builtin_fmaf(-near, k, x), upper, near);
  }
};
#else
using Multiplied = Divided;
#endif

}  // namespace
