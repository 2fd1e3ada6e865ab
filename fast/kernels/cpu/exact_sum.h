// Exact sums of squares, or of magnitudes, as integers: the limbs of `fast.kernels._limbs`.
#pragma once

#include "common.h"

namespace {

constexpr int LIMBS = 24, NONFINITE = 24, LARGEST = 25, TOLD = 26, PADDED = 32, ORIGIN = 11;
constexpr uint32_t INFINITY_BITS = 0x7F800000;

// Adds value * 2^exponent to limbs of 32 bits.
inline void add_at(int64_t* limbs, int64_t value, int64_t exponent) {
  const int64_t bit = exponent + 32 * ORIGIN, limb = bit >> 5, shift = bit & 31;
  const int64_t low = (value & 0xFFFFFFFF) << shift, high = (value >> 32) * (int64_t(1) << shift);
  limbs[limb] += low & 0xFFFFFFFF;
  limbs[limb + 1] += (int64_t)((uint64_t)low >> 32) + (high & 0xFFFFFFFF);
  limbs[limb + 2] += high >> 32;
}

inline double two_to(int64_t exponent) {
  return bits_of<double>((uint64_t)(exponent + 1023) << 52);
}

// Adding this to numbers below 2^51 units cuts off what is below a unit, 2^exponent; its bits count
// units.
inline double cut_at(int64_t exponent) { return 1.5 * two_to(exponent + 52); }

// x * x + y for an fp32 number, whose square is exact: one rounding, fused or not.
inline double square_and(double x, double y) {
#if defined(__FMA__) || defined(__AVX512F__)
  return __builtin_fma(x, x, y);
#else
  return x * x + y;
#endif
}

// Squares of a block whose numbers are integers times 2^unit below 2^(24 + unit): each lane's sum stays
// below 2^53 units, so that it is exact in any order.
template <class Number>
void add_direct(int64_t* limbs, int64_t count, int64_t unit, Number number) {
  constexpr int64_t LANES = 32;
  static_assert(BLOCK / LANES <= 32 && LANES <= 32, "2^48 units each");
  double sums[LANES] = {}, rest = 0;
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES)
    for (int64_t lane = 0; lane < LANES; ++lane)
      sums[lane] = square_and((double)number(i + lane), sums[lane]);
  for (; i < count; ++i) rest = square_and((double)number(i), rest);
  const double units = two_to(-2 * unit);
  int64_t total = (int64_t)(rest * units);
  for (double sum : sums) total += (int64_t)(sum * units);
  add_at(limbs, total, 2 * unit);
}

// The magnitude of a finite fp16 number that is neither zero nor subnormal, and of any finite one.
inline float magnitude_of_normal(uint16_t half) {
  return bits_of<float>(((uint32_t)(half & 0x7FFF) << 13) + 0x38000000);
}
inline float magnitude_of_half(uint16_t half) {
  const uint32_t word = (uint32_t)(half & 0x7FFF) << 13;
  const float small = bits_of<float>(word + 0x38800000) - bits_of<float>(0x38800000u);
  return word < 0x00800000 ? small : magnitude_of_normal(half);
}

// Squares of a block of fp32 numbers below 2^top and not below 2^(top - 25), zeros apart: in two parts.
void add_halves(int64_t* limbs, const float* x, int64_t count, int64_t top) {
  const int64_t upper = 2 * top - 48, lower = 2 * top - 96;
  const double c = cut_at(upper), d = cut_at(lower), both = c + d;
  uint64_t high = 0, low = 0;
  for (int64_t i = 0; i < count; ++i) {
    // What the head leaves is square - (head - c), and both - head is exact.
    const double number = (double)x[i], head = square_and(number, c);
    high += bits_of<uint64_t>(head);
    low += bits_of<uint64_t>(square_and(number, both - head));
  }
  add_at(limbs, (int64_t)(high - (uint64_t)count * bits_of<uint64_t>(c)), upper);
  add_at(limbs, (int64_t)(low - (uint64_t)count * bits_of<uint64_t>(d)), lower);
}

// Squares or magnitudes of any finite numbers, as `fast.kernels._limbs.add_tile`: windows of 40 bits
// from the top down, each cut off by adding 1.5 * 2^(52 + 40 k), whose last bit weighs 2^(40 k); the
// cut is read off as an integer. `largest`: not less than any of what is added.
template <bool SQUARED>
void add_windows(int64_t* limbs, const float* x, int64_t count, double largest) {
  int64_t k = (((int64_t)(bits_of<uint64_t>(largest) >> 52) - 1023) + 1200) / 40 - 30;
  double rest[BLOCK];
  for (int64_t i = 0; i < count; ++i)
    rest[i] = SQUARED ? (double)x[i] * (double)x[i] : std::fabs((double)x[i]);
  for (uint64_t left = 1; left != 0; --k) {
    const double c = cut_at(40 * k);
    const int64_t zero = bits_of<int64_t>(c);
    int64_t total = 0;
    left = 0;
    for (int64_t i = 0; i < count; ++i) {
      const double shifted = rest[i] + c;
      total += bits_of<int64_t>(shifted) - zero;
      rest[i] = rest[i] - (shifted - c);
      left |= bits_of<uint64_t>(rest[i]) << 1;
    }
    add_at(limbs, total, 40 * k);
  }
}

// Adds the squares of a chunk, or counts it as not finite. A word of 16 or 32 bits has a sign, an
// exponent and DIGITS bits.
template <class Word, Type TYPE, int DIGITS>
void add_squares(int64_t* limbs, const void* values, int64_t first, int64_t count) {
  constexpr int BITS = 8 * sizeof(Word) - 1, BIAS = (1 << (BITS - DIGITS - 1)) - 1;
  constexpr Word MAGNITUDE = (Word)((1ull << BITS) - 1);
  constexpr Word INFINITE = (Word)(MAGNITUDE >> DIGITS << DIGITS);
  const Word* words = (const Word*)values + first;
  Word most[CHUNK / BLOCK], least[CHUNK / BLOCK], lowest[CHUNK / BLOCK], largest = 0;
  for (int64_t at = 0; at < count; at += BLOCK) {
    Word high = 0, low = (Word)~0, all = (Word)~0;
    for (int64_t i = at; i < std::min(at + BLOCK, count); ++i) {
      const Word word = (Word)(words[i] & MAGNITUDE);
      high = std::max(high, word);
      low = std::min(low, (Word)(word - 1));  // a zero is the largest of all
      all = std::min(all, word);
    }
    most[at / BLOCK] = high;
    least[at / BLOCK] = (Word)(low + 1);
    lowest[at / BLOCK] = all;
    largest = std::max(largest, high);
  }
  if (largest >= INFINITE) {
    bool infinite = false;
    for (int64_t i = 0; i < count; ++i) infinite |= (words[i] & MAGNITUDE) == INFINITE;
    limbs[NONFINITE] += (int64_t)infinite + (int64_t(largest > INFINITE) << 32);
    return;
  }
  for (int64_t at = 0; at < count; at += BLOCK) {
    const int64_t size = std::min(BLOCK, count - at);
    const Word high = most[at / BLOCK], low = least[at / BLOCK];
    if (sizeof(Word) == 4)  // the first walk over the next chunk finds it in a cache
      for (int64_t line = 0; line < size; line += LINE / 4)
        __builtin_prefetch((const void*)((uintptr_t)(words + at + line) + CHUNK * sizeof(Word)));
    if (high == 0) continue;
    // Exponents; a subnormal has that of the smallest normal number.
    const int64_t top = std::max<int64_t>(high >> DIGITS, 1) - BIAS + 1;
    const int64_t bottom = std::max<int64_t>(low >> DIGITS, 1) - BIAS;
    if (sizeof(Word) == 2 && top - (bottom - DIGITS) <= 24) {
      const int64_t unit = bottom - DIGITS;
      const uint16_t* halves = (const uint16_t*)words + at;
      if (TYPE == BF16)
        add_direct(limbs, size, unit, [=](int64_t i) { return from_brain(halves[i]); });
      else if (lowest[at / BLOCK] >> DIGITS)
        add_direct(limbs, size, unit, [=](int64_t i) { return magnitude_of_normal(halves[i]); });
      else
        add_direct(limbs, size, unit, [=](int64_t i) { return magnitude_of_half(halves[i]); });
      continue;
    }
    float buffer[BLOCK];
    const float* x = widened(values, TYPE, first + at, size, buffer);
    if (top - bottom <= 25)
      add_halves(limbs, x, size, top);
    else
      add_windows<true>(limbs, x, size, two_to(2 * top));
  }
}

// Adds the squares of a chunk of any type.
inline void add_squares(int64_t* limbs, const void* values, Type type, int64_t first, int64_t count) {
  if (type == FP32) add_squares<uint32_t, FP32, 23>(limbs, values, first, count);
  if (type == FP16) add_squares<uint16_t, FP16, 10>(limbs, values, first, count);
  if (type == BF16) add_squares<uint16_t, BF16, 7>(limbs, values, first, count);
}

// Bits of the largest magnitude, among which infinity and NaN come last.
inline uint32_t largest_bits(const float* x, int64_t count) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < count; ++i)
    largest = std::max(largest, bits_of<uint32_t>(x[i]) & 0x7FFFFFFF);
  return largest;
}

// Adds the magnitudes of a block, or counts it as not finite.
inline void add_magnitudes(int64_t* limbs, const float* x, int64_t count) {
  const uint32_t largest = largest_bits(x, count);
  if (largest >= INFINITY_BITS) {
    bool infinite = false;
    for (int64_t i = 0; i < count; ++i)
      infinite |= (bits_of<uint32_t>(x[i]) & 0x7FFFFFFF) == INFINITY_BITS;
    limbs[NONFINITE] += (int64_t)infinite + (int64_t(largest > INFINITY_BITS) << 32);
  } else if (largest != 0) {
    add_windows<false>(limbs, x, count, (double)bits_of<float>(largest));
  }
}

// Adds one sum to another that several threads add to.
inline void add_limbs(int64_t* limbs, const int64_t* own) {
  for (int i = 0; i <= NONFINITE; ++i)
    if (own[i] != 0) __atomic_fetch_add(limbs + i, own[i], __ATOMIC_RELAXED);
}

// The sum of what is finite, rounded once to the nearest even float64.
inline double round_limbs(const int64_t* limbs) {
  uint64_t digits[LIMBS];
  int64_t carry = 0;
  int top = -1;
  for (int limb = 0; limb < LIMBS; ++limb) {
    const int64_t value = limbs[limb] + carry;
    digits[limb] = (uint64_t)value & 0xFFFFFFFF;
    carry = value >> 32;
    if (digits[limb] != 0) top = limb;
  }
  if (top < 0) return 0.0;
  const uint64_t d1 = top > 0 ? digits[top - 1] : 0, d2 = top > 1 ? digits[top - 2] : 0;
  uint64_t below = 0;
  for (int limb = 0; limb < top - 2; ++limb) below |= digits[limb];
  const int shift = __builtin_clz((uint32_t)digits[top]);
  // The leading 1 is bit 63: the conversion drops 11 bits, and the lowest stands for all below.
  uint64_t high = ((digits[top] << 32 | d1) << shift) | (d2 >> (32 - shift));
  high |= ((d2 << shift & 0xFFFFFFFF) | below) != 0;
  return (double)high * two_to(32 * (top - 1 - ORIGIN) - shift);
}

// As fp32: any NaN gives NaN, otherwise any infinity gives infinity.
inline float unless_nonfinite(const int64_t* limbs, double value) {
  const int64_t nonfinite = limbs[NONFINITE];
  if (nonfinite >> 32 != 0) return NAN;
  return nonfinite != 0 ? INFINITY : (float)value;
}

inline float norm_of(const int64_t* limbs) {
  return unless_nonfinite(limbs, std::sqrt(round_limbs(limbs)));
}

inline float sum_of(const int64_t* limbs) { return unless_nonfinite(limbs, round_limbs(limbs)); }

inline float largest_of(const int64_t* limbs) { return bits_of<float>((uint32_t)limbs[LARGEST]); }

}  // namespace
