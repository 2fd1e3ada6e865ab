// Numbers, pieces of work and pointer tables of the kernels on the CPU.
//
// Plain IEEE arithmetic, one rounding for each operation that is written, in the order of the
// definitions in `reference`: the build must not contract a*b + c, nor reorder. The compiler vectorises
// the loops for the instruction set that it is given, and every set has the same bits. Intrinsics are
// left to what no loop says: conversions of fp16, and stores past the caches. Work is cut at fixed
// places, so that the number of threads changes nothing. 16-bit numbers are widened and rounded block
// by block, in cache.
#pragma once

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

static_assert(FLT_EVAL_METHOD == 0, "fp32 must be computed in fp32");
static_assert(sizeof(float) == 4 && sizeof(double) == 8, "IEEE sizes");

namespace {

constexpr int64_t CHUNK = 4096;  // elements; that of the Triton kernels, whose tiles are the limbs'
constexpr int64_t BLOCK = 512;  // elements whose buffers stay in the first cache
constexpr int64_t RUN = 64;  // chunks that a thread takes at once
constexpr int64_t GRAIN = 1 << 15;  // elements that are worth a thread
constexpr int64_t LINE = 64;  // bytes of a line of a cache

// In the order of `fast.runtime.native.NUMBERS`.
enum Type : int64_t { FP32, FP16, BF16, INT16, INT32 };

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
    int64_t i = 0;
#if defined(__F16C__)
    for (const int64_t eights = count - count % 8; i != eights; i += 8)
      _mm256_storeu_ps(buffer + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(words + i))));
#endif
    for (; i < count; ++i) buffer[i] = from_half(words[i]);
  } else {
    for (int64_t i = 0; i < count; ++i) buffer[i] = from_brain(words[i]);
  }
  return buffer;
}

// Rounds fp32 elements into their place; does nothing where they lie there.
void rounded(const float* __restrict values, void* to, Type type, int64_t at, int64_t count) {
  uint16_t* __restrict words = (uint16_t*)to + at;
  if (type == FP16) {
    int64_t i = 0;
#if defined(__F16C__)
    for (const int64_t eights = count - count % 8; i != eights; i += 8)
      _mm_storeu_si128((__m128i*)(words + i), _mm256_cvtps_ph(_mm256_loadu_ps(values + i), 0));
#endif
    for (; i < count; ++i) words[i] = to_half(values[i]);
  } else if (type == BF16) {
    for (int64_t i = 0; i < count; ++i) words[i] = to_brain(values[i]);
  } else if (values != (const float*)to + at) {
    std::memcpy((float*)to + at, values, (size_t)count * sizeof(float));
  }
}

#if defined(__AVX512F__)
using Wide = __m512i;
inline void store_past_caches(Wide* to, Wide word) { _mm512_stream_si512(to, word); }
inline void end_streams() { _mm_sfence(); }
#elif defined(__SSE2__)
using Wide = __m128i;
inline void store_past_caches(Wide* to, Wide word) { _mm_stream_si128(to, word); }
inline void end_streams() { _mm_sfence(); }
#else
using Wide = uint64_t;
inline void store_past_caches(Wide* to, Wide word) { *to = word; }
inline void end_streams() {}
#endif

// The same past the caches, which would first read what is only written: for a block of 16-bit
// numbers. `end_streams` comes after the last, before other threads read.
inline void streamed(const float* values, void* to, Type type, int64_t at, int64_t count) {
  Wide* place = (Wide*)((uint16_t*)to + at);
  if (type == FP32 || count != BLOCK || (uintptr_t)place % LINE != 0)
    return rounded(values, to, type, at, count);
  alignas(LINE) float words[BLOCK];
  rounded(values, words, type, 0, count);
  const Wide* from = (const Wide*)words;
  for (size_t i = 0; i < BLOCK * sizeof(uint16_t) / sizeof(Wide); ++i)
    store_past_caches(place + i, from[i]);
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

// Calls work(part, thread) for every part. A thread takes the next run of them when it is done with
// one, so that none waits long for one whose core was taken away.
template <class Work>
void for_parts(int64_t parts, int64_t threads, Work work) {
  threads = std::max<int64_t>(1, std::min(threads, parts));
  const int64_t size = std::max<int64_t>(1, std::min<int64_t>(RUN, parts / threads / 4));
  std::atomic<int64_t> next{0};
  auto run = [&](int64_t thread) {
    Environment plain;
    for (int64_t first; (first = next.fetch_add(size)) < parts;)
      for (int64_t part = first; part < std::min(first + size, parts); ++part) work(part, thread);
  };
  std::vector<std::thread> others;
  for (int64_t thread = 1; thread < threads; ++thread) others.emplace_back(run, thread);
  run(0);
  for (auto& other : others) other.join();
}

// Threads that chunks of some elements each are worth.
inline int64_t worth(int64_t threads, int64_t chunks, int64_t elements = CHUNK) {
  return std::min(threads, chunks * elements / GRAIN);
}

// Calls work(first element, count) for every chunk of one tensor.
template <class Work>
void for_chunks(int64_t numel, int64_t threads, Work work) {
  const int64_t chunks = (numel + CHUNK - 1) / CHUNK;
  for_parts(chunks, worth(threads, chunks), [&](int64_t chunk, int64_t) {
    work(chunk * CHUNK, std::min(CHUNK, numel - chunk * CHUNK));
  });
}

// A pointer table (`fast.kernels._layout`) of rows of addresses.
struct Table {
  const int64_t* words;
  int64_t tensors, rows;

  void* address(int64_t row, int64_t tensor) const { return (void*)words[row * tensors + tensor]; }
  int64_t numel(int64_t tensor) const { return words[rows * tensors + tensor]; }
  int64_t slot(int64_t tensor) const { return words[(rows + 2) * tensors + tensor]; }
  const int64_t* pair(int64_t index) const { return words + (rows + 3) * tensors + 2 * index; }

  // Calls work(tensor, first element, count, thread) for every chunk; empty ones have count 0.
  template <class Work>
  void for_chunks(int64_t chunks, int64_t size, int64_t threads, Work work) const {
    for_parts(chunks, worth(threads, chunks, size), [&](int64_t index, int64_t thread) {
      const int64_t tensor = pair(index)[0], first = pair(index)[1] * size;
      work(tensor, first, std::max<int64_t>(std::min(size, numel(tensor) - first), 0), thread);
    });
  }
};

// The counter of a tensor: `steps` is that counter, or a table of addresses.
inline int64_t* counter_of(int64_t* steps, int64_t tensor, int64_t is_table) {
  return is_table ? (int64_t*)steps[tensor] : steps;
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

}  // namespace
