// Adam and AdamW, gradient accumulation and exact sums of squares, on the CPU, in one pass each.
//
// Plain IEEE arithmetic, one rounding for each operation that is written, in the order of the
// definitions (`reference.adam`, `reference.accumulate`): the build must not contract a*b + c, nor
// reorder. No intrinsics: the compiler vectorises the loops for the instruction set that it is
// given, and every set has the same bits. Work is cut at fixed places, so that the number of threads
// changes nothing. 16-bit numbers are widened and rounded with integers, chunk by chunk, in cache.

#include <algorithm>
#include <cfenv>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

static_assert(FLT_EVAL_METHOD == 0, "fp32 must be computed in fp32");
static_assert(sizeof(float) == 4 && sizeof(double) == 8, "IEEE sizes");

namespace {

constexpr int64_t CHUNK = 4096;  // elements; that of the Triton kernels, whose tiles are the limbs'
constexpr int64_t BLOCK = 512;  // elements whose buffers stay in the first cache
constexpr int64_t GRAIN = 1 << 15;  // elements that are worth a thread
constexpr int LIMBS = 32, NONFINITE = 24, ORIGIN = 11;

enum Type : int64_t { FP32, FP16, BF16, INT16 };

template <class To, class From>
inline To bits_of(From from) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

// A rounding mode or flushed subnormals of the caller end here, and are his again afterwards.
struct Environment {
  fenv_t callers;
  Environment() {
    fegetenv(&callers);
    fesetenv(FE_DFL_ENV);
  }
  ~Environment() { fesetenv(&callers); }
};

inline float from_half(uint16_t half) {
  const uint32_t magnitude = (uint32_t)(half & 0x7FFF) << 13, sign = (uint32_t)(half & 0x8000) << 16;
  const uint32_t exponent = magnitude & 0x0F800000;
  // A subnormal is moved to the exponent of 2^-14, whose leading 1 is then taken away: exact.
  const float small = bits_of<float>(magnitude + 0x38800000) - bits_of<float>(0x38800000u);
  const uint32_t large = magnitude + (exponent == 0x0F800000 ? 0x70000000 : 0x38000000);
  return bits_of<float>(sign | (exponent == 0 ? bits_of<uint32_t>(small) : large));
}

inline uint16_t to_half(float x) {
  const uint32_t word = bits_of<uint32_t>(x), magnitude = word & 0x7FFFFFFF;
  // Below 2^-14 the sum with 0.5 rounds to multiples of 2^-24, those of a subnormal.
  const uint32_t small = bits_of<uint32_t>(bits_of<float>(magnitude) + 0.5f) - 0x3F000000;
  const uint32_t normal = (magnitude + 0xC8000FFF + ((magnitude >> 13) & 1)) >> 13;
  const uint32_t huge = magnitude > 0x7F800000 ? 0x7E00 : 0x7C00;
  const uint32_t finite = magnitude < 0x38800000 ? small : normal;
  return (uint16_t)((word >> 16 & 0x8000) | (magnitude >= 0x47800000 ? huge : finite));
}

inline float from_brain(uint16_t brain) { return bits_of<float>((uint32_t)brain << 16); }

inline uint16_t to_brain(float x) {
  const uint32_t word = bits_of<uint32_t>(x);
  const uint32_t rounded = (word + 0x7FFF + ((word >> 16) & 1)) >> 16;
  return (uint16_t)((word & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : rounded);
}

// Elements as fp32: where they lie, or widened into a buffer.
const float* widened(const void* from, Type type, int64_t at, int64_t count, float* buffer) {
  const uint16_t* words = (const uint16_t*)from + at;
  if (type == FP32) return (const float*)from + at;
  if (type == FP16) {
    for (int64_t i = 0; i < count; ++i) buffer[i] = from_half(words[i]);
  } else {
    for (int64_t i = 0; i < count; ++i) buffer[i] = from_brain(words[i]);
  }
  return buffer;
}

// Rounds fp32 elements into their place; does nothing where they lie there.
void rounded(const float* __restrict values, void* to, Type type, int64_t at, int64_t count) {
  uint16_t* __restrict words = (uint16_t*)to + at;
  if (type == FP16) {
    for (int64_t i = 0; i < count; ++i) words[i] = to_half(values[i]);
  } else if (type == BF16) {
    for (int64_t i = 0; i < count; ++i) words[i] = to_brain(values[i]);
  } else if (values != (const float*)to + at) {
    std::memcpy((float*)to + at, values, (size_t)count * sizeof(float));
  }
}

// Masters of weights and remainders of 16 bits (`reference.remainder`): into a buffer, and back.
void joined(const void* weights, const void* remainders, int64_t at, int64_t count, float* masters) {
  const uint16_t* upper = (const uint16_t*)weights + at;
  const int16_t* lower = (const int16_t*)remainders + at;
  for (int64_t i = 0; i < count; ++i)
    masters[i] = bits_of<float>(((uint32_t)upper[i] << 16) + (uint32_t)(int32_t)lower[i]);
}

void split(const float* masters, void* weights, void* remainders, int64_t at, int64_t count) {
  uint16_t* __restrict upper = (uint16_t*)weights + at;
  uint16_t* __restrict lower = (uint16_t*)remainders + at;
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t word = bits_of<uint32_t>(masters[i]);
    const uint32_t kept = (word & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC00000 : word;
    upper[i] = (uint16_t)((kept + 0x8000) >> 16);
    lower[i] = (uint16_t)kept;
  }
}

// Calls work(tensor, first element, count, thread) for every chunk, each thread a run of them.
template <class Row, class Work>
void for_chunks(const Row* rows, int64_t tensors, int64_t threads, Work work) {
  int64_t chunks = 0, elements = 0;
  for (int64_t t = 0; t < tensors; ++t) {
    chunks += (rows[t].numel + CHUNK - 1) / CHUNK;
    elements += rows[t].numel;
  }
  threads = std::max<int64_t>(1, std::min({threads, chunks, elements / GRAIN}));
  auto run = [&](int64_t thread) {
    Environment plain;
    const int64_t begin = chunks * thread / threads, end = chunks * (thread + 1) / threads;
    int64_t before = 0;
    for (int64_t t = 0; t < tensors && before < end; ++t) {
      const int64_t own = (rows[t].numel + CHUNK - 1) / CHUNK;
      for (int64_t c = std::max<int64_t>(begin - before, 0); c < std::min(end - before, own); ++c)
        work(t, c * CHUNK, std::min(CHUNK, rows[t].numel - c * CHUNK), thread);
      before += own;
    }
  };
  std::vector<std::thread> others;
  for (int64_t thread = 1; thread < threads; ++thread) others.emplace_back(run, thread);
  run(0);
  for (auto& other : others) other.join();
}

struct AdamScalars {
  float lr, wd, factor, b1, c1, b2, c2, eps, k1, k2;
};

template <bool DECOUPLED>
void adam_chunk(float* __restrict p, const float* __restrict g_, float* __restrict m_,
                float* __restrict v_, int64_t count, const AdamScalars s) {
  for (int64_t i = 0; i < count; ++i) {
    float g = g_[i] * s.factor;
    if (!DECOUPLED) g = g + s.wd * p[i];
    const float m = s.b1 * m_[i] + s.c1 * g;
    const float v = s.b2 * v_[i] + (s.c2 * g) * g;
    float u = (m / s.k1) / (std::sqrt(v / s.k2) + s.eps);
    if (DECOUPLED) u = u + s.wd * p[i];
    p[i] = p[i] - s.lr * u;
    m_[i] = m;
    v_[i] = v;
  }
}

// base^exponent in float64, lowest bit first: the order is part of the definition.
double power(double base, int64_t exponent) {
  double product = 1.0;
  for (; exponent > 0; exponent >>= 1) {
    if (exponent & 1) product = product * base;
    base = base * base;
  }
  return product;
}

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

constexpr int LANES = 16;  // sums that do not wait for one another

// Adds sums of integers below 2^53, times 2^exponent.
inline void add_lanes(int64_t* limbs, const double* sums, int64_t exponent) {
  int64_t total = 0;
  for (int lane = 0; lane < LANES; ++lane) total += (int64_t)sums[lane];
  add_at(limbs, total, exponent);
}

// Squares of a block whose numbers are integers times 2^unit, zeros apart, and below 2^(24 + unit):
// those of one lane, 2^5 of 2^9, add up below 2^53.
void add_direct(int64_t* limbs, const float* x, int64_t count, int64_t unit) {
  double sums[LANES] = {};
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES)
    for (int lane = 0; lane < LANES; ++lane) sums[lane] += (double)x[i + lane] * (double)x[i + lane];
  for (; i < count; ++i) sums[i % LANES] += (double)x[i] * (double)x[i];
  // Twice, since 2^-2unit may be no number.
  for (double& sum : sums) sum = sum * two_to(-unit) * two_to(-unit);
  add_lanes(limbs, sums, 2 * unit);
}

// The magnitude of a finite number.
inline float magnitude_of_half(uint16_t half) {
  const uint32_t word = (uint32_t)(half & 0x7FFF) << 13;
  const float small = bits_of<float>(word + 0x38800000) - bits_of<float>(0x38800000u);
  const float normal = bits_of<float>(word + 0x38000000);
  return word < 0x00800000 ? small : normal;
}

// Squares of a block of fp32 numbers below 2^top and not below 2^(top - 23), zeros apart: each is
// two integers of 23 bits.
void add_halves(int64_t* limbs, const float* x, int64_t count, int64_t top) {
  const float scale = (float)two_to(23 - top);
  double high[LANES] = {}, cross[LANES] = {}, low[LANES] = {};
  auto add = [&](float value, int lane) {
    const float scaled = std::fabs(value) * scale, whole = (float)(int32_t)scaled;
    const double h = whole, l = (scaled - whole) * 8388608.0f;
    high[lane] += h * h;
    cross[lane] += h * l;
    low[lane] += l * l;
  };
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES)
    for (int lane = 0; lane < LANES; ++lane) add(x[i + lane], lane);
  for (; i < count; ++i) add(x[i], (int)(i % LANES));
  add_lanes(limbs, high, 2 * (top - 23));
  add_lanes(limbs, cross, 2 * (top - 23) - 22);
  add_lanes(limbs, low, 2 * (top - 46));
}

// Squares of any finite numbers, as `fast.kernels._limbs.add_tile`: windows of 40 bits from the top
// down, each cut off by adding 1.5 * 2^(52 + 40 k), whose last bit weighs 2^(40 k); the cut is read
// off as an integer.
void add_windows(int64_t* limbs, const float* x, int64_t count, double largest) {
  const double square = largest * largest;
  int64_t k = (((int64_t)(bits_of<uint64_t>(square) >> 52) - 1023) + 1200) / 40 - 30;
  double rest[BLOCK];
  for (int64_t i = 0; i < count; ++i) rest[i] = (double)x[i] * (double)x[i];
  for (uint64_t left = 1; left != 0; --k) {
    const double c = 1.5 * bits_of<double>((uint64_t)(52 + 40 * k + 1023) << 52);
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
  Word most[CHUNK / BLOCK], least[CHUNK / BLOCK], largest = 0;
  for (int64_t at = 0; at < count; at += BLOCK) {
    Word high = 0, low = (Word)~0;
    for (int64_t i = at; i < std::min(at + BLOCK, count); ++i) {
      const Word word = (Word)(words[i] & MAGNITUDE);
      high = std::max(high, word);
      low = std::min(low, (Word)(word - 1));  // a zero is the largest of all
    }
    most[at / BLOCK] = high;
    least[at / BLOCK] = (Word)(low + 1);
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
    if (high == 0) continue;
    // Exponents; a subnormal has that of the smallest normal number.
    const int64_t top = std::max<int64_t>(high >> DIGITS, 1) - BIAS + 1;
    const int64_t bottom = std::max<int64_t>(low >> DIGITS, 1) - BIAS;
    float buffer[BLOCK];
    const float* x = buffer;
    if (TYPE == FP16)
      for (int64_t i = 0; i < size; ++i) buffer[i] = magnitude_of_half((uint16_t)words[at + i]);
    else
      x = widened(values, TYPE, first + at, size, buffer);
    if (sizeof(Word) == 2 && top - (bottom - DIGITS) <= 24) {
      add_direct(limbs, x, size, bottom - DIGITS);
      continue;
    }
    if (top - bottom <= 23 && top >= -100)
      add_halves(limbs, x, size, top);
    else
      add_windows(limbs, x, size, two_to(top));
  }
}

}  // namespace

extern "C" {

struct AdamRow {
  // copy: nullptr for none; remainders where its type is INT16
  void *param, *grad, *exp_avg, *exp_avg_sq, *copy;
  int64_t* step;
  int64_t numel, param_type, grad_type, copy_type;
};

// hyper: lr, beta1, beta2, eps, weight decay, factor. Advances the counters. As sums: gradients are
// taken for sums that began at 0.0, which are never -0.0.
void twinstep_adam(const AdamRow* rows, int64_t tensors, const double* hyper, int64_t decoupled,
                   int64_t bias_correction, int64_t as_sums, int64_t threads) {
  std::vector<AdamScalars> scalars(tensors);
  {
    Environment plain;
    const double b1 = hyper[1], b2 = hyper[2];
    const AdamScalars s = {(float)hyper[0], (float)hyper[4], (float)hyper[5], (float)b1,
                           (float)(1.0 - b1), (float)b2, (float)(1.0 - b2), (float)hyper[3],
                           1.0f, 1.0f};
    for (int64_t t = 0; t < tensors; ++t) {
      const int64_t step = ++*rows[t].step;
      scalars[t] = s;
      if (bias_correction) {
        scalars[t].k1 = (float)(1.0 - power(b1, step));
        scalars[t].k2 = (float)(1.0 - power(b2, step));
      }
    }
  }
  for_chunks(rows, tensors, threads, [&](int64_t t, int64_t begin, int64_t length, int64_t) {
    const AdamRow& row = rows[t];
    float params[BLOCK], grads[BLOCK];
    for (int64_t at = begin; at < begin + length; at += BLOCK) {
      const int64_t count = std::min(BLOCK, begin + length - at);
      float* p = params;
      if (row.copy_type == INT16)
        joined(row.param, row.copy, at, count, p);
      else
        p = const_cast<float*>(widened(row.param, (Type)row.param_type, at, count, params));
      const float* g = widened(row.grad, (Type)row.grad_type, at, count, grads);
      if (as_sums) {
        for (int64_t i = 0; i < count; ++i) grads[i] = g[i] + 0.0f;
        g = grads;
      }
      float *m = (float*)row.exp_avg + at, *v = (float*)row.exp_avg_sq + at;
      (decoupled ? adam_chunk<true> : adam_chunk<false>)(p, g, m, v, count, scalars[t]);
      if (row.copy_type == INT16) {
        split(p, row.param, row.copy, at, count);
        continue;
      }
      rounded(p, row.param, (Type)row.param_type, at, count);
      if (row.copy) rounded(p, row.copy, (Type)row.copy_type, at, count);
    }
  });
}

struct SumRow {
  void *sum, *grad;
  int64_t numel, sum_type, grad_type;
};

void twinstep_accumulate(const SumRow* rows, int64_t tensors, int64_t threads) {
  for_chunks(rows, tensors, threads, [&](int64_t t, int64_t at, int64_t count, int64_t) {
    const SumRow& row = rows[t];
    float sums[CHUNK], grads[CHUNK];
    float* a = const_cast<float*>(widened(row.sum, (Type)row.sum_type, at, count, sums));
    const float* g = widened(row.grad, (Type)row.grad_type, at, count, grads);
    for (int64_t i = 0; i < count; ++i) a[i] = a[i] + g[i];
    rounded(a, row.sum, (Type)row.sum_type, at, count);
  });
}

struct SquareRow {
  void* values;
  int64_t numel, type;
};

// Adds the squares of all elements to int64[32], laid out as in `fast.kernels._limbs`.
void twinstep_add_squares(const SquareRow* rows, int64_t tensors, int64_t* limbs, int64_t threads) {
  threads = std::max<int64_t>(threads, 1);
  std::vector<int64_t> own(threads * LIMBS, 0);
  for_chunks(rows, tensors, threads, [&](int64_t t, int64_t at, int64_t count, int64_t thread) {
    int64_t* sums = own.data() + thread * LIMBS;
    const void* values = rows[t].values;
    if (rows[t].type == FP32) add_squares<uint32_t, FP32, 23>(sums, values, at, count);
    if (rows[t].type == FP16) add_squares<uint16_t, FP16, 10>(sums, values, at, count);
    if (rows[t].type == BF16) add_squares<uint16_t, BF16, 7>(sums, values, at, count);
  });
  for (size_t i = 0; i < own.size(); ++i) limbs[i % LIMBS] += own[i];
}

void twinstep_round(double value, float* to) {
  Environment plain;
  *to = (float)value;
}
}
